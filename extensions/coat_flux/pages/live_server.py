"""The live page's server.

    GET /                  the page
    GET /look              JSON of `live_page.inspect_run`
    GET /samples/<name>    a sample of the run
    POST /commands/<name>  with the token in the header X-Coat-Token

It listens on the loopback address unless asked otherwise. The token stands behind the # of the address that is printed,
so that it is in no request, log or Referer; a page of another origin cannot send the header, for there is no CORS.
Requests whose Host is another name than this machine's are refused: a name that an attacker lets point here (DNS
rebinding) would make his page one of our origin. Reading needs no token. Nothing but the page, the look and the samples
is served.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from werkzeug.exceptions import Conflict, Forbidden, HTTPException, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from ..base.errors import UserError
from ..watch.live import COMMANDS, give_command, read_status
from .live_page import inspect_run, shell
from .run import SAMPLE_NAME

__all__ = ["PORT", "Watch", "WatchError"]

LOOPBACK = "127.0.0.1"
PORT, PORTS_TRIED = 8675, 20
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


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Requests are not worth a line each."""


class Watch:
    """A WSGI application for one run, whose folder need not be there yet, and the server around it."""

    def __init__(self, run_dir: Path, host: str = LOOPBACK):
        self.run_dir, self.host = run_dir, host
        self.token = secrets.token_urlsafe(24)

    @property
    def is_private(self) -> bool:
        """It listens for this machine only."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    # -- the application -----------------------------------------------------------------------------------------------

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
        return send_file(path, request.environ, max_age=86_400)  # its name has the time it was drawn at

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

    # -- the server ----------------------------------------------------------------------------------------------------

    def start(self, port: int | None = None) -> str:
        """Serve from a thread that ends with the process.

        A port of None takes the first free one from 8675 on, 0 any. Returns the address to open, with the token.

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
        # werkzeug would print and exit where a port is taken; given a socket that listens it only serves
        server = make_server(self.host, 0, self, threaded=True, request_handler=_Quiet, fd=listening.fileno())
        threading.Thread(target=server.serve_forever, name="coat-flux watch", daemon=True).start()
        self._kept = listening, server
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{listening.getsockname()[1]}/#{self.token}"
