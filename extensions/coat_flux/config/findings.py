"""What is wrong with a config, collected: a run is refused once, with everything there is to correct."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from datetime import date
from typing import Any

MAX_SHOWN = 60
MAX_PATH = 200
MAX_LISTED = 12
_ABSENT = object()


class ConfigError(ValueError):
    """A config that cannot be run.

    Each finding is one line, `<file>: <key.path>=<value>: <rule>; <remedy>`; the message is all of them.

    Args:
        findings: the lines.
    """

    def __init__(self, findings: str | Iterable[str]):
        self.findings = (findings,) if isinstance(findings, str) else tuple(findings)
        super().__init__("\n".join(self.findings))


class Findings:
    """Collects findings, notes and which keys were written (`given`) and refused (`refused`).

    Args:
        file: named at the start of every line.
    """

    def __init__(self, file: str):
        self.file = file
        self.given: set[str] = set()
        self.refused: set[str] = set()
        self.notes: list[str] = []
        self.lines: list[str] = []

    def add(self, path: str, rule: str, value: Any = _ABSENT) -> None:
        """Add one line about `path`; `rule` says what is allowed and what to change."""
        self.refused.add(path)
        where = shorten(path, MAX_PATH) if value is _ABSENT else f"{shorten(path, MAX_PATH)}={show(value)}"
        self.lines.append(f"{self.file}: {where}: {rule}")

    def note(self, path: str, text: str) -> None:
        """Keep something the user should know that does not stop the run."""
        self.notes.append(f"{self.file}: {path}: {text}")

    def raise_if_any(self) -> None:
        """Raise what was found so far.

        Raises:
            ConfigError: there is at least one finding.
        """
        if self.lines:
            raise ConfigError(self.lines)


def show(value: Any) -> str:
    """A value as YAML would have it, in one short line."""
    if isinstance(value, (str, date)):
        text = f"'{value}'"
    else:
        try:
            text = json.dumps(value, default=repr, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = f"a {type(value).__name__}"
    return shorten(text, MAX_SHOWN)


def shorten(text: str, length: int) -> str:
    """`text` on one line of at most `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def closest(word: Any, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word nearest to `word`, ignoring case; None where none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word)[:MAX_SHOWN].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def suggest_key(key: Any, siblings: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The remedy for an unknown key.

    Args:
        key: what the user wrote.
        siblings: keys known in the same block.
        elsewhere: dotted keys of other blocks, for a key written at the wrong level.

    Returns:
        "did you mean …?", or what is known.
    """
    siblings = sorted(siblings)
    by_leaf = {dotted.rsplit(".", 1)[-1]: dotted for dotted in elsewhere}
    if near := closest(key, siblings, cutoff=0.8):
        return f"did you mean '{near}'?"
    if near := closest(str(key).rsplit(".", 1)[-1], by_leaf, cutoff=0.8):
        return f"did you mean '{_nested(by_leaf[near])}'?"
    if near := closest(key, siblings):
        return f"did you mean '{near}'?"
    if len(siblings) <= MAX_LISTED:
        return f"known here: {', '.join(siblings)}"
    return "nothing known is near it; remove it"


def _nested(dotted: str) -> str:
    *parents, leaf = dotted.split(".")
    return "".join(f"{parent}: {{" for parent in parents) + leaf + ": …" + "}" * len(parents)
