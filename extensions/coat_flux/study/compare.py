"""`verify`: paired runs, judged against the effect of the seed alone on bf16, and the page that shows it.

Run i of both arms has the same seed, so gap_i = loss_COAT,i - loss_bf16,i is free of most of the seed's effect. The
mean gap has the confidence interval mean ± t · sd(gap) / sqrt(n), t the two-sided 95% quantile of Student's
distribution with n - 1 degrees of freedom. It is compared with s, the standard deviation (n - 1) of bf16's losses over
its seeds: nobody could notice a change that is certainly smaller than that of another seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from tqdm import tqdm

from .. import __version__
from ..base.files import write_file
from ..config.job import JobConfig
from ..data.captions import inject_trigger
from ..pages.html import Page, Tone
from ..pages.report import RISE, show_layers
from ..saves.repair import run_lock
from ..watch.casts import PRECISION_FILE, read_rows
from ..watch.guard import DeadRunError
from .study import BF16, Arm, ArmResult, Study, VerifyError, bf16_arm, score_loras

LOSSLESS, NOT_LOSSLESS, UNDECIDED = "lossless", "not lossless", "undecided"
PLACES = {LOSSLESS: "within", NOT_LOSSLESS: "outside", UNDECIDED: "partly outside"}
QUANTILES = (  # of Student's distribution, from one degree of freedom on; more than 30 are judged as 30
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
MAX_SEEDS = len(QUANTILES) + 1  # beyond this, more seeds are no advice


@dataclass(frozen=True)
class Judgement:
    """The mean `gap`, its interval from `low` to `high`, and s (`spread`); NaN if there is nothing to compare."""

    outcome: str
    reason: str
    seeds: int
    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    spread: float = math.nan
    more_seeds: int | None = None  # that would decide at the same gaps; None if decided, or too many

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        return f"{self.outcome}{'' if self.outcome == UNDECIDED else ' here'}: {self.reason}"


def judge(bf16: Sequence[float], coat: Sequence[float], base: float | None = None, *, where: str = "") -> Judgement:
    """Compare paired final losses; `base` is the loss before training.

    - *lossless*: the interval of the mean gap is inside [-s, s];
    - *not lossless*: it is wholly outside. On the lower side too: a run that learns less overfits less, so a lower
      held-out loss is a difference, not a merit;
    - *undecided*: it crosses an end of the band; or bf16's seeds end equal (s = 0), or one of its runs did not improve
      on `base`.
    """
    if not all(map(math.isfinite, bf16)) or len(bf16) < 2:
        raise ValueError(f"bf16={list(bf16)}: must be at least 2 finite losses; run more seeds")
    count = len(bf16)
    if not all(map(math.isfinite, coat)):
        return Judgement(NOT_LOSSLESS, f"COAT's held-out loss{where} is not finite", count)
    gaps = [ours - theirs for ours, theirs in zip(coat, bf16, strict=True)]
    gap, spread, scatter = fmean(gaps), stdev(bf16), stdev(gaps)
    outcome, half = _outcome(gap, scatter, count, spread)
    idle = [number for number, loss in enumerate(bf16, 1) if base is not None and loss >= base]
    more = None
    if idle:
        outcome = UNDECIDED
        reason = (
            f"{len(idle)} of {count} bf16 runs (first: number {idle[0]}, loss {bf16[idle[0] - 1]:.6f}) did not bring "
            f"the held-out loss below that before training, {base:.6f}; train longer or with a higher lr, or, if the "
            "training loss fell (overfitting), shorter or on more photos"
        )
    elif spread == 0:
        outcome = UNDECIDED
        reason = "the bf16 runs of all seeds end at exactly the same loss, so the spread over seeds is zero"
    else:
        reason = (
            f"over {count} seeds, COAT's held-out loss{where} is on average {abs(gap):.2g} "
            f"{'above' if gap >= 0 else 'below'} bf16's (95% confidence interval {gap - half:+.2g} to "
            f"{gap + half:+.2g}), {PLACES[outcome]} the spread of bf16 runs that differ only in the seed "
            f"(±{spread:.2g})"
        )
        if outcome == UNDECIDED:
            counts = range(count + 1, MAX_SEEDS + 1)
            more = next((n for n in counts if _outcome(gap, scatter, n, spread)[0] != UNDECIDED), None)
            too_many = f"it would take more than {MAX_SEEDS} seeds to decide"
            reason += f"; {too_many if more is None else f'run with --seeds {more}'}"
    return Judgement(outcome, reason, count, gap, gap - half, gap + half, spread, more)


def _outcome(gap: float, scatter: float, count: int, spread: float) -> tuple[str, float]:
    """The outcome of so many pairs, and half the width of the interval."""
    half = QUANTILES[min(count, MAX_SEEDS) - 2] * scatter / math.sqrt(count)
    if abs(gap) + half <= spread:
        return LOSSLESS, half
    return (NOT_LOSSLESS if abs(gap) - half > spread else UNDECIDED), half


VERDICT_FILE, REPORT_FILE = "verdict.json", "report.html"  # in the study's folder
WORDS = {"bf16": "bf16", "coat": "COAT"}  # of the two arms
TONES: dict[str, Tone] = {LOSSLESS: "good", UNDECIDED: "open", NOT_LOSSLESS: "bad"}  # from best to worst
FEW_PHOTOS = 4
LISTED_PHOTOS = 8
SPREAD = "bf16's spread over seeds"
HOW = (
    "Each seed was trained twice, in bf16 and with COAT: same start, photos, order and noise. The loss is that on "
    "photos that no run was trained on, with the same noise for all. Lossless means that the 95% interval of the mean "
    "gap is within ± the standard deviation of bf16's loss over its seeds, both in each run's own precision and with "
    "the results in the bf16 model, as other programs use them."
)


@dataclass(frozen=True)
class Verdict:
    """The verdict of a comparison; without losses where a COAT run died."""

    judgement: Judgement  # the worse of `in_bf16` and `in_own`
    study: Study
    runs: tuple[ArmResult, ...]
    base: float | None = None  # the loss before training
    losses: Mapping[str, float] = field(default_factory=dict)  # in the bf16 model, by run
    notes: tuple[str, ...] = ()
    in_bf16: Judgement | None = None  # of the results in the bf16 model
    in_own: Judgement | None = None  # of each run in its own precision

    def arm(self, name: str) -> list[ArmResult]:
        """The runs of one arm, by seed."""
        return [run for run in self.runs if run.arm == name]

    def as_json(self) -> dict[str, Any]:
        """Plain values; losses are mean squared errors, nonfinite numbers are null."""
        study = self.study
        content = {
            "outcome": self.judgement.outcome,
            "sentence": self.judgement.sentence,
            "seeds": self.judgement.seeds,
            "in_bf16_model": self.in_bf16 and asdict(self.in_bf16),
            "in_own_precision": self.in_own and asdict(self.in_own),
            "config": study.job.file,
            "settings": {"steps": study.steps, "every": study.every},
            "held_out": study.held_out,
            "base_loss": self.base,
            "runs": [asdict(run) | {"final_bf16_model": self.losses.get(run.name)} for run in self.runs],
            "notes": self.notes,
        }
        return json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)


def verify(study: Study, *, seeds: int = 3, arm: Arm | None = None) -> Verdict:
    """Train with and without COAT from several seeds, and judge whether COAT loses anything; see `judgement`.

    Resumes an interrupted comparison, or adds missing seeds, from the config's on. `arm` overrides the `coat:` block
    of the COAT runs; one of them that dies is a verdict.
    """
    if seeds < 2:
        raise VerifyError(f"--seeds {seeds}: must be at least 2: the spread over seeds is what COAT is measured by")
    job, log = study.job, tqdm.write
    runs = []
    arms = {"bf16": bf16_arm(job), "coat": arm or {}}
    with run_lock(study.folder):
        photos = study.held_out
        more = f" and {len(photos) - LISTED_PHOTOS} more" if len(photos) > LISTED_PHOTOS else ""
        log(
            f"verify: {seeds} seeds, each bf16 and COAT, {study.steps} steps, in {study.folder}; "
            f"{len(photos)} photos are not trained on: {', '.join(photos[:LISTED_PHOTOS])}{more}"
        )
        try:
            for seed in range(job.seed, job.seed + seeds):
                for name, block in arms.items():
                    log(f"verify: run {len(runs) + 1} of {2 * seeds}, {WORDS[name]} with seed {seed}")
                    runs.append(study.train_arm(name, block, seed))
        except DeadRunError as error:
            if len(runs) % 2 == 0:  # of bf16: the config itself cannot be trained
                raise
            reason = f"the COAT run of seed {runs[-1].seed} died: {error}"
            verdict = Verdict(Judgement(NOT_LOSSLESS, reason, seeds), study, tuple(runs))
        else:
            log("verify: loading each result into the bf16 model")
            verdict = _judge(study, runs)
        write_file(study.folder / VERDICT_FILE, json.dumps(verdict.as_json(), indent=1) + "\n")
        write_page(verdict)
    return verdict


def _judge(study: Study, runs: Sequence[ArmResult]) -> Verdict:
    job = JobConfig.from_dict(study.prepare("bf16", BF16, study.job.seed), file=study.job.file)
    base, losses = score_loras(job, {run.name: run.lora for run in runs}, study.device)
    bf16, coat = ([run for run in runs if run.arm == arm] for arm in WORDS)
    in_model = [[losses[run.name] for run in arm] for arm in (bf16, coat)]
    in_bf16 = judge(*in_model, base, where=" in the bf16 model")
    where = " with each run in its own precision"
    in_own = judge([run.final_own for run in bf16], [run.final_own for run in coat], where=where)
    worse = max((in_bf16, in_own), key=lambda judgement: list(TONES).index(judgement.outcome))
    notes = []
    count = len(study.held_out)
    if count < FEW_PHOTOS:
        notes.append(f"Held-out photos: {count}. That is few to judge by; see --hold-out and --validation.")
    if in_model[0] == in_model[1]:
        notes.append("Every pair ends at exactly the same loss: these COAT options change nothing here.")
    mean = mean_curve([run.curve for run in bf16])
    lowest = min(mean, key=lambda point: point[1])
    if mean[-1][1] > RISE * lowest[1]:
        notes.append(
            f"bf16's held-out loss is lowest at step {lowest[0]:.0f} and rises after that: the LoRA memorizes the "
            "training photos (overfitting). The comparison holds, but fewer steps would make a better LoRA."
        )
    return Verdict(worse, study, tuple(runs), base, losses, tuple(notes), in_bf16, in_own)


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float]]:
    """(x, mean, standard deviation) of curves over the same x, up to the end of the shortest."""
    points = []
    for together in zip(*curves, strict=False):
        values = [value for _, value in together]
        points.append((together[0][0], fmean(values), stdev(values) if len(values) > 1 else 0.0))
    return points


def write_page(verdict: Verdict) -> Path:
    """Write the page next to `verdict.json`."""
    study, job, sentence = verdict.study, verdict.study.job, verdict.judgement.sentence
    pairs = list(zip(verdict.arm("bf16"), verdict.arm("coat"), strict=False))  # of seeds with both runs finished
    page = Page(f"Is COAT lossless on {job.name}?", f"coat-flux verify, {job.file}, {study.steps} steps")
    page.verdict(f"{sentence[:1].upper()}{sentence[1:]}.", TONES[verdict.judgement.outcome])
    for note in verdict.notes:
        page.paragraph(note)
    rows = []
    places = {"result in the bf16 model": verdict.in_bf16, "each run in its own precision": verdict.in_own}
    for where, judgement in places.items():
        if judgement is not None:
            interval = f"{judgement.low:+.6f} to {judgement.high:+.6f}"
            rows.append([where, f"{judgement.gap:+.6f}", interval, f"±{judgement.spread:.6f}", judgement.outcome])
    if rows:
        page.table(["held-out loss", "mean gap", "95% interval", SPREAD, "outcome"], rows)
    runs = [run for pair in pairs for run in pair]
    if runs and all(run.samples for run in runs):
        page.heading("Samples")
        for number, item in enumerate(job.sample.items()):
            cells = [(f"seed {run.seed}", run.samples[number]) for run in runs if number < len(run.samples)]
            prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
            page.images(prompt, cells, columns=2, header=list(WORDS.values()))
    for first in verdict.arm("coat")[:1]:
        page.heading("The results")
        page.paragraph(
            f"COAT's of seed {first.seed}, next to those of the other runs. Photos that were held out are not in it: "
            "coat-flux train makes one from all of them."
        )
        page.result(first.lora, job.model.name_or_path, job.trigger_word, job.model.arch)
    page.heading("Held-out loss over the run")
    bands = show_means(page, verdict)
    spread = [(step, (low - high) / 2, (high - low) / 2) for step, low, high in bands["bf16"]]
    gaps: dict[str, Sequence[tuple[float, float]]] = {SPREAD: [(step, 0.0) for step, _, _ in spread]}
    for bf16, coat in pairs:
        both = zip(bf16.curve, coat.curve, strict=True)
        gaps[f"seed {bf16.seed}"] = [(step, ours - theirs) for (step, theirs), (_, ours) in both]
    title = "Gap: COAT's loss minus bf16's, same seed"
    page.curves(title, gaps, y="loss difference", band={SPREAD: spread})
    page.heading("Details")
    with page.details("How it is judged"):
        page.paragraph(HOW)
    with page.details("Every run"):
        _show_runs(page, verdict, pairs)
    with page.details("Precision of the FP8 tensors"):
        show_layers(page, [row for run in verdict.arm("coat") for row in read_rows(run.lora.parent / PRECISION_FILE)])
    with page.details("Photos not trained on"):
        page.paragraph(", ".join(study.held_out))
    with page.details("COAT options"):
        page.code(yaml.safe_dump({"coat": job.coat.to_dict()}, sort_keys=False, allow_unicode=True))
    page.missing(f"coat-flux {__version__}")
    return page.write(study.folder / REPORT_FILE)


def show_means(page: Page, verdict: Verdict) -> dict[str, list[tuple[float, float, float]]]:
    """Add the mean curve of each arm; returns their bands (step, low, high)."""
    means, bands = {}, {}
    for arm, word in WORDS.items():
        points = mean_curve([run.curve for run in verdict.arm(arm)])
        means[word] = [(step, mean) for step, mean, _ in points]
        bands[word] = [(step, mean - spread, mean + spread) for step, mean, spread in points]
    title = "Each run in its own precision, mean over seeds; band: ± standard deviation"
    page.curves(title, means, y="loss", band=bands)
    return bands


def _show_runs(page: Page, verdict: Verdict, pairs: Sequence[tuple[ArmResult, ArmResult]]) -> None:
    header = ["seed", "bf16", "COAT", "gap", "COAT, own precision"]
    header += ["bf16 s/it", "COAT s/it", "bf16 GB", "COAT GB"]
    rows = []
    for pair in pairs:
        finals = [None, None, None]
        if verdict.losses:
            theirs, ours = (verdict.losses[run.name] for run in pair)
            finals = [f"{theirs:.6f}", f"{ours:.6f}", f"{ours - theirs:+.6f}"]
        paces = [f"{1 / run.steps_per_s:.3f}" if run.steps_per_s else None for run in pair]
        peaks = [None if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}" for run in pair]
        rows.append([pair[0].seed, *finals, f"{pair[1].final_own:.6f}", *paces, *peaks])
    page.paragraph("Held-out loss at the end, in the bf16 model unless it says otherwise.")
    page.table(header, rows)
    if verdict.base is not None:
        page.paragraph(f"Loss of the model before training: {verdict.base:.6f}.")
    for arm, word in WORDS.items():
        curves = {f"seed {run.seed}": run.curve for run in verdict.arm(arm)}
        page.curves(f"Held-out loss of every {word} run", curves, y="loss")
