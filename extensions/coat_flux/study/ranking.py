"""Which settings of a sweep are best, by how much more than luck, and the page that shows it.

A run's loss is its last on the held-out photos, with the same noise in all runs; that of settings is the mean over
their seeds. Luck, s, is the pooled standard deviation of runs that differ in the seed alone:

    s² = sum over settings of sum_i (loss_i - mean)² / sum of (n - 1)

Settings tie with the best where their gap to it is at most 2 s · sqrt(1 / n + 1 / n_best); with one seed, unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from .. import __version__
from ..config.job import JobConfig
from ..data.captions import inject_trigger
from ..pages.html import Page, Tone
from ..pages.run import RunFolder, RunFolderError
from ..pages.style import SERIES_COLOURS
from ..trainers.standalone.saving import save_name
from .report import mean_curve
from .sweep import FAILED, FINISHED, Sweep, Trial, short_keys, value_text

__all__ = ["Place", "noise_text", "rank", "ranking_rows", "sentence_of", "write_sweep_page"]

SIGMAS = 2.0
PICTURED = 6  # settings shown, by their first seed
RISE = 1.01  # final over lowest loss of a mean curve that is worth a note
HOW = (
    "Each combination of settings was trained as an ordinary run. Its loss is measured on photos that no trial is "
    "trained on, with noise and noise levels that are the same for all, each run in its own precision. Ranked by the "
    "last loss of a run, over seeds its mean."
)
ONE_SEED = "With one seed, how much of a lead is luck is not known: --seeds 3 measures it."


@dataclass
class Place:
    """One combination of settings: mean loss over finished seeds (or NaN), gap to the best, `tied` if within luck."""

    settings: Mapping[str, Any]
    trials: list[Trial]
    loss: float
    gap: float = math.nan
    tied: bool = False

    @property
    def finished(self) -> list[Trial]:
        """Trials with a loss."""
        return [trial for trial in self.trials if math.isfinite(trial.loss)]

    @property
    def lowest(self) -> tuple[float, float] | None:
        """(step, loss) at the minimum of the mean curve of finished seeds."""
        mean = [(step, loss) for step, loss, _ in mean_curve([trial.curve for trial in self.finished])]
        return min(mean, key=lambda point: point[1], default=None)


def rank(trials: Sequence[Trial]) -> tuple[list[Place], float | None]:
    """All settings, best first, those without a loss last; and s, None where seeds do not show it."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(repr(dict(trial.settings)), []).append(trial)
    places, squares, freedom = [], 0.0, 0
    for group in groups.values():
        losses = [trial.loss for trial in group if math.isfinite(trial.loss)]
        mean = fmean(losses) if losses else math.nan
        places.append(Place(group[0].settings, group, mean))
        squares += sum((loss - mean) ** 2 for loss in losses)
        freedom += max(0, len(losses) - 1)
    places.sort(key=lambda place: place.loss if math.isfinite(place.loss) else math.inf)
    spread, best = math.sqrt(squares / freedom) if freedom else None, places[0]
    for place in places:
        place.gap = place.loss - best.loss
        if spread is not None and place.finished:
            room = SIGMAS * spread * math.sqrt(1 / len(place.finished) + 1 / len(best.finished))
            place.tied = place.gap <= room
    return places, spread


def ranking_rows(places: Sequence[Place], spread: float | None) -> list[list[str]]:
    """A header, and a row per combination of settings, best first."""
    keys, seeds = varied(places), len(places[0].trials)
    rows = [["place", *keys.values(), "held-out loss", "above the best", "more than luck", "lowest", "s/step"]]
    rows[0] += ([f"of {seeds} seeds"] if seeds > 1 else []) + ["state"]
    for number, place in enumerate(places, 1):
        known, lowest = math.isfinite(place.loss), place.lowest
        row = [str(number) if known else "", *(value_text(place.settings[key]) for key in keys)]
        row.append(f"{place.loss:.6f}" if known else "")
        if known and number > 1:
            luck = "?" if spread is None else "no" if place.tied else "yes"
            row += [f"{place.gap:+.6f}", luck]
        else:
            row += ["", ""]
        row.append(f"{lowest[1]:.6f} at step {lowest[0]:.0f}" if lowest else "")
        paces = [trial.seconds for trial in place.trials if trial.seconds is not None]
        row.append(f"{fmean(paces):.2f}" if paces else "")
        row += [str(len(place.finished))] if seeds > 1 else []
        rows.append([*row, _state(place)])
    return rows


def _state(place: Place) -> str:
    states = {trial.state for trial in place.trials}
    if len(states) == 1:
        return states.pop()
    return FAILED if FAILED in states else "under way"


def varied(places: Sequence[Place]) -> dict[str, str]:
    """Key → short name, of keys with several values; of all if there are none."""
    short = short_keys(places[0].settings)
    several = {key: short[key] for key in short if len({value_text(place.settings[key]) for place in places}) > 1}
    return several or short


