"""The live page: buttons, a script that asks every two seconds, and what there is to show of a run now.

Nothing is kept between two answers: the run may be of any process, of either trainer, and end or begin again meanwhile.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from ..base.run_log import LOG_FILE
from ..watch.live import RunStatus, read_status
from .charts import line_chart
from .run import MEMORY_FILE, RunFolder, RunFolderError, smoothed
from .style import STYLE

__all__ = ["inspect_run", "shell"]

LOG_BYTES, LOG_LINES = 16_384, 24
PACE_STEPS = 30  # newest ones that the time left is estimated from
PHASES = {
    "load": "Loading the model",
    "cache": "Encoding photos and captions",
    "validate": "Measuring the held-out loss",
    "sample": "Sampling",
    "step": "Training",
    "save": "Saving",
}
BUTTONS = {
    "sample": ("Sample now", "draw the config's prompts after this step"),
    "save": ("Save now", "write a checkpoint after this step; save.max_step_saves_to_keep holds for it, too"),
    "stop": ("Stop after this step", "save and end, as Ctrl+C does; the same command resumes from there"),
}
OWN_STYLE = """
progress { width: 100%; height: 1rem; accent-color: var(--c0); }
.asks { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1rem 0 .25rem; }
button {
  font: inherit; padding: .45rem .9rem; border: 1px solid var(--line); border-radius: .3rem; cursor: pointer;
  color: var(--ink); background: var(--raised);
}
button:hover:enabled, button:focus-visible { border-color: var(--c0); outline: 1px solid var(--c0); }
button:disabled { color: var(--quiet); cursor: default; border-style: dashed; }
button[name=stop]:enabled { color: var(--bad); background: var(--bad-paper); }
.grid.wrapping { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
"""
SCRIPT = """
const token = decodeURIComponent(location.hash.slice(1));
const live = document.getElementById('live'), note = document.getElementById('note');
const buttons = [...document.querySelectorAll('button')];
let shown = [];
function show(look) {
  while (live.children.length < look.parts.length) live.append(document.createElement('section'));
  [...live.children].forEach((section, i) => {
    const part = look.parts[i] || '', folded = section.querySelector('details');
    if (part === shown[i]) return;
    section.innerHTML = part;
    if (folded && section.querySelector('details')) section.querySelector('details').open = folded.open;
  });
  shown = look.parts;
  document.title = look.title;
  for (const button of buttons) button.disabled = !token || !look.takes.includes(button.name);
}
async function refresh() {
  try {
    show(await (await fetch('look')).json());
    if (note.dataset.lost) { note.textContent = ''; delete note.dataset.lost; }
  } catch {
    note.dataset.lost = '1';
    note.textContent = 'No answer: coat-flux watch, or the training it belongs to, has ended.';
    buttons.forEach(button => button.disabled = true);
  }
  setTimeout(refresh, 2000);
}
for (const button of buttons) button.addEventListener('click', async () => {
  button.disabled = true;
  const answer = await fetch('commands/' + button.name, {method: 'POST', headers: {'X-Coat-Token': token}});
  const text = note.textContent = await answer.text();
  setTimeout(() => { if (note.textContent === text) note.textContent = ''; }, 8000);
});
if (!token) note.textContent = 'Read only. The buttons need the whole address that coat-flux printed, with its # part.';
addEventListener('hashchange', () => location.reload());
refresh();
"""


def shell(name: str, folder: str, nonce: str) -> str:
    """The page around what `inspect_run` finds; the nonce lets its script run, and no other."""
    buttons = "".join(
        f'<button type="button" name="{key}" title="{html.escape(title)}" disabled>{html.escape(text)}</button>'
        for key, (text, title) in BUTTONS.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>"
        f'<h1>{html.escape(name)}</h1><p class="subtitle">{html.escape(folder)}</p>'
        f'<div class="asks">{buttons}</div><p id="note" class="missing" role="status"></p><main id="live"></main>'
        f'<script nonce="{nonce}">{SCRIPT}</script></body></html>\n'
    )


def inspect_run(run_dir: Path) -> dict[str, Any]:
    """What there is to show of a run now; a file that is being written, or damaged, costs its own part only.

    Returns:
        title: for the browser's tab; parts: HTML from top to bottom, every text in it escaped, of which the page
        replaces those that changed; takes: commands the run obeys now.
    """
    try:
        run = RunFolder(run_dir)
    except (RunFolderError, OSError):
        return _view("starting", '<p class="verdict plain">The run has not written anything yet.</p>')
    status = read_status(run_dir)
    try:
        loss, pace = run.metrics.get("loss", []), run.metrics.get("s_per_it", [])[-PACE_STEPS:]
        charts = _loss_charts(run)
    except (OSError, ValueError) as error:
        return _view(run.name, f'<p class="verdict open">{html.escape(str(error))}</p>')
    done = int(loss[-1][0]) if loss else 0
    if status is None:
        steps = run.block("train").get("steps", done)
        steps = steps if isinstance(steps, int) else done
    else:  # rows after the step where a resumed run begins are of the run before
        done, steps = max(done, status.first), status.steps
    seconds = median(value for _, value in pace) if pace else math.nan
    sentence, tone = _verdict(run, status, done, steps, seconds)
    parts = (
        f'<p class="verdict {tone}" role="status">{html.escape(sentence)}</p>',
        f'<progress max="{max(steps, 1)}" value="{done}" aria-label="steps done"></progress>',
        _samples(run),
        charts,
        _memory(run),
        _log(run_dir / LOG_FILE),
    )
    takes = status.takes if status is not None and status.alive else ()
    return _view(f"{100 * done // max(steps, 1)} % {run.name}", *parts, takes=takes)


def _view(title: str, *parts: str, takes: Sequence[str] = ()) -> dict[str, Any]:
    return {"title": title, "parts": parts, "takes": takes}


def _verdict(run: RunFolder, status: RunStatus | None, done: int, steps: int, seconds: float) -> tuple[str, str]:
    place = f"step {done} of {steps}"
    if status is None:
        return f"{place}; this run does not say whether it is still going (an older version, or COAT is off)", "open"
    if status.alive:
        left = ""
        if not math.isnan(seconds) and done < steps:
            time = timedelta(seconds=round(seconds * (steps - done))) if math.isfinite(seconds) else "?"
            left = f", {seconds:.3g} s per step, {time} left"
        return f"{PHASES[_phase(run)]}: {place}{left}", "plain"
    if status.ended == "finished":
        return f"Finished: {place}", "good"
    if status.ended == "stopped":
        return f"Stopped after {place}. To resume, start the same config again", "open"
    if status.ended is not None:
        return f"Ended at {place}: {status.ended}", "bad"
    return f"The process ended at {place} without a message. To resume from the last save, start it again", "bad"


def _phase(run: RunFolder) -> str:
    """The open phase of `memory.json`; before there is one a model is loaded."""
    try:
        phases = (run.json(MEMORY_FILE) or {})["phases"]
        running = "step" if "step" in phases else "load"
        return next((name for name in PHASES if phases.get(name, {}).get("open")), running)
    except (OSError, ValueError, KeyError, AttributeError):
        return "load"


def _samples(run: RunFolder) -> str:
    found = [sample for sample in run.samples() if not sample.path.is_symlink()]
    if not found:
        return '<p class="missing">No samples yet.</p>'
    newest, prompts = max(sample.step for sample in found), run.prompts()
    cells = []
    for sample in found:
        if sample.step == newest:
            prompt = prompts[sample.number] if sample.number < len(prompts) else f"prompt {sample.number + 1}"
            text = html.escape(prompt)
            source = f"samples/{quote(sample.path.name)}"
            cells.append(f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>')
    return f'<h2>Samples at step {newest}</h2><div class="grid wrapping" style="--columns: 4">{"".join(cells)}</div>'


def _loss_charts(run: RunFolder) -> str:
    charts = []
    loss = run.metrics.get("loss", [])
    if loss:
        series = {"each step": loss, "smoothed": smoothed(loss)}
        charts.append(line_chart("Training loss", series, x="step", y="loss", faint="each step"))
    finite = [point for point in run.validation if math.isfinite(point[1])]
    if finite and run.block("validation"):
        lowest = min(finite, key=lambda point: point[1])
        marks = {lowest[0]: f"lowest: {lowest[1]:.4g} at step {lowest[0]:.0f}"}
        charts.append(line_chart("Loss on photos held out", {"loss": finite}, x="step", y="loss", marks=marks))
    return "".join(charts)


def _memory(run: RunFolder) -> str:
    try:
        phases = (run.json(MEMORY_FILE) or {}).get("phases", {})
        rows = [(PHASES[name], phases[name]["peak"]["allocated"] / 1e9) for name in PHASES if name in phases]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        rows = []
    rows += [("Newest step", peak) for _, peak in run.metrics.get("peak_memory_gb", [])[-1:]]
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
