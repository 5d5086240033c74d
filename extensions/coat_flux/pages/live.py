"""The live page and its server: the report's sections, refreshed every two seconds, with three buttons.

    GET /                  the page
    GET /samples/<name>    a sample of the run
    POST /commands/<name>  with the token in the header X-Coat-Token

The server keeps no state and listens on the loopback address unless told otherwise. Only commands need the token, which
is in the fragment of the printed address, so no request, log or Referer holds it; for want of CORS, other origins
cannot send the header. Requests with a foreign Host are refused, which stops DNS rebinding.
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import math
import secrets
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from werkzeug.exceptions import Conflict, Forbidden, HTTPException, NotFound
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from ..base.errors import UserError
from ..base.run_log import LOG_FILE
from ..watch.live import COMMANDS, RunStatus, give_command, read_status
from .html import Page, Tone
from .report import show_live
from .run import MEMORY_FILE, SAMPLE_NAME, RunFolder, RunFolderError

__all__ = ["Watch", "WatchError", "live_page"]

LOOPBACK = "127.0.0.1"
PORT, PORTS_TRIED = 8675, 20
LOG_BYTES, LOG_LINES = 16_384, 24
PACE_STEPS = 30  # newest steps, for the estimate of the time left
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
STYLE = """<style>
progress { width: 100%; height: 1rem; accent-color: var(--c0); }
.asks { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1rem 0 .25rem; }
button {
  font: inherit; padding: .45rem .9rem; border: 1px solid var(--line); border-radius: .3rem; cursor: pointer;
  color: var(--ink); background: var(--raised);
}
button:hover:enabled, button:focus-visible { border-color: var(--c0); outline: 1px solid var(--c0); }
button:disabled { color: var(--quiet); cursor: default; border-style: dashed; }
button[name=stop]:enabled { color: var(--bad); background: var(--bad-paper); }
</style>"""
SCRIPT = """
const token = decodeURIComponent(location.hash.slice(1));
const live = document.querySelector('main'), note = document.getElementById('note');
const buttons = [...document.querySelectorAll('button')];
const partsOf = page => [...page.querySelectorAll('main > section')].map(section => section.innerHTML);
let shown = partsOf(document);
function show(page) {
  const parts = partsOf(page);
  while (live.children.length < parts.length) live.append(document.createElement('section'));
  [...live.children].forEach((section, i) => {
    const part = parts[i] || '', folded = section.querySelector('details');
    if (part === (shown[i] || '')) return;
    section.innerHTML = part;
    if (folded && section.querySelector('details')) section.querySelector('details').open = folded.open;
  });
  shown = parts;
  document.title = page.title;
  for (const button of buttons) button.disabled = !token || page.getElementsByName(button.name)[0].disabled;
}
async function refresh() {
  try {
    const answer = await fetch(location.pathname);
    show(new DOMParser().parseFromString(await answer.text(), 'text/html'));
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
show(document);
setTimeout(refresh, 2000);
"""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{}'; style-src 'unsafe-inline'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WatchError(UserError):
    """The page cannot be served."""


# -- the page ----------------------------------------------------------------------------------------------------------


def live_page(run_dir: Path, nonce: str) -> str:
    """The page of a run, whose folder need not exist yet; the nonce lets its script run, and no other."""
    status = read_status(run_dir)
    page = Page(run_dir.name, str(run_dir), samples_at="samples")
    shell, page.parts = page.parts, []
    try:
        _show_run(page, RunFolder(run_dir), status)
    except (RunFolderError, FileNotFoundError):
        page.verdict("The run has not written anything yet.", "plain")
    except (OSError, ValueError) as error:
        page.verdict(str(error), "open")
    sections = [f"<section>{part}</section>" for part in page.parts]
    buttons = []
    for name, (text, title) in BUTTONS.items():
        accepted = status is not None and status.alive and name in status.takes
        state = "" if accepted else " disabled"
        buttons.append(f'<button type="button" name="{name}" title="{html.escape(title)}"{state}>{text}</button>')
    shell += [f'<div class="asks">{"".join(buttons)}</div>', '<p id="note" class="missing" role="status"></p>']
    page.parts = [*shell, "<main>", *sections, "</main>", f'<script nonce="{nonce}">{SCRIPT}</script>']
    return page.html(STYLE)


def _show_run(page: Page, run: RunFolder, status: RunStatus | None) -> None:
    loss, pace = run.metrics.get("loss", []), run.metrics.get("s_per_it", [])
    done = int(loss[-1][0]) if loss else 0
    steps = run.block("train").get("steps", done)
    if status is not None:  # rows after a resumed run's first step are the previous run's
        done, steps = max(done, status.first), status.steps
    elif not isinstance(steps, int):
        steps = done
    page.title = f"{100 * done // max(steps, 1)} % {run.name}"
    page.verdict(*_sentence(run, status, done, steps, [value for _, value in pace[-PACE_STEPS:]]))
    page.parts.append(f'<progress max="{max(steps, 1)}" value="{done}" aria-label="steps done"></progress>')
    show_live(page, run)
    log = ""
    with suppress(OSError), (run.path / LOG_FILE).open("rb") as file:
        file.seek(max(0, (run.path / LOG_FILE).stat().st_size - LOG_BYTES))
        log = "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:])
    with page.details("Log", is_open=True):
        page.code(log)


def _sentence(run: RunFolder, status: RunStatus | None, done: int, steps: int, paces: list[float]) -> tuple[str, Tone]:
    place = f"step {done} of {steps}"
    if status is None:
        return f"{place}; this run does not say whether it is still going (COAT is off)", "open"
    if status.alive:
        seconds = median(paces) if paces else math.nan
        left = ""
        if math.isfinite(seconds) and done < steps:
            left = f", {seconds:.3g} s per step, {timedelta(seconds=round(seconds * (steps - done)))} left"
        return f"{_phase(run)}: {place}{left}", "plain"
    if status.ended == "finished":
        return f"Finished: {place}", "good"
    if status.ended == "stopped":
        return f"Stopped after {place}. To resume, start the same config again", "open"
    if status.ended is not None:
        return f"Ended at {place}: {status.ended}", "bad"
    return f"The process ended at {place} without a message. To resume from the last save, start it again", "bad"


def _phase(run: RunFolder) -> str:
    """What the run does now."""
    try:
        phases = (run.json(MEMORY_FILE) or {})["phases"]
        for name, words in PHASES.items():
            if phases.get(name, {}).get("open"):
                return words
        return PHASES["step" if "step" in phases else "load"]
    except (OSError, ValueError, KeyError, AttributeError):
        return PHASES["load"]


# -- the server --------------------------------------------------------------------------------------------------------


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Requests are not worth a line each."""


class Watch:
    """A WSGI application for one run, whose folder need not exist yet, and its server."""

    def __init__(self, run_dir: Path, host: str = LOOPBACK):
        self.run_dir, self.host = run_dir, host
        self.is_private = _is_loopback(host)  # whether it listens for this machine only
        self.token = secrets.token_urlsafe(24)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request."""
        request = Request(environ)
        try:
            response = self._answer(request)
        except HTTPException as error:
            response = Response(f"{error.description}\n", error.code, mimetype="text/plain")
        for header, value in HEADERS.items():
            response.headers.setdefault(header, value)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        if not self._is_ours(request.headers.get("Host", "")):
            raise Forbidden("this page answers under the address that coat-flux printed only")
        match request.method, *request.path.split("/")[1:]:
            case "GET", "":
                nonce = secrets.token_urlsafe(16)
                page = Response(live_page(self.run_dir, nonce), mimetype="text/html")
                page.headers["Content-Security-Policy"] = POLICY.format(nonce)
                return page
            case "GET", "samples", name:
                path = self.run_dir / "samples" / name
                if SAMPLE_NAME.fullmatch(name) and path.is_file() and not path.is_symlink():
                    return send_file(path, request.environ, max_age=86_400)  # its name has a timestamp
            case "POST", "commands", name:
                return self._command(name, request.headers.get("X-Coat-Token", ""))
        raise NotFound("page, sample or command not found")

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if self.is_private or _is_loopback(name):
            return _is_loopback(name)
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in (self.host.lower(), socket.gethostname().lower())

    def _command(self, name: str, token: str) -> Response:
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise Forbidden("the token is missing or wrong: open the address that coat-flux printed")
        if name not in COMMANDS:
            raise NotFound("command not found")
        status = read_status(self.run_dir)
        if status is None or not status.alive:
            raise Conflict("the run is not going on")
        if name not in status.takes:
            raise Conflict(f"this run cannot {name}: its config has no prompts, or train.disable_sampling")
        give_command(self.run_dir, name)
        return Response(f"{name}: asked for, after the step under way\n", 202, mimetype="text/plain")

    def start(self, port: int | None = None) -> str:
        """Serve from a daemon thread, on the first free port from 8675 by default; returns the address with the token.

        Raises:
            WatchError: the port is taken, or the host is not this machine's.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        ports = [*range(PORT, PORT + PORTS_TRIED), 0] if port is None else [port]
        for number in ports:
            try:
                listening = socket.create_server((self.host, number), family=family)
                break
            except OSError as error:
                problem = error
        else:
            raise WatchError(f"--host {self.host} --port {ports[0]}: cannot listen there ({problem}); choose another")
        # given a listening socket, werkzeug does not print and exit if the port is taken
        server = make_server(self.host, 0, self, threaded=True, request_handler=_Quiet, fd=listening.fileno())
        threading.Thread(target=server.serve_forever, name="coat-flux watch", daemon=True).start()
        self._serving = listening, server  # closed when collected
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{listening.getsockname()[1]}/#{self.token}"


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
