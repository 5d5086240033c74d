"""What is wrong with a config, collected: a run is refused once, with everything there is to correct."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..base.errors import UserError

MAX_SHOWN, MAX_PATH = 60, 200  # characters of a value, of a key
MAX_LISTED = 12
_ABSENT = object()


@dataclass(frozen=True)
class Finding:
    """One thing about a config, printed as one line.

    Args:
        severity: "error" stops the run, "warning" does not.
        file: where it was read.
        key: dotted key path, or a place such as `line 3, column 5`; empty where it is about the whole file.
        value: what was written there, as `show` has it; None where that says nothing.
        rule: what is allowed, or what is wrong.
        remedy: what to change; empty where nothing has to.
    """

    severity: str
    file: str
    key: str
    value: str | None
    rule: str
    remedy: str

    def line(self) -> str:
        """`<file>: <key.path>=<value>: <rule>; <remedy>`."""
        where = shorten(self.key, MAX_PATH) + ("" if self.value is None else f"={self.value}")
        return ": ".join(part for part in (self.file, where, self.text()) if part)

    def text(self) -> str:
        """Rule and remedy."""
        return f"{self.rule}; {self.remedy}" if self.remedy else self.rule


def finding(file: str, key: str, text: str, value: Any = _ABSENT, *, severity: str = "error") -> Finding:
    """A finding from one sentence `<rule>; <remedy>`; the arguments are those of `Finding`, `value` as it was read."""
    rule, _, remedy = text.rpartition("; ") if "; " in text else (text, "", "")
    return Finding(severity, file, key, None if value is _ABSENT else show(value), rule, remedy)


class ConfigError(UserError, ValueError):
    """A config that cannot be run; the message has one line for each finding.

    Args:
        found: the findings, or their lines where there is nothing but text.

    Attributes:
        findings: the lines.
        found: those that came as `Finding`.
    """

    def __init__(self, found: str | Finding | Iterable[str | Finding]):
        items = (found,) if isinstance(found, (str, Finding)) else tuple(found)
        self.found = tuple(item for item in items if isinstance(item, Finding))
        self.findings = tuple(item.line() if isinstance(item, Finding) else item for item in items)
        super().__init__("\n".join(self.findings))


class Findings:
    """Collects findings, and which keys were written (`given`) and refused (`refused`)."""

    def __init__(self, file: str):
        self.file = file
        self.given: set[str] = set()
        self.refused: set[str] = set()
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []

    def add(self, path: str, text: str, value: Any = _ABSENT) -> None:
        """Add an error at `path`; `text` says what is allowed and what to change: `<rule>; <remedy>`.

        Only the first error of a key counts, and none in a block that was refused: what follows from a mistake is
        not a second one.
        """
        if self.sound(path):
            self.refused.add(path)
            self.errors.append(finding(self.file, path, text, value))

    def warn(self, path: str, text: str, value: Any = _ABSENT) -> None:
        """Add something the user should know that does not stop the run, unless the key was refused."""
        if self.sound(path):
            self.warnings.append(finding(self.file, path, text, value, severity="warning"))

    def sound(self, *paths: str) -> bool:
        """Whether none of the keys, nor a block around one, was refused: rules between keys need them all."""
        return not any(path == bad or path.startswith((f"{bad}.", f"{bad}[")) for path in paths for bad in self.refused)

    @property
    def all(self) -> list[Finding]:
        """Errors, then warnings."""
        return [*self.errors, *self.warnings]

    def raise_if_any(self) -> None:
        """Raise the errors found so far as one ConfigError."""
        if self.errors:
            raise ConfigError(self.errors)


def show(value: Any) -> str:
    """A value as YAML would have it, in one short line."""
    if isinstance(value, str):
        text = f"'{value}'"
    elif isinstance(value, float) and math.isfinite(value):
        text = re.sub(r"e([-+])0(?=\d$)", r"e\1", repr(value))  # 1e-6, as people write it
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
    """The remedy for an unknown key: "did you mean …?", or what is known.

    Args:
        key: what the user wrote.
        siblings: keys known in the same block.
        elsewhere: dotted keys of blocks in it, for a key written at the wrong level.
    """
    siblings = sorted(siblings)
    by_leaf = {dotted.rpartition(".")[2]: dotted for dotted in elsewhere}
    if near := closest(key, siblings, cutoff=0.8):
        return f"did you mean '{near}'?"
    if near := closest(str(key).rpartition(".")[2], by_leaf, cutoff=0.8):
        block, _, leaf = by_leaf[near].rpartition(".")
        return f"did you mean '{block}: {{{leaf}: …}}'?"
    if near := closest(key, siblings):
        return f"did you mean '{near}'?"
    if len(siblings) <= MAX_LISTED:
        return f"known here: {', '.join(siblings)}"
    return "remove it, nothing known is near it"
