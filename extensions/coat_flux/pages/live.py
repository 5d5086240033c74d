"""The live page and its server: the report's sections, refreshed every two seconds, with three buttons.

    GET /                  the page
    GET /look              JSON of `inspect_run`
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
import json
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
from werkzeug.routing import Map, Rule
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from ..base.errors import UserError
from ..base.run_log import LOG_FILE
from ..watch.live import COMMANDS, RunStatus, give_command, read_status
from .html import Page, Tone
from .report import show_live
from .run import MEMORY_FILE, SAMPLE_NAME, RunFolder, RunFolderError
from .style import STYLE

__all__ = ["Watch", "WatchError", "inspect_run", "shell"]

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
ROUTES = Map(
    [
        Rule("/", endpoint="page", methods=["GET"]),
        Rule("/look", endpoint="look", methods=["GET"]),
        Rule("/samples/<name>", endpoint="sample", methods=["GET"]),
        Rule("/commands/<name>", endpoint="command", methods=["POST"]),
    ]
)
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


def shell(name: str, folder: str, nonce: str) -> str:
    """The page around `inspect_run`'s parts; the nonce lets its script run, and no other."""
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
    """The current state: `title` of the browser's tab, `parts` of the page as HTML, `takes`: accepted commands."""
    page, title, status = Page("", samples_at="samples"), "starting", None
    try:
        run = RunFolder(run_dir)
        status, title = read_status(run_dir), run.name
        loss, pace = run.metrics.get("loss", []), run.metrics.get("s_per_it", [])[-PACE_STEPS:]
    except (RunFolderError, FileNotFoundError):
        page.verdict("The run has not written anything yet.", "plain")
    except (OSError, ValueError) as error:
        page.verdict(str(error), "open")
    else:
        done = int(loss[-1][0]) if loss else 0
        if status is None:
            steps = run.block("train").get("steps", done)
            steps = steps if isinstance(steps, int) else done
        else:  # rows after a resumed run's first step are the previous run's
            done, steps = max(done, status.first), status.steps
        page.verdict(*_sentence(run, status, done, steps, [value for _, value in pace]))
        page.progress(done, steps)
        show_live(page, run)
        with page.details("Log", is_open=True):
            page.code(_log_tail(run_dir / LOG_FILE))
        title = f"{100 * done // max(steps, 1)} % {run.name}"
    takes = status.takes if status is not None and status.alive else ()
    return {"title": title, "parts": page.parts, "takes": takes}


def _sentence(run: RunFolder, status: RunStatus | None, done: int, steps: int, paces: list[float]) -> tuple[str, Tone]:
    place = f"step {done} of {steps}"
    if status is None:
        return f"{place}; this run does not say whether it is still going (an older version, or COAT is off)", "open"
    if status.alive:
        seconds = median(paces) if paces else math.nan
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
    try:
        phases = (run.json(MEMORY_FILE) or {})["phases"]
        running = "step" if "step" in phases else "load"
        return next((name for name in PHASES if phases.get(name, {}).get("open")), running)
    except (OSError, ValueError, KeyError, AttributeError):
        return "load"


def _log_tail(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:])
    return ""


# -- the server --------------------------------------------------------------------------------------------------------


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Requests are not worth a line each."""


class Watch:
    """A WSGI application for one run, whose folder need not exist yet, and its server."""

    def __init__(self, run_dir: Path, host: str = LOOPBACK):
        self.run_dir, self.host = run_dir, host
        self.token = secrets.token_urlsafe(24)

    @property
    def is_private(self) -> bool:
        """Whether it listens for this machine only."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request."""
        request = Request(environ)
        try:
            if not self._is_ours(request.headers.get("Host", "")):
                raise Forbidden("this page answers under the address that coat-flux printed only")
            endpoint, values = ROUTES.bind_to_environ(environ).match()
            response = getattr(self, f"_{endpoint}")(request, **values)
        except HTTPException as error:
            response = Response(f"{error.description}\n", error.code, mimetype="text/plain")
        for header, value in HEADERS.items():
            response.headers.setdefault(header, value)
        return response(environ, start_response)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            names = ["localhost", *([] if self.is_private else [self.host, socket.gethostname()])]
            return name in [known.lower() for known in names]
        return address.is_loopback or not self.is_private

    def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        page = Response(shell(self.run_dir.name, str(self.run_dir), nonce), mimetype="text/html")
        page.headers["Content-Security-Policy"] = POLICY.format(nonce)
        return page

    def _look(self, request: Request) -> Response:
        return Response(json.dumps(inspect_run(self.run_dir)), mimetype="application/json")

    def _sample(self, request: Request, name: str) -> Response:
        path = self.run_dir / "samples" / name
        if SAMPLE_NAME.fullmatch(name) is None or path.is_symlink() or not path.is_file():
            raise NotFound("there is no such sample")
        return send_file(path, request.environ, max_age=86_400)  # its name has a timestamp

    def _command(self, request: Request, name: str) -> Response:
        given = request.headers.get("X-Coat-Token", "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Forbidden("the token is missing or wrong: open the address that coat-flux printed")
        if name not in COMMANDS:
            raise NotFound("there is no such command")
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
        wanted = [*range(PORT, PORT + PORTS_TRIED), 0] if port is None else [port]
        for number in wanted:
            try:
                listening = socket.create_server((self.host, number), family=family)
                break
            except OSError as error:
                problem = error
        else:
            raise WatchError(f"--host {self.host} --port {wanted[0]}: cannot listen there ({problem}); choose another")
        # given a listening socket, werkzeug does not print and exit if the port is taken
        server = make_server(self.host, 0, self, threaded=True, request_handler=_Quiet, fd=listening.fileno())
        threading.Thread(target=server.serve_forever, name="coat-flux watch", daemon=True).start()
        self._kept = listening, server
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{listening.getsockname()[1]}/#{self.token}"
