"""What there is to see of a run now, as a piece of HTML, from the files in its folder.

Nothing is kept between two looks: the run may be of any process, of either trainer, and end or begin again meanwhile.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from urllib.parse import quote

from ..base.run_log import LOG_FILE
from ..watch.live import RunStatus, read_status
from .charts import line_chart
from .logs import Curve, read_metrics, read_validation, smoothed
from .run import NotARun, RunFolder

__all__ = ["View", "look_at"]

LOG_BYTES, LOG_LINES = 16_384, 24
PACE_STEPS = 30  # newest ones that the time left is estimated from
DOING = {
    "load": "Loading the model",
    "cache": "Encoding photos and captions",
    "validate": "Measuring the held-out loss",
    "sample": "Sampling",
    "step": "Training",
    "save": "Saving",
}
GB = 1e9


@dataclass(frozen=True)
class View:
    """One look at a run.

    Attributes:
        title: for the browser's tab.
        parts: HTML from top to bottom, every text in it escaped; the page replaces those that changed.
        takes: commands the run obeys now.
    """

    title: str
    parts: tuple[str, ...]
    takes: tuple[str, ...]


def look_at(run_dir: Path) -> View:
    """Look at a run; a file that is being written, or damaged, costs its own part only."""
    try:
        run = RunFolder(run_dir)
    except (NotARun, OSError):
        return View("starting", ('<p class="verdict plain">The run has not written anything yet.</p>',), ())
    status = read_status(run_dir)
    try:
        metrics, held_out = read_metrics(run_dir), read_validation(run_dir)
    except (OSError, ValueError) as error:
        return View(run.name, (f'<p class="verdict open">{html.escape(str(error))}</p>',), ())
    done, steps = _progress(run, status, metrics.get("loss", []))
    sentence, tone = _verdict(run, status, done, steps, metrics.get("s_per_it", []))
    parts = (
        f'<p class="verdict {tone}" role="status">{html.escape(sentence)}</p>',
        f'<progress max="{max(steps, 1)}" value="{done}" aria-label="steps done"></progress>',
        _samples(run),
        _loss(run, metrics.get("loss", []), held_out),
        _memory(run, metrics.get("peak_memory_gb", [])),
        _log(run_dir / LOG_FILE),
    )
    takes = status.takes if status is not None and status.alive else ()
    return View(f"{100 * done // max(steps, 1)} % {run.name}", parts, takes)


def _progress(run: RunFolder, status: RunStatus | None, loss: Curve) -> tuple[int, int]:
    """Steps done, and of how many; rows after the step where a resumed run begins are of the run before."""
    written = int(loss[-1][0]) if loss else 0
    if status is None:
        steps = run.block("train").get("steps", written)
        return written, steps if isinstance(steps, int) else written
    return max(written, status.first), status.steps


def _verdict(run: RunFolder, status: RunStatus | None, done: int, steps: int, pace: Curve) -> tuple[str, str]:
    place = f"step {done} of {steps}"
    if status is None:
        return f"{place}; this run does not say whether it goes on (an older version, or COAT is off)", "open"
    if status.alive:
        seconds = median(value for _, value in pace[-PACE_STEPS:]) if pace else math.nan
        left = f", {seconds:.3g} s per step, {_time(seconds * (steps - done))} left" if pace and done < steps else ""
        return f"{DOING[_phase(run)]}: {place}{left}", "plain"
    if status.ended == "finished":
        return f"Finished: {place}", "good"
    if status.ended == "stopped":
        return f"Stopped after {place}. To go on, start the same config again", "open"
    if status.ended is not None:
        return f"Ended at {place}: {status.ended}", "bad"
    return f"The process is gone, at {place}, without a word. To go on from the last save, start it again", "bad"


def _phase(run: RunFolder) -> str:
    """The open phase of `memory.json`; before there is one a model is loaded."""
    try:
        phases = (run.json(Path("coat") / "memory.json") or {})["phases"]
        return next(
            (name for name in DOING if phases.get(name, {}).get("open")), "step" if "step" in phases else "load"
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return "load"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "?"


def _samples(run: RunFolder) -> str:
    found = [sample for sample in run.samples() if not sample.path.is_symlink()]
    if not found:
        return '<p class="missing">No samples yet.</p>'
    newest, prompts = max(sample.step for sample in found), run.prompts()
    cells = []
    for sample in found:
        if sample.step == newest:
            prompt = prompts[sample.number] if sample.number < len(prompts) else f"prompt {sample.number + 1}"
            text = html.escape(prompt.replace("[trigger]", str(run.process.get("trigger_word") or "[trigger]")))
            source = f"samples/{quote(sample.path.name)}"
            cells.append(f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>')
    return f'<h2>Samples at step {newest}</h2><div class="grid wrapping" style="--columns: 4">{"".join(cells)}</div>'


def _loss(run: RunFolder, loss: Curve, held_out: Curve) -> str:
    parts = []
    if loss:
        series = {"each step": loss, "smoothed": smoothed(loss)}
        parts.append(line_chart("Training loss", series, x="step", y="loss", faint="each step"))
    finite = [point for point in held_out if math.isfinite(point[1])]
    if finite and run.block("validation"):
        lowest = min(finite, key=lambda point: point[1])
        marks = {lowest[0]: f"lowest: {lowest[1]:.4g} at step {lowest[0]:.0f}"}
        parts.append(line_chart("Loss on photos held out", {"loss": finite}, x="step", y="loss", marks=marks))
    return "".join(parts)


def _memory(run: RunFolder, peaks: Curve) -> str:
    try:
        phases = (run.json(Path("coat") / "memory.json") or {}).get("phases", {})
        rows = [(DOING[name], phases[name]["peak"]["allocated"] / GB) for name in DOING if name in phases]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        rows = []
    if peaks:
        rows.append(("Newest step", peaks[-1][1]))
    if not rows:
        return ""
    cells = "".join(f'<tr><td>{name}</td><td class="number">{value:.2f} GB</td></tr>' for name, value in rows)
    most = max(value for _, value in rows)
    return f'<details><summary>Peak memory {most:.2f} GB</summary><table class="facts">{cells}</table></details>'


def _log(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    tail = "\n".join(text.splitlines()[-LOG_LINES:])
    return f"<details open><summary>Log</summary><pre>{html.escape(tail)}</pre></details>"
