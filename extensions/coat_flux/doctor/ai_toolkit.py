"""ai-toolkit's version, and our extension in it. Jobs check its interfaces when they start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..trainers.ai_toolkit.host import TESTED_SERIES, TESTED_VERSION
from ..trainers.ai_toolkit.install import CHECKOUT_PARTS, EXTENSION, PACKAGE
from . import Line, absent, bad, good

SUBJECT = "ai-toolkit"


def checkout(given: Path | None) -> Iterator[Line]:
    """Probe the given checkout, else AI_TOOLKIT_ROOT's, else the current folder if it is one."""
    place = given or os.environ.get("AI_TOOLKIT_ROOT")
    root = Path(place or Path.cwd())
    missing = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if missing and not place:
        yield absent(SUBJECT, "not here; `coat-flux train` does not need it (--ai-toolkit DIR checks one)")
        return
    if missing:
        text = f"{root} is not a checkout of it: no {', '.join(missing)}"
        yield bad(SUBJECT, text, "give the folder of run.py", stops=True)
        return
    file = root / "version.py"
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"VERSION\s*=\s*[\"']([^\"']+)", source)
    version = match[1] if match else "of unknown version"
    if version.startswith(TESTED_SERIES):
        yield good(SUBJECT, f"{version} in {root}")
    else:
        yield bad(SUBJECT, f"{version} in {root} is not tested with COAT-FLUX", f"use {TESTED_VERSION}")
    folder, command = root / EXTENSION, f"coat-flux install {root}"
    if not folder.exists():
        yield absent("extension", f"not in that checkout; `{command}` links it")
    elif folder.resolve() == PACKAGE.resolve():
        yield good("extension", f"{EXTENSION} leads to {PACKAGE}")
    else:
        text = f"{EXTENSION} is a copy, or leads to another COAT-FLUX than {PACKAGE}"
        yield bad("extension", text, f"move it away, then `{command}`")
