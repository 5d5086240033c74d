"""`verify`: the runs, their scores, the verdict, and the page that shows what it rests on."""

from __future__ import annotations

import json
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
from .judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, Judgement, judge
from .study import BF16, Arm, ArmResult, Study, VerifyError, bf16_arm, score_loras

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
    """The verdict of a comparison.

    `judgement` is the worse of `in_bf16` (results in the bf16 model) and `in_own` (each run in its own precision).
    `losses` are those in the bf16 model by run, `base` that before training; none where a COAT run died.
    """

    judgement: Judgement
    study: Study
    runs: tuple[ArmResult, ...]
    base: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    in_bf16: Judgement | None = None
    in_own: Judgement | None = None

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
