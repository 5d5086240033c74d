"""A headless browser that does as it is told: the WebDriver protocol of chromedriver, with the standard library."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars"
)


def browser() -> str:
    """The browser of this machine; skips the test where there is none."""
    known = [os.environ.get("COAT_BROWSER"), *map(shutil.which, NAMES)]
    mac = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
    if mac.exists():
        known.append(str(mac))
    for path in known:
        if path:
            return path
    pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (or set COAT_BROWSER)")


def until(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until `look` returns something true, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds:g} s")


class Driver:
    """One window, opened by the chromedriver at `server`; `options` are the browser's command line."""

    def __init__(self, server: str, options: list[str]):
        self._at = f"{server}/session"
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"binary": browser(), "args": options}}
        made = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._at += f"/{made['sessionId']}"

    def _call(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        """Load a page, a new one even where only what stands behind # differs."""
        self._call("POST", "/url", {"url": "about:blank"})
        self._call("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def click(self, selector: str) -> None:
        """Click as a mouse does: fails where something else lies over it."""
        (element,) = self._call("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._call("POST", f"/element/{element}/click", {})

    def close(self) -> None:
        self._call("DELETE", "")


@contextmanager
def driven_browser(folder: Path) -> Iterator[Driver]:
    """A browser for a `with` block, its files in `folder`; skips the test where there is none."""
    browser()
    found = shutil.which("chromedriver")
    if found is None:
        pytest.skip("no chromedriver is installed, which drives the browser")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([found, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(port), 60, "chromedriver")
        driver = Driver(server, [*QUIET.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900"])
        try:
            yield driver
        finally:
            driver.close()
    finally:
        process.terminate()
        process.wait(timeout=30)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
