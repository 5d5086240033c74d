"""`coat-flux doctor`: what works on this machine, and remedies; a failing probe does not stop the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

GOOD, BAD, ABSENT = "✓", "✗", "-"
PROBES = (  # subject, and module.function of this folder: imported separately, since its imports may be broken
    ("Python", "system.python"),
    ("torch", "system.torch_build"),
    ("packages", "system.packages"),
    ("GPU", "gpu.cards"),
    ("FP8", "gpu.fp8_gemms"),
    ("Triton", "gpu.triton"),
    ("attention", "gpu.attention"),
    ("memory", "system.memory"),
    ("disk", "system.disk"),
    ("FLUX.1-dev", "system.model"),
    ("ai-toolkit", "ai_toolkit.checkout"),
)
NEEDED = ("Python", "torch", "packages", "GPU")  # training cannot work if these probes fail


@dataclass(frozen=True)
class Line:
    """The result of one probe; `stops`: training cannot work here without the remedy."""

    mark: str
    subject: str
    text: str
    remedy: str = ""
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.mark} {self.subject}: {self.text}" + (f" -> {self.remedy}" if self.remedy else "")


def good(subject: str, text: str) -> Line:
    """It works."""
    return Line(GOOD, subject, text)


def bad(subject: str, text: str, remedy: str, *, stops: bool = False) -> Line:
    """It does not work, or not fully."""
    return Line(BAD, subject, text, remedy, stops)


def absent(subject: str, text: str) -> Line:
    """It is absent, and training works without it."""
    return Line(ABSENT, subject, text)


def diagnose(toolkit_dir: Path | None = None) -> Iterator[Line]:
    """Yield the lines, each as soon as it is known; a probe's exception becomes a line, too."""
    for subject, place in PROBES:
        module, function = place.split(".")
        arguments = (toolkit_dir,) if module == "ai_toolkit" else ()
        try:
            yield from getattr(importlib.import_module(f"{__name__}.{module}"), function)(*arguments)
        except Exception as error:  # a broken driver or package can raise anything
            reason = " ".join(str(error).split())[:300] or "no message"
            text = f"could not be checked ({type(error).__name__}: {reason})"
            yield bad(subject, text, "fix that, and ask again", stops=subject in NEEDED)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether training can work here, and a sentence that says so."""
    stopping = dict.fromkeys(line.subject for line in lines if line.stops)
    if stopping:
        return False, f"training cannot work here yet: see {', '.join(stopping)}"
    if not any(line.mark != ABSENT and line.subject.startswith("GPU ") for line in lines):
        return True, "training works here on the CPU only: the embedded tiny model in minutes, FLUX.1 in no useful time"
    return True, "training works here"
