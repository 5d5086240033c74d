"""`report.html` of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import yaml

from .. import __version__
from ..page import Page
from ..precision import FILE as PRECISION_FILE
from ..precision import read_rows
from ..precision.advice import kind_medians, summaries, worst

if TYPE_CHECKING:
    from .results import ArmResult
    from .verdict import Verdict

__all__ = ["write_page"]

LISTED_LAYERS = 10
WORDS = {"bf16": "bf16", "coat": "COAT"}
SPREAD = "bf16's spread over seeds"
HOW = (
    "Each seed was trained twice, in bf16 and with COAT, from the same LoRA start, on the same photos in the same "
    "order, with the same noise. Their loss was measured on photos that neither had been trained on, with noise that "
    "is the same for all: at the end of training, each in its own precision, and with both LoRAs loaded into the bf16 "
    "model, as other programs do. The gap is COAT's loss less bf16's. Lossless means: both times the 95 % confidence "
    "interval of the mean gap lies inside ± the standard deviation of bf16's own loss over its seeds. A lower loss "
    "than bf16's by more than that is a difference too."
)


def write_page(verdict: Verdict) -> Path:
    """Write the page beside `verdict.json`."""
    study = verdict.study
    page = Page(f"Is COAT lossless on {study.job.name}?", f"coat-flux verify, {study.job.file}, {study.steps} steps")
    page.paragraph(verdict.sentence[:1].upper() + verdict.sentence[1:] + ".")
    for note in verdict.notes:
        page.paragraph(note)
    page.paragraph(HOW)
    _runs(page, verdict)
    _curves(page, verdict)
    _cosines(page, verdict)
    _precision(page, verdict)
    _samples(page, verdict)
    page.heading("Photos not trained on")
    page.paragraph(", ".join(study.held_out.names))
    page.heading("COAT options")
    page.code(yaml.safe_dump({"coat": study.job.coat.to_dict()}, sort_keys=False, allow_unicode=True))
    page.paragraph(f"coat-flux {__version__}")
    return page.write(verdict.page_path)


def _runs(page: Page, verdict: Verdict) -> None:
    scores = verdict.scores
    page.heading("Held-out loss at the end")
    header = [
        "seed",
        "bf16",
        "COAT",
        "gap",
        "COAT, own precision",
        "bf16 s/it",
        "COAT s/it",
        "bf16 GB",
        "COAT GB",
    ]
    rows: list[list[object]] = []
    for bf16, coat in zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False):
        row: list[object] = [bf16.seed, None, None, None]
        if scores is not None:
            theirs, ours = scores.losses[bf16.name], scores.losses[coat.name]
            row[1:] = [f"{theirs:.6f}", f"{ours:.6f}", f"{ours - theirs:+.6f}"]
        rows.append([*row, f"{coat.final_own:.6f}", *map(_pace, (bf16, coat)), *map(_peak, (bf16, coat))])
    page.table(header, rows)
    judged = [("LoRA in the bf16 model", verdict.in_bf16), ("each run in its own precision", verdict.in_own)]
    page.table(
        ["held-out loss", "mean gap", "95 % interval", "bf16's spread over seeds", "outcome"],
        [
            [where, f"{one.gap:+.6f}", f"{one.low:+.6f} to {one.high:+.6f}", f"±{one.spread:.6f}", one.outcome]
            for where, one in judged
            if one is not None
        ],
    )
    if scores is not None:
        page.paragraph(f"Loss of the model without a LoRA: {scores.base:.6f}.")


def _pace(run: ArmResult) -> str | None:
    return f"{1 / run.steps_per_s:.3f}" if run.steps_per_s else None


def _peak(run: ArmResult) -> str | None:
    return None if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}"


def _curves(page: Page, verdict: Verdict) -> None:
    page.heading("Held-out loss over the run, each in its own precision")
    arms = {WORDS[name]: [run.curve for run in verdict.arm(name)] for name in WORDS}
    arms = {name: curves for name, curves in arms.items() if curves}
    means, bands = {}, {}
    for name, curves in arms.items():
        columns = [[loss for _, loss in points] for points in zip(*curves, strict=True)]
        steps = [step for step, _ in curves[0]]
        means[name] = [(step, fmean(losses)) for step, losses in zip(steps, columns, strict=True)]
        if len(curves) > 1:
            sides = [(fmean(losses), stdev(losses)) for losses in columns]
            bands[name] = [(step, mean - s, mean + s) for step, (mean, s) in zip(steps, sides, strict=True)]
    page.curves("Mean over seeds, band: ± standard deviation", means, x="step", y="loss", band=bands)
    every = {f"{WORDS[run.arm]} seed {run.seed}": run.curve for run in verdict.runs}
    page.curves("Every run", every, x="step", y="loss")
    _gaps(page, verdict, bands)


def _gaps(page: Page, verdict: Verdict, bands: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """COAT less bf16 over the run, in the band of bf16's spread."""
    spread = [(step, (low - high) / 2, (high - low) / 2) for step, low, high in bands.get(WORDS["bf16"], ())]
    gaps: dict[str, list[tuple[float, float]]] = {}
    if spread:
        gaps[SPREAD] = [(step, 0.0) for step, _, _ in spread]
    for bf16, coat in zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False):
        pairs = zip(bf16.curve, coat.curve, strict=True)
        gaps[f"seed {bf16.seed}"] = [(step, ours - theirs) for (step, theirs), (_, ours) in pairs]
    band = {SPREAD: spread} if spread else {}
    page.curves("Gap: COAT's loss less bf16's, same seed", gaps, x="step", y="loss difference", band=band)


