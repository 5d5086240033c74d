"""The browser of this machine."""

import os
import shutil
from pathlib import Path

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