def words_of(place: Place, keys: Mapping[str, str]) -> str:
    """Settings in words: `lr 0.0001, linear 8`."""
    return ", ".join(f"{short} {value_text(place.settings[key])}" for key, short in keys.items())


def sentence_of(places: Sequence[Place], spread: float | None, total: int) -> tuple[str, Tone]:
    """The ranking in one sentence, and its tone; `total` is the planned number of trials."""
    best = places[0]
    left = total - sum(trial.state == FINISHED for place in places for trial in place.trials)
    rest = f"; {left} of {total} trials are not finished" if left else ""
    if not best.finished:
        return f"No trial is finished yet{rest}.", "plain"
    tied = sum(place.tied for place in places[1:])
    text = f"Lowest held-out loss{' so far' if left else ''}: {best.loss:.6f} with {words_of(best, varied(places))}"
    if spread is not None and len(places) > 1:
        others = f"{tied} other{'s are' if tied > 1 else ' is'}" if tied else "no other is"
        text += f"; {others} as good within the noise (±{spread:.2g} a run)"
    if left:
        return f"{text}{rest}.", "plain"
    return f"{text}.", "open" if tied or spread is None else "good"


def noise_text(spread: float | None) -> str:
    """The source of the noise, and what it decides."""
    if spread is None:
        return ONE_SEED
    return (
        f"Noise: ±{spread:.2g}, the standard deviation of runs that differ in the seed alone. A gap to the best of up "
        f"to {SIGMAS:g} times that, times the root of 1/n + 1/n for n seeds each, may be luck."
    )


def write_sweep_page(sweep: Sweep) -> Path:
    """Write `report.html` in the folder of the runs."""
    job, folder = sweep.job, sweep.folder
    page = Page(f"Sweep of {job.name}", f"coat-flux sweep, {job.file}, trials: {sweep.total}")
    if not sweep.trials:
        page.verdict("No trial has started yet.", "plain")
        return page.write(folder / "report.html")
    places, spread = rank(sweep.trials)
    keys, best = varied(places), places[0]
    page.verdict(*sentence_of(places, spread, sweep.total))
    header, *rows = ranking_rows(places, spread)
    page.table(header, rows)
    same = {key: value for key, value in best.settings.items() if key not in keys}
    if same:
        page.paragraph(f"All trials: {', '.join(f'{key} {value_text(value)}' for key, value in same.items())}.")
    page.paragraph(noise_text(spread))
    lowest = best.lowest
    if lowest is not None and best.loss > RISE * lowest[1]:
        page.paragraph(
            f"The best run's loss was lowest after step {lowest[0]:.0f} and has risen since: fewer steps may make "
            "a better LoRA."
        )
    page.heading("Held-out loss over the runs")
    curves = {}
    for place in [place for place in places if any(trial.curve for trial in place.trials)][:SERIES_COLOURS]:
        runs = [trial.curve for trial in place.finished or place.trials if trial.curve]
        curves[words_of(place, keys)] = [(step, loss) for step, loss, _ in mean_curve(runs)]
    more = f", the best {SERIES_COLOURS}" if len(places) > SERIES_COLOURS else ""
    page.curves(f"Each run in its own precision{more}", curves, x="step", y="loss")
    _show_samples(page, places, folder, job)
    _show_best(page, best, folder, job)
    failures = [[trial.name, trial.message] for trial in sweep.trials if trial.state == FAILED]
    if failures:
        page.heading("Failed trials")
        page.table(["trial", "why"], failures)
    page.heading("Details")
    with page.details("How it is measured"):
        page.paragraph(HOW)
        page.paragraph(f"Photos not trained on: {', '.join(sweep.held_out)}.")
    page.missing(f"coat-flux {__version__}")
    return page.write(folder / "report.html")


def _show_samples(page: Page, places: Sequence[Place], folder: Path, job: JobConfig) -> None:
    newest: dict[str, dict[int, Path]] = {}
    for place in places[:PICTURED]:
        for trial in place.finished[:1]:
            try:
                samples = RunFolder(folder / trial.name).samples()
            except RunFolderError:
                continue
            last = max((sample.step for sample in samples), default=None)
            pictures = {sample.number: sample.path for sample in samples if sample.step == last}
            newest[words_of(place, varied(places))] = pictures
    if not any(newest.values()):
        return
    page.heading("Samples")
    for number, item in enumerate(job.sample.items()):
        cells = [(words, paths[number]) for words, paths in newest.items() if number in paths]
        prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
        page.images(prompt, cells, columns=len(newest))


def _show_best(page: Page, best: Place, folder: Path, job: JobConfig) -> None:
    if not best.finished:
        return
    page.heading("The best result")
    trial = best.finished[0]
    path = folder / trial.name / save_name(trial.name, None, full=job.full)
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
