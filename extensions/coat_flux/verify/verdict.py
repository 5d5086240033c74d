"""`verify`: the runs, their scores, the judgement, and what is written about them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from ..checkpoint import run_lock
from ..checkpoint.files import replacing
from ..config import JobConfig
from ..engine.seeding import seed_of
from ..guard import DeadRunError
from ..run_log import bar_options
from .errors import VerifyError
from .judgement import LOSSLESS, Judgement, broken, judge, worse
from .paired import BF16, Arm
from .results import ArmResult
from .scoring import Scores, score_loras
from .similarity import Gram, mean_pair_cosine, mean_seed_cosine, weight_grams
from .study import Settings, Study, open_study

__all__ = ["Verdict", "verify"]

ARM_BF16, ARM_COAT = "bf16", "coat"
FEW_PHOTOS = 4
RISE = 1.01  # a held-out loss that ends so many times above its lowest is named


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

    def cosines(self, gram: Gram) -> tuple[float | None, float | None]:
        """Mean cosines of (bf16, COAT) pairs, and of bf16 seeds with each other."""
        bf16, coat = ([run.name for run in self.arm(name)] for name in (ARM_BF16, ARM_COAT))
        return mean_pair_cosine(gram, bf16, coat), mean_seed_cosine(gram, bf16)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; losses are mean squared errors, numbers that are not finite are null."""
        grams = {} if self.scores is None else {"output": self.scores.outputs, "output_change": self.scores.changes}
        grams |= {"weights": self.weights[""]} if self.weights else {}
        layers = {name: gram for name, gram in self.weights.items() if name}
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
                "base_loss": None if self.scores is None else self.scores.base,
                "runs": [self._run_json(run) for run in self.runs],
                "cosines": {name: self._cosine_json(gram) for name, gram in grams.items()},
                "layer_cosines": {name: self._cosine_json(gram) for name, gram in layers.items()},
                "notes": list(self.notes),
            }
        )

    def _run_json(self, run: ArmResult) -> dict[str, Any]:
        final = None if self.scores is None else self.scores.losses[run.name]
        return asdict(run) | {"final_bf16_model": final}

    def _cosine_json(self, gram: Gram) -> dict[str, float | None]:
        pairs, seeds = self.cosines(gram)
        return {"bf16_and_coat": pairs, "bf16_seeds": seeds}


def verify(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    *,
    seeds: int = 3,
    settings: Settings | None = None,
    arm: Arm | None = None,
    folder: str | Path | None = None,
    say: Callable[[str], None] = tqdm.write,
) -> Verdict:
    """Train with and without COAT from several seeds, and say whether COAT loses anything; see `judgement`.

    Run again on the same folder it goes on where it was interrupted, or adds the seeds that are missing.

    Args:
        config: path, dictionary or job; its own run is not touched.
        seeds: pairs of runs, at least 2; the first has the config's seed, the next the number after.
        settings: steps, photos held out, points of the curves.
        arm: laid over the `coat:` block of the COAT runs; None is the config as it is.
        folder: of the comparison; None is `<training_folder>/<name>_verify`.
        say: takes lines.

    Returns:
        The verdict; `verdict.json` and `report.html` are written.

    Raises:
        UserError: see `open_study` and `COATTrainer.train`. A COAT run that dies is no error but a verdict.
        KeyboardInterrupt: the run under way was saved.
    """
    if seeds < 2:
        raise VerifyError(f"--seeds {seeds}: must be at least 2: the spread over seeds is what COAT is measured by")
    study = open_study(config, settings, folder=folder)
    with run_lock(study.folder):
        verdict = _verdict(study, seeds, arm or {}, say)
        _write(verdict)
    return verdict


