"""The ranking of a sweep as rows, and as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from .grid import short_keys, value_text
from .ranking import FAILED, FINISHED, SIGMAS, Noise, Place, Result, rank

__all__ = ["ranking_rows", "sentence_of", "write_sweep_page"]

PICTURED = 6  # of the best settings, of the first seed of each
RISE = 1.01  # a mean curve that ends so many times above its lowest is named
HOW = (
    "Each combination of settings was trained as an ordinary run. Its loss is measured on photos that no trial is "
    "trained on, with noise and noise levels that are the same for all, each run in its own precision. Ranked by the "
    "last loss of a run, over seeds its mean."
)


def varied(places: Sequence[Place]) -> dict[str, str]:
    """Key → its short name, of those that have several values; of all where none has."""
    short = short_keys(places[0].settings)
    several = {key: short[key] for key in short if len({value_text(place.settings[key]) for place in places}) > 1}
    return several or short


def words_of(place: Place, keys: Mapping[str, str]) -> str:
    """Settings as one would say them, `lr 0.0001, linear 8`."""
    return ", ".join(f"{short} {value_text(place.settings[key])}" for key, short in keys.items())


def ranking_rows(places: Sequence[Place], noise: Noise) -> list[list[str]]:
    """A header, and a row for each combination of settings, the best first."""
    keys = varied(places)
    seeds = len(places[0].results)
    several = [f"of {seeds} seeds"] if seeds > 1 else []
    unsure = "yes" if noise.by_seeds else "?"
    rows = [
        [
            "place",
            *keys.values(),
            "held-out loss",
            "above the best",
            "more than luck",
            "lowest",
            "s/step",
            *several,
            "state",
        ]
    ]
    for number, place in enumerate(places, 1):
        known = math.isfinite(place.loss)
        paces = [result.seconds for result in place.results if result.seconds is not None]
        states = {result.state for result in place.results}
        state = next(iter(states)) if len(states) == 1 else FAILED if FAILED in states else "under way"
        luck = "" if noise.spread is None or not known or number == 1 else "no" if place.tied else unsure
        lowest = place.lowest
        rows.append(
            [
                str(number) if known else "",
                *(value_text(place.settings[key]) for key in keys),
                f"{place.loss:.6f}" if known else "",
                f"{place.gap:+.6f}" if known and number > 1 else "",
                luck,
                f"{lowest[1]:.6f} at step {lowest[0]:.0f}" if lowest else "",
                f"{fmean(paces):.2f}" if paces else "",
                *([str(len(place.finished))] if several else []),
                state,
            ]
        )
    return rows


def sentence_of(places: Sequence[Place], noise: Noise) -> tuple[str, Tone]:
    """The ranking in one sentence, and how good the news is."""
    best = places[0]
    left = sum(result.state != FINISHED for place in places for result in place.results)
    rest = f"; {left} of {sum(len(place.results) for place in places)} trials are not finished" if left else ""
    if not best.finished:
        return f"No trial is finished yet{rest}.", "plain"
    text = f"Lowest held-out loss so far: {best.loss:.6f}" if left else f"Lowest held-out loss: {best.loss:.6f}"
    text += f" with {words_of(best, varied(places))}"
    tied = sum(place.tied for place in places) - 1
    if noise.spread is not None and tied > 0:
        text += f"; {tied} other{'s are' if tied > 1 else ' is'} as good within the noise (±{noise.spread:.2g} a run)"
    elif noise.by_seeds and len(places) > 1:
        text += f"; no other is as good within the noise (±{noise.spread:.2g} a run)"
    elif len(places) > 1:
        text += "; with one seed, how much of a lead is luck is not known: --seeds 3 shows it"
    return f"{text}{rest}.", "plain" if left else "good" if noise.by_seeds and not tied else "open"


def noise_text(noise: Noise) -> str:
    """Where the noise comes from, and what it decides."""
    rule = (
        f"A gap to the best of up to {SIGMAS:g} times that, times the root of 1/n + 1/n for n seeds each, may be luck."
    )
    if noise.spread is None:
        return "Too little is measured yet to say how much of a difference is luck."
    if noise.by_seeds:
        return f"Noise: ±{noise.spread:.2g}, the standard deviation of runs that differ in the seed alone. {rule}"
    return (
        f"Noise of at least ±{noise.spread:.2g}: what the loss of a run jumps from one measurement to the next in its "
        f"second half. {rule} Another seed usually moves a run by several times more, so a larger gap says little yet "
        "(?); --seeds 3 measures it."
    )


def write_sweep_page(path: Path, results: Sequence[Result], job: JobConfig) -> Path:
    """Write the page.

    Args:
        path: of the page, in the folder of the runs.
        results: of all trials.
        job: the config that is varied.
    """
    places, noise = rank(results)
    count = len(results)
    page = Page(f"Sweep of {job.name}", f"coat-flux sweep, {job.file}, {count} trial{'s' if count > 1 else ''}")
    page.verdict(*sentence_of(places, noise))
    header, *rows = ranking_rows(places, noise)
    page.table(header, rows)
    same = {key: value for key, value in places[0].settings.items() if key not in varied(places)}
    if same:
        page.paragraph(f"All trials: {', '.join(f'{key} {value_text(value)}' for key, value in same.items())}.")
    page.paragraph(noise_text(noise))
    for place in places[:1] if places[0].finished else ():
        lowest = place.lowest
        if lowest is not None and place.loss > RISE * lowest[1]:
            page.paragraph(
                f"The best run's loss was lowest after step {lowest[0]:.0f} and has risen since: fewer steps may make "
                "a better LoRA."
            )
    page.heading("Held-out loss over the runs")
    _show_curves(page, places)
    _show_values(page, places)
    _show_samples(page, places, path.parent, job)
    _show_best(page, places[0], path.parent, job)
    failures = [[result.trial.name, result.message] for result in results if result.state == FAILED]
    if failures:
        page.heading("Failed trials")
        page.table(["trial", "why"], failures)
    page.heading("Details")
    with page.details("How it is measured"):
        page.paragraph(HOW)
        held_out = results[0].trial.job["config"]["process"][0]["validation"]["hold_out"]
        page.paragraph(f"Photos not trained on: {', '.join(held_out)}.")
    with page.details("Every trial"):
        rows = [[one.trial.name, f"{one.loss:.6f}" if math.isfinite(one.loss) else None, one.state] for one in results]
        page.table(["run folder", "held-out loss", "state"], rows)
    page.missing(f"coat-flux {__version__}")
    return page.write(path)


def _show_curves(page: Page, places: Sequence[Place]) -> None:
    """The mean over seeds, of the best settings; those that are not finished with what they have."""
    curves, keys = {}, varied(places)
    for place in [place for place in places if any(result.curve for result in place.results)][:SERIES_COLOURS]:
        found = [result.curve for result in place.finished or place.results if result.curve]
        curves[words_of(place, keys)] = [
            (points[0][0], fmean(loss for _, loss in points)) for points in zip(*found, strict=False)
        ]
    more = f", the best {SERIES_COLOURS}" if len(places) > SERIES_COLOURS else ""
    page.curves(f"Each run in its own precision{more}", curves, x="step", y="loss")


def _show_values(page: Page, places: Sequence[Place]) -> None:
    """What each value of a key came to, whatever the others were."""
    known = [place for place in places if math.isfinite(place.loss)]
    keys = varied(places)
    if len(keys) < 2 or len(known) < 2:  # the ranking says it
        return
    page.heading("By value")
    rows = []
    for key in keys:
        by_value: dict[str, list[float]] = {}
        for place in known:
            by_value.setdefault(value_text(place.settings[key]), []).append(place.loss)
        rows += [
            [key, value, f"{min(losses):.6f}", f"{fmean(losses):.6f}", str(len(losses))]
            for value, losses in by_value.items()
        ]
    page.table(["key", "value", "lowest loss", "mean loss", "combinations"], rows)


def _show_samples(page: Page, places: Sequence[Place], folder: Path, job: JobConfig) -> None:
    """The last samples of the best settings, their first seeds side by side."""
    items, newest, keys = job.sample.items(), {}, varied(places)
    for place in places[:PICTURED]:
        for result in place.finished[:1]:
            try:
                samples = RunFolder(folder / result.trial.name).samples()
            except RunFolderError:
                continue
            last = max((sample.step for sample in samples), default=None)
            newest[words_of(place, keys)] = {one.number: one.path for one in samples if one.step == last}
    if not any(newest.values()):
        return
    page.heading("Samples")
    for number, item in enumerate(items):
        cells = [(words, paths[number]) for words, paths in newest.items() if number in paths]
        prompt = inject_trigger(item.prompt, job.trigger_word, add_if_missing=False)
        page.images(prompt, cells, columns=len(newest))


def _show_best(page: Page, best: Place, folder: Path, job: JobConfig) -> None:
    if not best.finished:
        return
    page.heading("The best result")
    trial = best.finished[0].trial
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
