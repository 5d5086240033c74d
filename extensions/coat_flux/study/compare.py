"""`verify`: the runs, their scores and the judgement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from ..base.files import write_file
from ..base.run_log import bar_options
from ..config.job import JobConfig
from ..saves.lock import run_lock
from ..trainers.standalone.seeding import seed_of
from ..watch.guard import DeadRunError
from .judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, broken, judge
from .report import ARM_BF16, ARM_COAT, Verdict, write_page
from .runs import BF16, Arm, ArmResult, VerifyError, bf16_arm
from .scoring import model_grams, score_loras, weight_grams
from .study import Settings, Study, open_study

__all__ = ["verify"]

FEW_PHOTOS = 4
RISE = 1.01  # final over lowest held-out loss that is worth a note
LISTED_PHOTOS = 8


def verify(
    config: str | os.PathLike[str] | Mapping[str, Any] | JobConfig,
    *,
    seeds: int = 3,
    settings: Settings | None = None,
    arm: Arm | None = None,
    folder: str | Path | None = None,
    log: Callable[[str], None] = tqdm.write,
) -> Verdict:
    """Train with and without COAT from several seeds, and judge whether COAT loses anything; see `judgement`.

    Resumes an interrupted comparison in its folder, or adds missing seeds. Writes `verdict.json` and `report.html`. The
    first seed is the config's, the next ones follow; `arm` overrides the `coat:` block of the COAT runs.

    Raises:
        UserError: see `open_study` and `COATTrainer.train`. A COAT run that dies is a verdict, not an error.
    """
    if seeds < 2:
        raise VerifyError(f"--seeds {seeds}: must be at least 2: the spread over seeds is what COAT is measured by")
    study = open_study(config, settings, folder=folder)
    with run_lock(study.folder):
        names = study.held_out.names
        more = f" and {len(names) - LISTED_PHOTOS} more" if len(names) > LISTED_PHOTOS else ""
        log(
            f"verify: {seeds} seeds, each bf16 and COAT, {study.steps} steps, in {study.folder}; "
            f"{len(names)} photos are not trained on: {', '.join(names[:LISTED_PHOTOS])}{more}"
        )
        runs: list[ArmResult] = []
        died = _train(study, seeds, arm or {}, runs)
        if died is None:
            log("verify: loading each result into the bf16 model")
            verdict = _judge(study, runs)
        else:
            verdict = Verdict(broken(died, seeds), study, tuple(runs))
        write_file(verdict.json_path, json.dumps(verdict.as_json(), indent=1, default=str) + "\n")
        write_page(verdict)
    return verdict


def _train(study: Study, seeds: int, arm: Arm, runs: list[ArmResult]) -> str | None:
    first, total = seed_of(study.job), 2 * seeds
    with tqdm(total=total * study.steps, desc="all runs", unit="step", smoothing=0, **bar_options()) as bar:
        for seed in range(first, first + seeds):
            for name, block in ((ARM_BF16, bf16_arm(study.job)), (ARM_COAT, arm)):
                bar.set_postfix_str(f"{len(runs) + 1} of {total} runs", refresh=False)
                before = len(runs) * study.steps

                def on_step(done: int, before: int = before) -> None:
                    bar.update(before + done - bar.n)

                try:
                    runs.append(study.train_arm(name, block, seed, on_step=on_step))
                except DeadRunError as error:
                    if name == ARM_BF16:
                        raise
                    return f"the COAT run of seed {seed} died: {error}"
    return None


def _judge(study: Study, runs: Sequence[ArmResult]) -> Verdict:
    job = JobConfig.from_dict(study.prepare(ARM_BF16, BF16, seed_of(study.job)), file=study.job.file)
    loras = {run.name: run.lora for run in runs}
    sigmas = study.settings.final_sigmas
    with tqdm(desc="held-out photos", leave=False, **bar_options()) as bar:

        def on_batch(done: int, batches: int) -> None:
            bar.total = batches
            bar.update(done - bar.n)

        scores = score_loras(job, loras, study.held_out, device=study.device, sigmas=sigmas, on_batch=on_batch)
    final = {name: [scores.losses[run.name] for run in runs if run.arm == name] for name in (ARM_BF16, ARM_COAT)}
    own = {name: [run.final_own for run in runs if run.arm == name] for name in (ARM_BF16, ARM_COAT)}
    in_bf16 = judge(final[ARM_BF16], final[ARM_COAT], scores.base, where=" in the bf16 model")
    in_own = judge(own[ARM_BF16], own[ARM_COAT], where=" with each run in its own precision")
    notes = _notes(study, runs, final)
    worse = max((in_bf16, in_own), key=lambda one: (LOSSLESS, UNDECIDED, NOT_LOSSLESS).index(one.outcome))
    grams = model_grams(job.model.name_or_path, loras) if job.full else weight_grams(loras)
    return Verdict(worse, study, tuple(runs), scores, grams, notes, in_bf16, in_own)


def _notes(study: Study, runs: Sequence[ArmResult], losses: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    notes = []
    count = len(study.held_out.names)
    if count < FEW_PHOTOS:
        notes.append(f"Held-out photos: {count}. That is few to judge by; use --hold-out or --validation for more.")
    if losses[ARM_BF16] == losses[ARM_COAT]:
        notes.append("Every pair ends at exactly the same loss: these COAT options change nothing in this run.")
    curves = [[loss for _, loss in run.curve] for run in runs if run.arm == ARM_BF16]
    mean = [fmean(point) for point in zip(*curves, strict=True)]
    if mean and mean[-1] > RISE * min(mean):
        step = runs[0].curve[mean.index(min(mean))][0]
        notes.append(
            f"bf16's held-out loss is lowest at step {step} and rises after that: the LoRA memorizes the training "
            "photos (overfitting). The comparison holds, but fewer steps would make a better LoRA."
        )
    return tuple(notes)
