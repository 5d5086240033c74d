"""`coat-flux doctor`: what this machine can really do, and what to change where it cannot.

Every probe runs alone: one that fails is a line of its own and the others go on. Nothing is downloaded, and nothing is
written but a temporary file of a moment.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from .lines import Line, bad, verdict

__all__ = ["Line", "diagnose", "verdict"]

PROBES = (  # subject, and module.function of this folder: imported alone too, for what it needs may be broken
    ("Python", "software.python"),
    ("torch", "software.torch_build"),
    ("packages", "software.packages"),
    ("GPU", "gpu.cards"),
    ("FP8", "gpu.fp8_gemms"),
    ("Triton", "gpu.triton"),
    ("memory", "machine.memory"),
    ("disk", "machine.disk"),
    ("FLUX.1-dev", "machine.model"),
    ("Windows", "windows.settings"),
    ("ai-toolkit", "host.ai_toolkit"),
)

NEEDED = ("Python", "torch", "packages", "GPU")  # training cannot work where these cannot even be looked at


def diagnose(toolkit_dir: Path | None = None) -> Iterator[Line]:
    """Yield the lines, each as soon as it is known.

    Args:
        toolkit_dir: of ai-toolkit; None: AI_TOOLKIT_ROOT, else the current folder where it is one.
    """
    for subject, place in PROBES:
        yield from _alone(subject, place, (toolkit_dir,) if place == "host.ai_toolkit" else ())


def _alone(subject: str, place: str, arguments: tuple[Path | None, ...]) -> Iterator[Line]:
    """The probe's lines; whatever it raises is a line too, for a broken driver or package can raise anything."""
    module, function = place.split(".")
    try:
        yield from getattr(importlib.import_module(f"{__name__}.{module}"), function)(*arguments)
    except Exception as error:
        what = " ".join(str(error).split())[:300] or "no message"
        text = f"could not be looked at ({type(error).__name__}: {what})"
        yield bad(subject, text, "put that right, and ask again", stops=subject in NEEDED)
