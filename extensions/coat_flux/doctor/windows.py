"""What is different on Windows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .lines import Line, absent, bad, good

LONG_PATHS = r"SYSTEM\CurrentControlSet\Control\FileSystem"


def settings() -> Iterator[Line]:
    """Links, long paths and the driver's spill; nothing on other systems."""
    if os.name != "nt":
        return
    if _can_link():
        yield good("links", "this user may make them")
    else:
        yield bad(
            "links", "this user may not make them: install and the model cache copy files", "turn on Developer Mode"
        )
    if _long_paths():
        yield good("long paths", "allowed")
    else:
        yield bad(
            "long paths", "not allowed: deep folders of caches fail", f"set LongPathsEnabled=1 in HKLM\\{LONG_PATHS}"
        )
    yield absent(
        "driver",
        "it may spill GPU memory to RAM, which is many times slower, and cannot be asked; NVIDIA Control Panel > "
        "CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback turns that into an error",
    )


def _can_link() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            (Path(folder) / "link").symlink_to(Path(folder) / "target")
        except OSError:
            return False
    return True


def _long_paths() -> bool:
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, LONG_PATHS) as key:
            return bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
    except OSError:
        return False