def _cosines(page: Page, verdict: Verdict) -> None:
    scores = verdict.scores
    if scores is None:
        return
    page.heading("How alike the LoRAs are")
    page.paragraph(
        "Cosine of a bf16 LoRA and the COAT LoRA of the same seed, beside that of two bf16 LoRAs that differ in the "
        "seed alone; 1 is the same direction. Where COAT's twin is nearer than another seed, what COAT changes is less "
        "than what the seed does."
    )
    grams = {
        "weight changes B·A, all layers": verdict.weights[""],
        "what the LoRA adds to the model's output": scores.changes,
        "the model's output": scores.outputs,
    }
    page.table(
        ["", "bf16 and COAT, same seed", "two bf16 seeds"],
        [[name, *map(_cosine, verdict.cosines(gram))] for name, gram in grams.items()],
    )
    layers = [(name, *verdict.cosines(gram)) for name, gram in verdict.weights.items() if name]
    known = sorted((row for row in layers if row[1] is not None), key=lambda row: row[1] or 0.0)
    page.heading(f"The {min(LISTED_LAYERS, len(known))} layers that differ most", 3)
    page.table(
        ["layer", "bf16 and COAT, same seed", "two bf16 seeds"],
        [[name, _cosine(pair), _cosine(seeds)] for name, pair, seeds in known[:LISTED_LAYERS]],
    )


def _cosine(value: float | None) -> str | None:
    return None if value is None else f"{value:.5f}"


def _precision(page: Page, verdict: Verdict) -> None:
    """What the FP8 casts of the COAT runs lost, where they kept a record of it."""
    files = [run.lora.parent / PRECISION_FILE for run in verdict.arm("coat")]
    found = summaries(row for path in files if path.exists() for row in read_rows(path))
    if not found:
        return
    page.heading("Precision of the FP8 tensors")
    page.table(["tensors", "median SQNR, dB"], [[kind, f"{value:.1f}"] for kind, value in kind_medians(found).items()])
    page.table(
        ["layers furthest below the median", "tensors", "SQNR, dB", "below the median, dB"],
        [[row.layer, row.kind, f"{row.sqnr_db:.1f}", f"{row.below_median_db:.1f}"] for row in worst(found)],
    )


def _samples(page: Page, verdict: Verdict) -> None:
    pairs = [
        pair for pair in zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False) if all(x.samples for x in pair)
    ]
    if not pairs:
        return
    prompts = [item.prompt for item in verdict.study.job.sample.items()]
    page.heading("Samples: bf16, COAT")
    for number, prompt in enumerate(prompts):
        items = [
            (f"{WORDS[run.arm]} seed {run.seed}", run.samples[number])
            for pair in pairs
            for run in pair
            if number < len(run.samples)
        ]
        page.images(prompt, items, columns=2)
