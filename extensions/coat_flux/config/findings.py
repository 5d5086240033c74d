"""Collected findings about a config, so that one refusal lists everything there is to correct.

`rules.tsv` lists the rules that need no arithmetic, and what a job fails without:

key, values     a key of the process entry or of a data set, a pattern of its values (`unset`: absent or null)
where           patterns of other keys and of `Block.facts`; `removed`: of an earlier version
finding         `<rule>; <remedy>`, or a package, `file`, `file or hub` (`check.check_needs`)
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import UserError

MAX_SHOWN, MAX_PATH = 60, 200  # characters of a value, of a key
MAX_LISTED = 12
ABSENT = object()
ANY_CASE = ("optimizer", "type")  # keys that ai-toolkit lowers before it compares
WARNING = "warning: "  # before a finding of the table that is no error

with Path(__file__).with_name("rules.tsv").open(encoding="utf-8", newline="") as table:
    TABLE = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
RULES = [row for row in TABLE if ";" in row["finding"] and row["where"] != "removed"]
NEEDS = [row for row in TABLE if ";" not in row["finding"]]
REMOVED: dict[str, str] = {}  # key of the `coat:` block, or key=value → finding
for row in TABLE:
    if row["where"] == "removed":
        name = row["key"].removeprefix("coat.")
        REMOVED[f"{name}={row['values']}" if row["values"] else name] = row["finding"]


@dataclass(frozen=True)
class Finding:
    """One finding, printed as one line, about a dotted key, a place such as `line 3, column 5`, or a whole file."""

    severity: str
    file: str
    key: str
    value: str | None  # of the key, in YAML notation
    text: str  # `<rule>; <remedy>`

    def line(self) -> str:
        """`<file>: <key.path>=<value>: <rule>; <remedy>`."""
        where = shorten(self.key, MAX_PATH)
        if self.value is not None:
            where += f"={self.value}"
        return ": ".join(part for part in (self.file, where, self.text) if part)


class ConfigError(UserError, ValueError):
    """A config that cannot be run; the message has a line per finding."""

    def __init__(self, problem: str | Iterable[Finding]):
        self.findings: tuple[Finding, ...] = ()
        if not isinstance(problem, str):
            self.findings = tuple(problem)
            problem = "\n".join(item.line() for item in self.findings)
        super().__init__(problem)


class Findings:
    """Collects findings, and which keys are present (`given`) and refused."""

    def __init__(self, file: str):
        self.file = file
        self.given: set[str] = set()
        self.refused: set[str] = set()
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []

    def add(self, path: str, text: str, value: Any = ABSENT) -> None:
        """Add an error `<rule>; <remedy>`, unless it follows from one of the same key or of a block around it."""
        if self.sound(path):
            self.refused.add(path)
            shown = None if value is ABSENT else show(value)
            self.errors.append(Finding("error", self.file, path, shown, text))

    def warn(self, path: str, text: str, value: Any = ABSENT) -> None:
        """Add a warning, which `all` leaves out if the key is refused."""
        shown = None if value is ABSENT else show(value)
        self.warnings.append(Finding("warning", self.file, path, shown, text))

    def sound(self, *paths: str) -> bool:
        """Whether neither the keys nor a block around one was refused; rules between keys need them all."""
        for path in paths:
            around = [path[: mark.start()] for mark in re.finditer(r"[.\[]", path)]
            if not self.refused.isdisjoint([path, *around]):
                return False
        return True

    @property
    def all(self) -> list[Finding]:
        """Errors, then warnings."""
        return [*self.errors, *(item for item in self.warnings if self.sound(item.key))]


class Block:
    """A block of type-checked keys, and where findings about it go."""

    def __init__(self, raw: Mapping[str, Any], path: str, findings: Findings):
        self.raw, self.path, self.findings = raw, path, findings
        self.facts: dict[str, str] = {}  # about it, for the table of rules

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or refused."""
        value = self._written(key)
        return default if value is None or value is ABSENT or not self.sound(key) else value

    def blocks(self, key: str) -> list[Block]:
        """The blocks of a list of blocks."""
        blocks, entries = [], self.get(key)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping):
                blocks.append(Block(entry, f"{self.path}.{key}[{i}]", self.findings))
        return blocks

    def error(self, key: str, text: str) -> None:
        """Add an error `<rule>; <remedy>` at a dotted key."""
        self.findings.add(f"{self.path}.{key}".lstrip("."), text, self._written(key))

    def warn(self, key: str, text: str) -> None:
        """Add a warning at a dotted key."""
        self.findings.warn(f"{self.path}.{key}".lstrip("."), text, self._written(key))

    def fits(self, row: Mapping[str, str]) -> bool:
        """Whether a row of the table applies, and none of its keys was refused."""
        for pattern in (f"{row['key']}={row['values']}", *row["where"].split()):
            key, _, values = pattern.partition("=")
            value = self.facts.get(key, self.get(key, "unset"))
            keeps_case = isinstance(value, str) and key.rpartition(".")[2] not in ANY_CASE
            text = value if keeps_case else str(value).lower()
            if not (self.sound(key) and re.fullmatch(values, text)):
                return False
        return True

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was refused."""
        return self.findings.sound(*(f"{self.path}.{key}".lstrip(".") for key in keys))

    def _written(self, key: str) -> Any:
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
        return value

    def check(self, rules: Iterable[Mapping[str, str]]) -> None:
        """Add the findings of the rows that fit."""
        for row in filter(self.fits, rules):
            add = self.warn if row["finding"].startswith(WARNING) else self.error
            add(row["key"], row["finding"].removeprefix(WARNING))


def show(value: Any) -> str:
    """A value in YAML notation, on one short line."""
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
    """The known word nearest to `word`, ignoring case, or None."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word)[:MAX_SHOWN].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


OTHERS_KEYS = {  # of kohya's and diffusers' scripts
    "learning_rate": "lr",
    "max_train_steps": "steps",
    "train_batch_size": "batch_size",
    "mixed_precision": "dtype",
    "network_dim": "linear",
    "network_alpha": "linear_alpha",
    "pretrained_model_name_or_path": "name_or_path",
    "image_dir": "folder_path",
    "output_dir": "training_folder",
}


def suggest_key(key: Any, siblings: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The remedy for an unknown key, "did you mean …?" or the known keys; `elsewhere` has nested dotted keys."""
    siblings = sorted(siblings)
    if (own := OTHERS_KEYS.get(str(key))) in siblings:
        return f"did you mean '{own}'?"
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
