"""Which settings of a sweep are best, by how much more than luck, and the page that shows it.

A run's loss is its last on the held-out photos, with the same noise in all runs; that of a trial is the mean over its
seeds. Luck, s, is the pooled standard deviation of runs that differ in the seed alone:

    s² = sum over trials of sum_i (loss_i - mean)² / sum of (n - 1)

Trials tie with the best where their gap to it is at most 2 s · sqrt(1 / n + 1 / n_best); with one seed, unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from .. import __version__
from ..data.captions import inject_trigger
from ..pages.charts import SERIES_COLOURS
from ..pages.html import Page, Tone
from ..pages.run import RunFolder, RunFolderError
from ..trainers.standalone.saving import save_name
from .compare import RISE, mean_curve
from .sweep import FAILED, FINISHED, Sweep, Trial, short_keys, value_text

__all__ = ["noise_text", "rank", "ranking_rows", "sentence_of", "tie", "write_sweep_page"]

SIGMAS = 2.0
PICTURED = 6  # trials shown, by their first seed
HOW = (
    "Each combination of settings was trained as an ordinary run. Its loss is measured on photos that no trial is "
    "trained on, with noise and noise levels that are the same for all, each run in its own precision. Ranked by the "
    "last loss of a run, over seeds its mean."
)


def rank(trials: Sequence[Trial]) -> tuple[list[Trial], float | None]:
    """All trials, best first, those without a loss last; and s, None where seeds do not show it."""
    squares, freedom = 0.0, 0
    for trial in trials:
        squares += sum((run.loss - trial.loss) ** 2 for run in trial.finished)
        freedom += max(0, len(trial.finished) - 1)
    ordered = sorted(trials, key=lambda trial: trial.loss if trial.finished else math.inf)
    return ordered, math.sqrt(squares / freedom) if freedom else None


def tie(trial: Trial, best: Trial, spread: float | None) -> bool:
    """Whether a trial's gap to the best may be luck."""
    if spread is None or not trial.finished:
        return False
    room = SIGMAS * spread * math.sqrt(1 / len(trial.finished) + 1 / len(best.finished))
    return trial.loss - best.loss <= room


def lowest(trial: Trial) -> tuple[float, float] | None:
    """(step, loss) at the minimum of the mean curve of finished seeds."""
    mean = [(step, loss) for step, loss, _ in mean_curve([run.curve for run in trial.finished])]
    return min(mean, key=lambda point: point[1], default=None)


def ranking_rows(trials: Sequence[Trial], spread: float | None) -> list[list[str]]:
    """A header, and a row per trial, best first, as `rank` returns them."""
    keys, seeds = _varied(trials), len(trials[0].runs)
    rows = [["place", *keys.values(), "held-out loss", "above the best", "more than luck", "lowest", "s/step"]]
    for number, trial in enumerate(trials, 1):
        place = loss = gap = luck = minimum = pace = ""
        if trial.finished:
            place, loss = str(number), f"{trial.loss:.6f}"
            step, least = lowest(trial) or (math.nan, math.nan)
            minimum = f"{least:.6f} at step {step:.0f}"
        if trial.finished and number > 1:
            gap = f"{trial.loss - trials[0].loss:+.6f}"
            luck = "no" if tie(trial, trials[0], spread) else "yes"
            if spread is None:
                luck = "?"
        paces = [run.seconds for run in trial.runs if run.seconds is not None]
        if paces:
            pace = f"{fmean(paces):.2f}"
        values = [value_text(trial.settings[key]) for key in keys]
        rows.append([place, *values, loss, gap, luck, minimum, pace])
    if seeds > 1:
        rows[0].append(f"of {seeds} seeds")
        for row, trial in zip(rows[1:], trials, strict=True):
            row.append(str(len(trial.finished)))
    rows[0].append("state")
    for row, trial in zip(rows[1:], trials, strict=True):
        states = {run.state for run in trial.runs}
        mixed = FAILED if FAILED in states else "under way"
        row.append(mixed if len(states) > 1 else states.pop())
    return rows


def _varied(trials: Sequence[Trial]) -> dict[str, str]:
    """Key → short name, of keys with several values; of all if there are none."""
    short = short_keys(trials[0].settings)
    several = {key: short[key] for key in short if len({value_text(trial.settings[key]) for trial in trials}) > 1}
    return several or short


def _words(trial: Trial, keys: Mapping[str, str]) -> str:
    """Settings in words: `lr 0.0001, linear 8`."""
    return ", ".join(f"{short} {value_text(trial.settings[key])}" for key, short in keys.items())


