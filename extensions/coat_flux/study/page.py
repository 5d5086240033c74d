"""`report.html` of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import yaml

from .. import __version__
from ..data.captions import inject_trigger
from ..pages.html import Page, Tone
from ..watch.advice import kind_medians, summaries, worst
from ..watch.records import FILE as PRECISION_FILE
from ..watch.records import read_rows
from .judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED

if TYPE_CHECKING:
    from .results import ArmResult
    from .scoring import Scores
    from .verdict import Verdict

__all__ = ["write_page"]

LISTED_LAYERS = 10
WORDS = {"bf16": "bf16", "coat": "COAT"}
SPREAD = "bf16's spread over seeds"
TONES: dict[str, Tone] = {LOSSLESS: "good", NOT_LOSSLESS: "bad", UNDECIDED: "open"}
HOW = (
    "Each seed was trained twice, in bf16 and with COAT, from the same initial LoRA, on the same photos in the same "
    "order, with the same noise. The loss was measured on photos that neither run was trained on, with noise that is "
    "the same for all: at the end of training, each run in its own precision, and with both LoRAs loaded into the bf16 "
    "model, as other programs do. The gap is COAT's loss minus bf16's. Lossless means that in both cases the 95% "
    "confidence interval of the mean gap is within ± the standard deviation of bf16's own loss over its seeds. A loss "
    "that is lower than bf16's by more than that is a difference, too."
)


def write_page(verdict: Verdict) -> Path:
    """Write the page beside `verdict.json`."""
    study = verdict.study
    page = Page(f"Is COAT lossless on {study.job.name}?", f"coat-flux verify, {study.job.file}, {study.steps} steps")
    page.verdict(f"{verdict.sentence[:1].upper()}{verdict.sentence[1:]}.", TONES[verdict.judgement.outcome])
    for note in verdict.notes:
        page.paragraph(note)
    _outcomes(page, verdict)
    _samples(page, verdict)
    _loras(page, verdict)
    _curves(page, verdict)
    page.heading("Details")
    with page.details("How it is judged"):
        page.paragraph(HOW)
    with page.details("Every run"):
        _runs(page, verdict)
    if verdict.scores is not None:
        with page.details("How alike the LoRAs are"):
            _cosines(page, verdict, verdict.scores)
    _precision(page, verdict)
    with page.details("Photos not trained on"):
        page.paragraph(", ".join(study.held_out.names))
    with page.details("COAT options"):
        page.code(yaml.safe_dump({"coat": study.job.coat.to_dict()}, sort_keys=False, allow_unicode=True))
    page.missing(f"coat-flux {__version__}")
    return page.write(verdict.page_path)


def _outcomes(page: Page, verdict: Verdict) -> None:
    judged = [("LoRA in the bf16 model", verdict.in_bf16), ("each run in its own precision", verdict.in_own)]
    rows = [
        [where, f"{one.gap:+.6f}", f"{one.low:+.6f} to {one.high:+.6f}", f"±{one.spread:.6f}", one.outcome]
        for where, one in judged
        if one is not None
    ]
    if rows:
        page.table(["held-out loss", "mean gap", "95% interval", SPREAD, "outcome"], rows)


def _samples(page: Page, verdict: Verdict) -> None:
    job = verdict.study.job
    pairs = [
        pair for pair in zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False) if all(x.samples for x in pair)
    ]
    if not pairs:
        return
    page.heading("Samples")
    for number, item in enumerate(job.sample.items()):
        cells = [
            (f"seed {run.seed}", run.samples[number]) for pair in pairs for run in pair if number < len(run.samples)
        ]
        prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
        page.images(prompt, cells, columns=2, header=list(WORDS.values()))


def _loras(page: Page, verdict: Verdict) -> None:
    found = verdict.arm("coat")
    if not found:
        return
    job, first = verdict.study.job, found[0]
    page.heading("The LoRAs")
    page.paragraph(
        f"COAT's LoRA of seed {first.seed}; those of the other runs are in the folders next to it. Photos that were "
        "held out are not in it: coat-flux train makes one from all of them."
    )
    page.lora_file(first.lora, job.model.name_or_path, job.trigger_word)


def _runs(page: Page, verdict: Verdict) -> None:
    scores = verdict.scores
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
    page.paragraph("Held-out loss at the end, of the LoRAs in the bf16 model unless it says otherwise.")
    page.table(header, rows)
    if scores is not None:
        page.paragraph(f"Loss of the model without a LoRA: {scores.base:.6f}.")
    for arm, word in WORDS.items():
        curves = {f"seed {run.seed}": run.curve for run in verdict.arm(arm)}
        page.curves(f"Held-out loss of every {word} run", curves, x="step", y="loss")


def _pace(run: ArmResult) -> str | None:
    return f"{1 / run.steps_per_s:.3f}" if run.steps_per_s else None


def _peak(run: ArmResult) -> str | None:
    return None if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}"


def _curves(page: Page, verdict: Verdict) -> None:
    page.heading("Held-out loss over the run")
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
    title = "Each run in its own precision, mean over seeds; band: ± standard deviation"
    page.curves(title, means, x="step", y="loss", band=bands)
    _gaps(page, verdict, bands)


def _gaps(page: Page, verdict: Verdict, bands: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """COAT minus bf16 over the run, in the band of bf16's spread."""
    spread = [(step, (low - high) / 2, (high - low) / 2) for step, low, high in bands.get(WORDS["bf16"], ())]
    gaps: dict[str, list[tuple[float, float]]] = {}
    if spread:
        gaps[SPREAD] = [(step, 0.0) for step, _, _ in spread]
    for bf16, coat in zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False):
        pairs = zip(bf16.curve, coat.curve, strict=True)
        gaps[f"seed {bf16.seed}"] = [(step, ours - theirs) for (step, theirs), (_, ours) in pairs]
    band = {SPREAD: spread} if spread else {}
    page.curves("Gap: COAT's loss minus bf16's, same seed", gaps, x="step", y="loss difference", band=band)


def _cosines(page: Page, verdict: Verdict, scores: Scores) -> None:
    page.paragraph(
        "Cosine of a bf16 LoRA and the COAT LoRA of the same seed, next to that of two bf16 LoRAs that differ only in "
        "the seed; 1 is the same direction. Where COAT's LoRA is closer to its twin than another seed's is, COAT "
        "changes less than the seed does."
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
    with page.details("Precision of the FP8 tensors"):
        medians = [[kind, f"{value:.1f}"] for kind, value in kind_medians(found).items()]
        page.table(["tensors", "median SQNR, dB"], medians)
        page.table(
            ["layers furthest below the median", "tensors", "SQNR, dB", "below the median, dB"],
            [[row.layer, row.kind, f"{row.sqnr_db:.1f}", f"{row.below_median_db:.1f}"] for row in worst(found)],
        )