def _verdict(study: Study, seeds: int, arm: Arm, say: Callable[[str], None]) -> Verdict:
    first = seed_of(study.job)
    say(
        f"verify: {seeds} seeds, each bf16 and COAT, {study.steps} steps, in {study.folder}; "
        f"{len(study.held_out.names)} photos are not trained on: {_listed(study.held_out.names)}"
    )
    runs: list[ArmResult] = []
    with _Progress(2 * seeds * study.steps) as progress:
        for seed in range(first, first + seeds):
            for name, block in ((ARM_BF16, BF16), (ARM_COAT, arm)):
                progress.begin(f"{len(runs) + 1} of {2 * seeds} runs")
                try:
                    runs.append(study.train_arm(name, block, seed, on_step=progress.step))
                except DeadRunError as error:
                    if name == ARM_BF16:
                        raise
                    judgement = broken(f"the COAT run of seed {seed} died: {error}", seeds)
                    return Verdict(judgement, study, tuple(runs))
    return _judged(study, runs, say)


def _judged(study: Study, runs: Sequence[ArmResult], say: Callable[[str], None]) -> Verdict:
    say("verify: loading each LoRA into the bf16 model")
    job = JobConfig.from_dict(study.prepare(ARM_BF16, BF16, runs[0].seed), file=study.job.file)
    loras = {run.name: run.lora for run in runs}
    sigmas = study.settings.final_sigmas
    with tqdm(desc="held-out photos", leave=False, **bar_options()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        scores = score_loras(job, loras, study.held_out, device=study.device, sigmas=sigmas, on_batch=show)
    final = {name: [scores.losses[run.name] for run in runs if run.arm == name] for name in (ARM_BF16, ARM_COAT)}
    own = {name: [run.final_own for run in runs if run.arm == name] for name in (ARM_BF16, ARM_COAT)}
    in_bf16 = judge(final[ARM_BF16], final[ARM_COAT], scores.base, where=" with its LoRA in the bf16 model")
    in_own = judge(own[ARM_BF16], own[ARM_COAT], where=" with each run in its own precision")
    notes = _notes(study, runs, final)
    judgement = worse(in_bf16, in_own)
    return Verdict(judgement, study, tuple(runs), scores, weight_grams(loras), notes, in_bf16, in_own)


def _notes(study: Study, runs: Sequence[ArmResult], losses: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    notes = []
    count = len(study.held_out.names)
    if count < FEW_PHOTOS:
        notes.append(f"Held-out photos: {count}. That is few to judge by; use --hold-out or --validation for more.")
    if losses[ARM_BF16] == losses[ARM_COAT]:
        notes.append("Every pair ends at exactly the same loss: these COAT options change nothing in this run.")
    ends = [[loss for _, loss in run.curve] for run in runs if run.arm == ARM_BF16]
    mean = [fmean(point) for point in zip(*ends, strict=True)]
    if mean and mean[-1] > RISE * min(mean):
        step = runs[0].curve[mean.index(min(mean))][0]
        notes.append(
            f"bf16's held-out loss is lowest at step {step} and rises after that: the LoRA learns the training photos "
            "by heart (overfitting). The comparison holds, but fewer steps would make a better LoRA."
        )
    return tuple(notes)


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _write(verdict: Verdict) -> None:
    from .page import write_page

    with replacing(verdict.json_path) as temp:
        temp.write_text(json.dumps(verdict.as_json(), indent=1, default=str) + "\n", encoding="utf-8")
    write_page(verdict)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Progress:
    """One bar over the steps of all runs; steps that were done before do not count as speed."""

    def __init__(self, total: int):
        self._bar = tqdm(total=total, desc="all runs", unit="step", smoothing=0, **bar_options())
        self._before, self._fresh = 0, True

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def begin(self, what: str) -> None:
        """A run begins."""
        self._before, self._fresh = self._bar.n, True
        self._bar.set_postfix_str(what, refresh=False)

    def step(self, done: int) -> None:
        """Steps of this run that are done."""
        new = self._before + done - self._bar.n
        if self._fresh:
            self._bar.initial += new
            self._fresh = False
        self._bar.update(new)