def sentence_of(trials: Sequence[Trial], spread: float | None, total: int) -> tuple[str, Tone]:
    """The ranking in one sentence, and its tone; `total` is the planned number of runs."""
    best = trials[0]
    left = total - sum(run.state == FINISHED for trial in trials for run in trial.runs)
    rest = f"; {left} of {total} trials are not finished" if left else ""
    if not best.finished:
        return f"No trial is finished yet{rest}.", "plain"
    tied = sum(tie(trial, best, spread) for trial in trials[1:])
    text = f"Lowest held-out loss{' so far' if left else ''}: {best.loss:.6f} with {_words(best, _varied(trials))}"
    if spread is not None and len(trials) > 1:
        others = {0: "no other is", 1: "1 other is"}.get(tied, f"{tied} others are")
        text += f"; {others} as good within the noise (±{spread:.2g} a run)"
    if left:
        return f"{text}{rest}.", "plain"
    return f"{text}.", "open" if tied or spread is None else "good"


def noise_text(spread: float | None) -> str:
    """The source of the noise, and what it decides."""
    if spread is None:
        return "With one seed, how much of a lead is luck is not known: --seeds 3 measures it."
    return (
        f"Noise: ±{spread:.2g}, the standard deviation of runs that differ in the seed alone. A gap to the best of up "
        f"to {SIGMAS:g} times that, times the root of 1/n + 1/n for n seeds each, may be luck."
    )


def write_sweep_page(sweep: Sweep) -> Path:
    """Write `report.html` in the folder of the runs."""
    job, path = sweep.job, sweep.folder / "report.html"
    page = Page(f"Sweep of {job.name}", f"coat-flux sweep, {job.file}, trials: {sweep.total}")
    if not sweep.trials:
        page.verdict("No trial has started yet.", "plain")
        return page.write(path)
    trials, spread = rank(sweep.trials)
    keys, best = _varied(trials), trials[0]
    page.verdict(*sentence_of(trials, spread, sweep.total))
    header, *rows = ranking_rows(trials, spread)
    page.table(header, rows)
    same = {key: value for key, value in best.settings.items() if key not in keys}
    if same:
        page.paragraph(f"All trials: {', '.join(f'{key} {value_text(value)}' for key, value in same.items())}.")
    page.paragraph(noise_text(spread))
    minimum = lowest(best)
    if minimum is not None and best.loss > RISE * minimum[1]:
        page.paragraph(
            f"The best run's loss was lowest after step {minimum[0]:.0f} and has risen since: fewer steps may make "
            "a better LoRA."
        )
    page.heading("Held-out loss over the runs")
    curves = {}
    for trial in trials:
        points = mean_curve([run.curve for run in trial.finished or trial.runs if run.curve])
        if points and len(curves) < SERIES_COLOURS:
            curves[_words(trial, keys)] = [(step, loss) for step, loss, _ in points]
    more = f", the best {SERIES_COLOURS}" if len(trials) > SERIES_COLOURS else ""
    page.curves(f"Each run in its own precision{more}", curves, x="step", y="loss")
    _show_samples(page, sweep, trials, keys)
    if best.finished:
        _show_best(page, sweep, best)
    failures = [[run.name, run.message] for run in sweep.runs if run.state == FAILED]
    if failures:
        page.heading("Failed trials")
        page.table(["trial", "why"], failures)
    page.heading("Details")
    with page.details("How it is measured"):
        page.paragraph(HOW)
        page.paragraph(f"Photos not trained on: {', '.join(sweep.held_out)}.")
    page.missing(f"coat-flux {__version__}")
    return page.write(path)


def _show_samples(page: Page, sweep: Sweep, trials: Sequence[Trial], keys: Mapping[str, str]) -> None:
    """The last samples of the best trials, a row per prompt."""
    pictures: dict[str, dict[int, Path]] = {}
    for trial in trials[:PICTURED]:
        for run in trial.finished[:1]:
            try:
                samples = RunFolder(sweep.folder / run.name).samples()
            except RunFolderError:
                continue
            last = max((sample.step for sample in samples), default=None)
            newest = {sample.number: sample.path for sample in samples if sample.step == last}
            pictures[_words(trial, keys)] = newest
    if not any(pictures.values()):
        return
    page.heading("Samples")
    for number, item in enumerate(sweep.job.sample.items()):
        cells = [(words, paths[number]) for words, paths in pictures.items() if number in paths]
        prompt = inject_trigger(item.prompt, sweep.job.trigger_word, add_if_missing=False)
        page.images(prompt, cells, columns=len(pictures))


def _show_best(page: Page, sweep: Sweep, best: Trial) -> None:
    page.heading("The best result")
    job, name = sweep.job, best.finished[0].name
    path = sweep.folder / name / save_name(name, None, full=job.full)
    page.result(path, job.model.name_or_path, job.trigger_word, job.model.arch)
    page.paragraph("Photos that were held out are not in it. For one from all of them, write into the config:")
    block: dict[str, Any] = {}
    for key, value in best.settings.items():
        *parents, leaf = key.split(".")
        inner = block
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    page.code(yaml.safe_dump(block, sort_keys=False, allow_unicode=True).rstrip())
