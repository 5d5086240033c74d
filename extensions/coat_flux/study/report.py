"""The verdict of a comparison, as `verdict.json` and as `report.html`."""

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
from ..pages.precision import show_layers
from .judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, Judgement
from .runs import ArmResult
from .scoring import Gram, Scores, mean_cosine
from .study import Study

__all__ = ["ARM_BF16", "ARM_COAT", "TONES", "Verdict", "mean_curve", "write_page"]

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
HOW_ALIKE = (
    "Cosine of what bf16 and COAT of the same seed have changed, next to that of two bf16 runs that differ only in the "
    "seed; 1 is the same direction. Where COAT is closer to its twin than another seed is, COAT changes less than the "
    "seed does."
)
ALIKE = ["bf16 and COAT, same seed", "two bf16 seeds"]
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """The verdict of a comparison.

    `judgement` is the worse of `in_bf16` (LoRAs in the bf16 model) and `in_own` (each run in its own precision);
    `scores` and `weights` (inner products of weight changes by layer, "" for all) are empty where a COAT run died.
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
        """Whether the outcome is `lossless`."""
        return self.judgement.outcome == LOSSLESS

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
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
        """(bf16, COAT) of every seed with both runs finished."""
        return list(zip(self.arm(ARM_BF16), self.arm(ARM_COAT), strict=False))

    def cosines(self, gram: Gram) -> tuple[float | None, float | None]:
        """Mean cosines of (bf16, COAT) pairs, and between bf16 seeds."""
        pairs = [(bf16.name, coat.name) for bf16, coat in self.pairs()]
        seeds = [run.name for run in self.arm(ARM_BF16)]
        return mean_cosine(gram, pairs), mean_cosine(gram, combinations(seeds, 2))

    @property
    def layers(self) -> dict[str, tuple[float | None, float | None]]:
        """`cosines` of every layer's change."""
        return {name: self.cosines(gram) for name, gram in self.weights.items() if name}

    def as_json(self) -> dict[str, Any]:
        """Plain values; losses are mean squared errors, nonfinite numbers are null."""
        kinds = ("bf16_and_coat", "bf16_seeds")
        cosines, losses, base = {}, {}, None
        if self.scores is not None:
            losses, base = self.scores.losses, self.scores.base
            grams = {"output": self.scores.outputs, "output_change": self.scores.changes, "weights": self.weights[""]}
            cosines = {name: dict(zip(kinds, self.cosines(gram), strict=True)) for name, gram in grams.items()}
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
                "base_loss": base,
                "runs": [asdict(run) | {"final_bf16_model": losses.get(run.name)} for run in self.runs],
                "cosines": cosines,
                "layer_cosines": {name: dict(zip(kinds, pair, strict=True)) for name, pair in self.layers.items()},
                "notes": list(self.notes),
            }
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float, float]]:
    """(x, mean, standard deviation) of curves over the same x, up to the end of the shortest."""
    points = []
    for together in zip(*curves, strict=False):
        values = [value for _, value in together]
        points.append((together[0][0], fmean(values), stdev(values) if len(values) > 1 else 0.0))
    return points


def write_page(verdict: Verdict) -> Path:
    """Write the page next to `verdict.json`."""
    study, job = verdict.study, verdict.study.job
    page = Page(f"Is COAT lossless on {job.name}?", f"coat-flux verify, {job.file}, {study.steps} steps")
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
        for number, item in enumerate(job.sample.items()):
            runs = [run for pair in pairs for run in pair if number < len(run.samples)]
            prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
            cells = [(f"seed {run.seed}", run.samples[number]) for run in runs]
            page.images(prompt, cells, columns=2, header=list(WORDS.values()))
    for first in verdict.arm(ARM_COAT)[:1]:
        page.heading("The results")
        page.paragraph(
            f"COAT's of seed {first.seed}; those of the other runs are in the folders next to it. Photos that "
            "were held out are not in it: coat-flux train makes one from all of them."
        )
        page.result(first.lora, job.model.name_or_path, job.trigger_word, job.model.arch)
    _show_curves(page, verdict)
    page.heading("Details")
    with page.details("How it is judged"):
        page.paragraph(HOW)
    with page.details("Every run"):
        _show_runs(page, verdict)
    if verdict.scores is not None:
        with page.details("How alike the results are"):
            _show_cosines(page, verdict, verdict.scores)
    with page.details("Precision of the FP8 tensors"):
        show_layers(page, [run.lora.parent for run in verdict.arm(ARM_COAT)])
    with page.details("Photos not trained on"):
        page.paragraph(", ".join(study.held_out.names))
    with page.details("COAT options"):
        page.code(yaml.safe_dump({"coat": job.coat.to_dict()}, sort_keys=False, allow_unicode=True))
    page.missing(f"coat-flux {__version__}")
    return page.write(verdict.page_path)


