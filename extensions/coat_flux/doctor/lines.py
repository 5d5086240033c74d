"""One line of the doctor's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ABSENT", "BAD", "GOOD", "Line", "absent", "bad", "good", "verdict"]

GOOD, BAD, ABSENT = "✓", "✗", "-"


@dataclass(frozen=True)
class Line:
    """What one probe found.

    Attributes:
        mark: GOOD, BAD or ABSENT.
        subject: what was looked at.
        text: what was found.
        remedy: what to do, where something is bad.
        stops: training cannot work here before that is done.
    """

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
    """It does not work, or not as it could; the remedy says what to do."""
    return Line(BAD, subject, text, remedy, stops)


def absent(subject: str, text: str) -> Line:
    """It is not here, and training works without."""
    return Line(ABSENT, subject, text)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether training can work here, and that in words."""
    stopping = dict.fromkeys(line.subject for line in lines if line.stops)
    if stopping:
        return False, f"training cannot work here yet: see {', '.join(stopping)}"
    if not any(line.mark != ABSENT and line.subject.startswith("GPU ") for line in lines):
        return True, "training works here on the CPU only: the embedded tiny model in minutes, FLUX.1 in no useful time"
    return True, "training works here"
