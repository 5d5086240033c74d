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
import secrets
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from werkzeug.exceptions import Conflict, Forbidden, HTTPException, NotFound
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from ..base.errors import UserError
from ..base.run_log import LOG_FILE
from ..watch.live import COMMANDS, give_command, read_status
from .html import Page
from .report import progress, show_live
from .run import SAMPLE_NAME, RunFolder, RunFolderError

LOOPBACK = "127.0.0.1"
PORT, PORTS_TRIED = 8675, 20
LOG_BYTES, LOG_LINES = 16_384, 24
BUTTONS = {
    "sample": ("Sample now", "draw the config's prompts after this step"),
    "save": ("Save now", "write a checkpoint after this step; save.max_step_saves_to_keep holds for it, too"),
    "stop": ("Stop after this step", "save and end, as Ctrl+C does; the same command resumes from there"),
}
SCRIPT = (Path(__file__).parent / "live.js").read_text(encoding="utf-8")
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


def live_page(run_dir: Path, nonce: str) -> str:
    """The page of a run, whose folder need not exist yet; the nonce lets its script run, and no other."""
    status = read_status(run_dir)
    page = Page(run_dir.name, str(run_dir), samples_at="samples")
    shell, page.parts = page.parts, []
    try:
        run = RunFolder(run_dir)
        loss = run.metrics.get("loss", [])
        done = int(loss[-1][0]) if loss else 0
        steps = run.block("train").get("steps", done)
        if status is not None:  # rows after a resumed run's first step are the previous run's
            done, steps = max(done, status["first"]), status["steps"]
        elif not isinstance(steps, int):
            steps = done
        page.title = f"{100 * done // max(steps, 1)} % {run.name}"
        page.verdict(*progress(run, status, done, steps))
        page.parts.append(f'<progress max="{max(steps, 1)}" value="{done}" aria-label="steps done"></progress>')
        show_live(page, run)
        with page.details("Log", is_open=True), suppress(OSError), (run.path / LOG_FILE).open("rb") as file:
            file.seek(max(0, (run.path / LOG_FILE).stat().st_size - LOG_BYTES))
            page.code("\n".join(file.read().decode(errors="replace").splitlines()[-LOG_LINES:]))
    except (RunFolderError, FileNotFoundError):
        page.verdict("The run has not written anything yet.", "plain")
    except (OSError, ValueError) as error:
        page.verdict(str(error), "open")
    sections = [f"<section>{part}</section>" for part in page.parts]
    buttons = []
    for name, (text, title) in BUTTONS.items():
        accepted = status is not None and status["alive"] and name in status["takes"]
        state = "" if accepted else " disabled"
        buttons.append(f'<button type="button" name="{name}" title="{html.escape(title)}"{state}>{text}</button>')
    shell += [f'<div class="asks">{"".join(buttons)}</div>', '<p id="note" class="missing" role="status"></p>']
    page.parts = [*shell, "<main>", *sections, "</main>", f'<script nonce="{nonce}">{SCRIPT}</script>']
    return page.html(head="")


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
                if not hmac.compare_digest(request.headers.get("X-Coat-Token", "").encode(), self.token.encode()):
                    raise Forbidden("the token is missing or wrong: open the address that coat-flux printed")
                if name not in COMMANDS:
                    raise NotFound("command not found")
                status = read_status(self.run_dir)
                if status is None or not status["alive"]:
                    raise Conflict("the run is not going on")
                if name not in status["takes"]:
                    raise Conflict(f"this run cannot {name}: its config has no prompts, or train.disable_sampling")
                give_command(self.run_dir, name)
                return Response(f"{name}: asked for, after the step under way\n", 202, mimetype="text/plain")
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

    def start(self, port: int | None = None) -> str:
        """Serve from a thread, by default on the first free port from 8675; returns the address with the token.

        Raises UserError if the port is taken, or the host is not this machine's.
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
            raise UserError(f"--host {self.host} --port {ports[0]}: cannot listen there ({problem}); choose another")
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
