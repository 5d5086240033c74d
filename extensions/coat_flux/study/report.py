"""What a comparison came to: the verdict, as `verdict.json` and as `report.html`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from .. import __version__
from ..data.captions import inject_trigger
from ..pages.html import Page, Tone
from ..watch.advice import kind_medians, summaries, worst
from ..watch.precision import FILE as PRECISION_FILE
from ..watch.precision import read_rows
from .judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, Judgement
from .runs import ArmResult
from .scoring import Gram, Scores, mean_cosine
from .study import Study

__all__ = ["ARM_BF16", "ARM_COAT", "TONES", "Verdict", "write_page"]

ARM_BF16, ARM_COAT = "bf16", "coat"
WORDS = {ARM_BF16: "bf16", ARM_COAT: "COAT"}
LISTED_LAYERS = 10
SPREAD = "bf16's spread over seeds"
TONES: dict[str, Tone] = {LOSSLESS: "good", NOT_LOSSLESS: "bad", UNDECIDED: "open"}
HOW = (
    "Each seed was trained twice, in bf16 and with COAT, from the same start, on the same photos in the same "
    "order, with the same noise. The loss was measured on photos that neither run was trained on, with noise that is "
    "the same for all: at the end of training, each run in its own precision, and both results loaded into the bf16 "
    "model, as other programs do. The gap is COAT's loss minus bf16's. Lossless means that in both cases the 95% "
    "confidence interval of the mean gap is within ± the standard deviation of bf16's own loss over its seeds. A loss "
    "that is lower than bf16's by more than that is a difference, too."
)


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to.

    Attributes:
        judgement: the worse of both below: outcome, gap, interval, spread.
        study: the comparison.
        runs: bf16 and COAT of each seed, in order.
        scores: of the final LoRAs in the bf16 model; None where a COAT run died.
        weights: inner products of weight changes by layer, "" for all; empty where a COAT run died.
        notes: what a reader should know besides.
        in_bf16: judged by the LoRAs in the bf16 model; None where a COAT run died.
        in_own: judged by each run's loss in its own precision; likewise.
    """

    judgement: Judgement
    study: Study
    runs: tuple[ArmResult, ...]
    scores: Scores | None = None
    weights: Mapping[str, Gram] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    in_bf16: Judgement | None = None
    in_own: Judgement | None = None

    @property
    def lossless(self) -> bool:
        """The outcome is `lossless`."""
        return self.judgement.outcome == LOSSLESS

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return self.judgement.sentence

    @property
    def json_path(self) -> Path:
        """`verdict.json`."""
        return self.study.folder / "verdict.json"

    @property
    def page_path(self) -> Path:
        """`report.html`."""
        return self.study.folder / "report.html"

    def arm(self, name: str) -> list[ArmResult]:
        """The runs of one arm, by seed."""
        return [run for run in self.runs if run.arm == name]

    def pairs(self) -> list[tuple[ArmResult, ArmResult]]:
        """(bf16, COAT) of every seed whose runs both ended."""
        return list(zip(self.arm(ARM_BF16), self.arm(ARM_COAT), strict=False))

    def cosines(self, gram: Gram) -> tuple[float | None, float | None]:
        """Mean cosines of (bf16, COAT) pairs, and of bf16 seeds with each other."""
        bf16, coat = ([run.name for run in self.arm(name)] for name in (ARM_BF16, ARM_COAT))
        return mean_cosine(gram, zip(bf16, coat, strict=True)), mean_cosine(gram, combinations(bf16, 2))

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; losses are mean squared errors, numbers that are not finite are null."""
        scores = self.scores
        losses = {} if scores is None else scores.losses
        grams = {} if scores is None else {"output": scores.outputs, "output_change": scores.changes}
        grams |= {"weights": self.weights[""]} if self.weights else {}
        layers = {name: gram for name, gram in self.weights.items() if name}

        def cosines(grams: Mapping[str, Gram]) -> dict[str, dict[str, float | None]]:
            kinds = ("bf16_and_coat", "bf16_seeds")
            return {name: dict(zip(kinds, self.cosines(gram), strict=True)) for name, gram in grams.items()}

        return _plain(
            {
                "outcome": self.judgement.outcome,
                "sentence": self.sentence,
                "seeds": self.judgement.seeds,
                "in_bf16_model": None if self.in_bf16 is None else asdict(self.in_bf16),
                "in_own_precision": None if self.in_own is None else asdict(self.in_own),
                "config": self.study.job.file,
                "settings": asdict(self.study.settings),
                "held_out": list(self.study.held_out.names),
                "base_loss": None if scores is None else scores.base,
                "runs": [asdict(run) | {"final_bf16_model": losses.get(run.name)} for run in self.runs],
                "cosines": cosines(grams),
                "layer_cosines": cosines(layers),
                "notes": list(self.notes),
            }
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_page(verdict: Verdict) -> Path:
    """Write the page next to `verdict.json`."""
    study = verdict.study
    page = Page(f"Is COAT lossless on {study.job.name}?", f"coat-flux verify, {study.job.file}, {study.steps} steps")
    page.verdict(f"{verdict.sentence[:1].upper()}{verdict.sentence[1:]}.", TONES[verdict.judgement.outcome])
    for note in verdict.notes:
        page.paragraph(note)
    judged = {"result in the bf16 model": verdict.in_bf16, "each run in its own precision": verdict.in_own}
    rows = [
        [where, f"{one.gap:+.6f}", f"{one.low:+.6f} to {one.high:+.6f}", f"±{one.spread:.6f}", one.outcome]
        for where, one in judged.items()
        if one is not None
    ]
    if rows:
        page.table(["held-out loss", "mean gap", "95% interval", SPREAD, "outcome"], rows)
    pairs = [pair for pair in verdict.pairs() if all(run.samples for run in pair)]
    if pairs:
        page.heading("Samples")
        for number, item in enumerate(study.job.sample.items()):
            runs = [run for pair in pairs for run in pair if number < len(run.samples)]
            prompt = inject_trigger(item.prompt, study.job.trigger_word, add_if_missing=False)
            cells = [(f"seed {run.seed}", run.samples[number]) for run in runs]
            page.images(prompt, cells, columns=2, header=list(WORDS.values()))
    for first in verdict.arm(ARM_COAT)[:1]:
        page.heading("The results")
        page.paragraph(
            f"COAT's of seed {first.seed}; those of the other runs are in the folders next to it. Photos that "
            "were held out are not in it: coat-flux train makes one from all of them."
        )
        page.result(first.lora, study.job.model.name_or_path, study.job.trigger_word, study.job.model.arch)
    _curves(page, verdict)
    page.heading("Details")
    with page.details("How it is judged"):
        page.paragraph(HOW)
    with page.details("Every run"):
        _runs(page, verdict)
    if verdict.scores is not None:
        with page.details("How alike the results are"):
            _cosines(page, verdict, verdict.scores)
    _precision(page, verdict)
    with page.details("Photos not trained on"):
        page.paragraph(", ".join(study.held_out.names))
    with page.details("COAT options"):
        page.code(yaml.safe_dump({"coat": study.job.coat.to_dict()}, sort_keys=False, allow_unicode=True))
    page.missing(f"coat-flux {__version__}")
    return page.write(verdict.page_path)


def _curves(page: Page, verdict: Verdict) -> None:
    page.heading("Held-out loss over the run")
    means: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for arm, word in WORDS.items():
        curves = [run.curve for run in verdict.arm(arm)]
        for points in zip(*curves, strict=True):
            step, losses = points[0][0], [loss for _, loss in points]
            mean = fmean(losses)
            means.setdefault(word, []).append((step, mean))
            if len(losses) > 1:
                bands.setdefault(word, []).append((step, mean - stdev(losses), mean + stdev(losses)))
    title = "Each run in its own precision, mean over seeds; band: ± standard deviation"
    page.curves(title, means, x="step", y="loss", band=bands)
    # COAT minus bf16 over the run, in the band of bf16's spread
    spread = [(step, (low - high) / 2, (high - low) / 2) for step, low, high in bands.get(WORDS[ARM_BF16], ())]
    gaps: dict[str, list[tuple[float, float]]] = {SPREAD: [(step, 0.0) for step, _, _ in spread]} if spread else {}
    for bf16, coat in verdict.pairs():
        both = zip(bf16.curve, coat.curve, strict=True)
        gaps[f"seed {bf16.seed}"] = [(step, ours - theirs) for (step, theirs), (_, ours) in both]
    band = {SPREAD: spread} if spread else {}
    page.curves("Gap: COAT's loss minus bf16's, same seed", gaps, x="step", y="loss difference", band=band)


def _runs(page: Page, verdict: Verdict) -> None:
    scores = verdict.scores
    header = ["seed", "bf16", "COAT", "gap", "COAT, own precision", "bf16 s/it", "COAT s/it", "bf16 GB", "COAT GB"]
    rows: list[Sequence[object]] = []
    for pair in verdict.pairs():
        losses: list[str | None] = [None, None, None]
        if scores is not None:
            theirs, ours = (scores.losses[run.name] for run in pair)
            losses = [f"{theirs:.6f}", f"{ours:.6f}", f"{ours - theirs:+.6f}"]
        paces = [f"{1 / run.steps_per_s:.3f}" if run.steps_per_s else None for run in pair]
        peaks = [None if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}" for run in pair]
        rows.append([pair[0].seed, *losses, f"{pair[1].final_own:.6f}", *paces, *peaks])
    page.paragraph("Held-out loss at the end, of the results in the bf16 model unless it says otherwise.")
    page.table(header, rows)
    if scores is not None:
        page.paragraph(f"Loss of the model before training: {scores.base:.6f}.")
    for arm, word in WORDS.items():
        curves = {f"seed {run.seed}": run.curve for run in verdict.arm(arm)}
        page.curves(f"Held-out loss of every {word} run", curves, x="step", y="loss")


def _cosines(page: Page, verdict: Verdict, scores: Scores) -> None:
    page.paragraph(
        "Cosine of what bf16 and COAT of the same seed have changed, next to that of two bf16 runs that differ only in "
        "the seed; 1 is the same direction. Where COAT is closer to its twin than another seed is, COAT changes less "
        "than the seed does."
    )
    grams = {
        "weight changes, all layers": verdict.weights[""],
        "what training adds to the model's output": scores.changes,
        "the model's output": scores.outputs,
    }
    layers = {name: gram for name, gram in verdict.weights.items() if name}

    def row(name: str, gram: Gram) -> list[str | None]:
        return [name, *(None if cosine is None else f"{cosine:.5f}" for cosine in verdict.cosines(gram))]

    header = ["bf16 and COAT, same seed", "two bf16 seeds"]
    page.table(["", *header], [row(name, gram) for name, gram in grams.items()])
    pairs = {name: verdict.cosines(gram)[0] for name, gram in layers.items()}
    known = sorted((name for name in layers if pairs[name] is not None), key=lambda name: pairs[name] or 0.0)
    known = known[:LISTED_LAYERS]
    page.heading(f"The {len(known)} layers that differ most", 3)
    page.table(["layer", *header], [row(name, layers[name]) for name in known])


def _precision(page: Page, verdict: Verdict) -> None:
    """What the FP8 casts of the COAT runs lost, where they kept a record of it."""
    files = [run.lora.parent / PRECISION_FILE for run in verdict.arm(ARM_COAT)]
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
