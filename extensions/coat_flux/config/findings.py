"""Findings about a config, collected, so that one refusal lists everything there is to correct.

`rules.tsv` lists the rules that need no arithmetic, and the packages and files without which a job would fail:

key, values     a key of the process entry or of a data set, a pattern of its values (`unset`: absent or null)
where           `key=pattern` of other keys and of `Block.facts`; or `removed`: the key is of an earlier version
finding         `<rule>; <remedy>`, or what is needed: a package, `file`, `file or hub` (`check.check_needs`)
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
ANY_CASE = ("optimizer", "type")  # keys whose values ai-toolkit compares in lower case
WARNING = "warning: "  # begins a finding of the table that is not an error

with Path(__file__).with_name("rules.tsv").open(encoding="utf-8", newline="") as file:
    TABLE = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
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

    severity: str  # "error" or "warning"
    file: str
    key: str
    value: str | None  # in YAML notation; None: not shown
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
            problem = "\n".join(finding.line() for finding in self.findings)
        super().__init__(problem)


class Findings:
    """Collects findings; also the keys that are present (`given`) and those with an error (`refused`)."""

    def __init__(self, file: str):
        self.file = file
        self.given: set[str] = set()
        self.refused: set[str] = set()
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []

    def sound(self, *paths: str) -> bool:
        """Whether all of these keys, and the blocks around them, are free of errors."""
        for path in paths:
            blocks = [path[: separator.start()] for separator in re.finditer(r"[.\[]", path)]
            if not self.refused.isdisjoint([path, *blocks]):
                return False
        return True

    def add(self, path: str, text: str, value: Any = ABSENT) -> None:
        """Add an error `<rule>; <remedy>`, unless the key or a block around it has one already."""
        if self.sound(path):
            self.refused.add(path)
            shown = None if value is ABSENT else show(value)
            self.errors.append(Finding("error", self.file, path, shown, text))

    def warn(self, path: str, text: str, value: Any = ABSENT) -> None:
        """Add a warning, which `all` leaves out if the key has an error."""
        shown = None if value is ABSENT else show(value)
        self.warnings.append(Finding("warning", self.file, path, shown, text))

    @property
    def all(self) -> list[Finding]:
        """Errors, then warnings."""
        return [*self.errors, *(warning for warning in self.warnings if self.sound(warning.key))]


class Block:
    """A block of type-checked keys, and where findings about it go; `path` is "" for the whole file."""

    def __init__(self, raw: Mapping[str, Any], path: str, findings: Findings):
        self.raw, self.path, self.findings = raw, path, findings
        self.facts: dict[str, str] = {}  # what rules may ask of it besides its keys

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or refused."""
        value = self._written(key)
        return default if value is None or value is ABSENT or not self.sound(key) else value

    def _written(self, key: str) -> Any:
        value: Any = self.raw
        for part in key.split("."):
            value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
        return value

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was refused."""
        return self.findings.sound(*(f"{self.path}.{key}".lstrip(".") for key in keys))

    def blocks(self, key: str) -> list[Block]:
        """The blocks in a list."""
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
        for condition in (f"{row['key']}={row['values']}", *row["where"].split()):
            key, _, pattern = condition.partition("=")
            value = self.facts.get(key, self.get(key, "unset"))
            text = str(value)
            if not isinstance(value, str) or key.rpartition(".")[2] in ANY_CASE:
                text = text.lower()  # true, as YAML writes it
            if not (self.sound(key) and re.fullmatch(pattern, text)):
                return False
        return True

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
    matches = difflib.get_close_matches(str(word)[:MAX_SHOWN].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


KEYS_OF_SCRIPTS = {  # of kohya's and diffusers' training scripts → ours
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
    """The remedy for an unknown key: "did you mean …?" or the known keys; `elsewhere` has keys of other blocks."""
    siblings = sorted(siblings)
    if (same := KEYS_OF_SCRIPTS.get(str(key))) in siblings:
        return f"did you mean '{same}'?"
    if near := closest(key, siblings, cutoff=0.8):
        return f"did you mean '{near}'?"
    by_leaf = {dotted.rpartition(".")[2]: dotted for dotted in elsewhere}
    if leaf := closest(str(key).rpartition(".")[2], by_leaf, cutoff=0.8):
        block, _, _ = by_leaf[leaf].rpartition(".")
        return f"did you mean '{block}: {{{leaf}: …}}'?"
    if near := closest(key, siblings):
        return f"did you mean '{near}'?"
    if len(siblings) <= MAX_LISTED:
        return f"known here: {', '.join(siblings)}"
    return "remove it, nothing known is near it"