def _show_curves(page: Page, verdict: Verdict) -> None:
    page.heading("Held-out loss over the run")
    points = {word: mean_curve([run.curve for run in verdict.arm(arm)]) for arm, word in WORDS.items()}
    means = {word: [(step, mean) for step, mean, _ in curve] for word, curve in points.items()}
    bands = {word: [(step, mean - s, mean + s) for step, mean, s in curve] for word, curve in points.items()}
    title = "Each run in its own precision, mean over seeds; band: ± standard deviation"
    page.curves(title, means, x="step", y="loss", band=bands)
    spread = [(step, -s, s) for step, _, s in points[WORDS[ARM_BF16]]]
    gaps: dict[str, Curve] = {SPREAD: [(step, 0.0) for step, _, _ in spread]}
    for bf16, coat in verdict.pairs():
        both = zip(bf16.curve, coat.curve, strict=True)
        gaps[f"seed {bf16.seed}"] = [(step, ours - theirs) for (step, theirs), (_, ours) in both]
    title = "Gap: COAT's loss minus bf16's, same seed"
    page.curves(title, gaps, x="step", y="loss difference", band={SPREAD: spread})


def _show_runs(page: Page, verdict: Verdict) -> None:
    losses = {} if verdict.scores is None else verdict.scores.losses
    header = ["seed", "bf16", "COAT", "gap", "COAT, own precision", "bf16 s/it", "COAT s/it", "bf16 GB", "COAT GB"]
    rows: list[list[object]] = []
    for pair in verdict.pairs():
        finals: list[str | None] = [None, None, None]
        if losses:
            theirs, ours = (losses[run.name] for run in pair)
            finals = [f"{theirs:.6f}", f"{ours:.6f}", f"{ours - theirs:+.6f}"]
        paces = [f"{1 / run.steps_per_s:.3f}" if run.steps_per_s else None for run in pair]
        peaks = [None if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}" for run in pair]
        rows.append([pair[0].seed, *finals, f"{pair[1].final_own:.6f}", *paces, *peaks])
    page.paragraph("Held-out loss at the end, of the results in the bf16 model unless it says otherwise.")
    page.table(header, rows)
    if verdict.scores is not None:
        page.paragraph(f"Loss of the model before training: {verdict.scores.base:.6f}.")
    for arm, word in WORDS.items():
        curves = {f"seed {run.seed}": run.curve for run in verdict.arm(arm)}
        page.curves(f"Held-out loss of every {word} run", curves, x="step", y="loss")


def _show_cosines(page: Page, verdict: Verdict, scores: Scores) -> None:
    def row(name: str, pair: tuple[float | None, float | None]) -> list[str | None]:
        return [name, *(None if cosine is None else f"{cosine:.5f}" for cosine in pair)]

    page.paragraph(HOW_ALIKE)
    grams = {
        "weight changes, all layers": verdict.weights[""],
        "what training adds to the model's output": scores.changes,
        "the model's output": scores.outputs,
    }
    page.table(["", *ALIKE], [row(name, verdict.cosines(gram)) for name, gram in grams.items()])
    known = sorted((pair[0], name, pair) for name, pair in verdict.layers.items() if pair[0] is not None)
    known = known[:LISTED_LAYERS]
    page.heading(f"The {len(known)} layers that differ most", 3)
    page.table(["layer", *ALIKE], [row(name, pair) for _, name, pair in known])
