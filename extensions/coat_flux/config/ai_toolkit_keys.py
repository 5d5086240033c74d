"""Check of a job's keys against ai-toolkit's, which drops unknown keys silently.

The table lists the keys of image jobs:

block, key      ai-toolkit's config class, `process` or `network_kwargs`; an optimizer or scheduler: its parameters
kind            of `Option`: `int`, `float|list`, `str?` (or null); `{X}`: block X, `[X]`: a list of them, `-`: unread
default         ai-toolkit's, as JSON; empty if computed
values          choices, or a range as `minimum=1 maximum=2`
stand-alone     supported · unsupported (but for the default) · no effect (noted) · always · empty (unknown)
reason          why it has no effect

A key that the table lacks but an installed ai-toolkit's source quotes is accepted.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .findings import ANY_CASE, ConfigError, Findings, show
from .options import OPTION_KINDS, Option, as_entries, known_keys

TABLE = Path(__file__).with_suffix(".tsv")
PROCESS = "process"
# keys in ai-toolkit's blocks that this package reads: block → key → row; without a kind they are checked elsewhere
OWN_ROWS = {
    PROCESS: {key: {"kind": "", "inner": ""} for key in ("coat", "validation")},
    "TrainConfig": {"fused_backward": {"key": "fused_backward", "kind": "bool", "values": "", "inner": ""}},
}
ROOT_VARIABLE = "AI_TOOLKIT_ROOT"
CLASSES_FILE = "toolkit/config_modules.py"
SOURCES = (
    CLASSES_FILE,
    "toolkit/lora_special.py",
    "jobs/process/BaseSDTrainProcess.py",
    "extensions_built_in/sd_trainer/SDTrainer.py",
)

with TABLE.open(encoding="utf-8", newline="") as table:
    VERSION = table.readline().split()[2]
    ROWS = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
BLOCKS: dict[str, dict[str, dict[str, str]]] = {row["block"]: {} for row in ROWS}  # block → key → row
for row in ROWS:
    row["inner"] = row["kind"].strip("{}[]")  # the block that the key opens
    if row["kind"] != "-":
        BLOCKS[row["block"]][row["key"]] = row
KNOWN = {row["key"] for row in ROWS}


class Toolkit:
    """The ai-toolkit in `root`, read as text, since importing it needs its packages; else that of the table."""

    def __init__(self, root: Path | None = None):
        self.version, self.strings = VERSION, set[str]()  # those in its source that may be keys
        self.problem = ""  # why it could not be read
        if root is None:
            return
        try:
            sources = [(root / file).read_text(encoding="utf-8") for file in SOURCES]
        except (OSError, UnicodeDecodeError) as error:
            self.problem = f"{root}: cannot be read ({error}); the list of {VERSION} is used"
            return
        self.version, self.strings = version_of(root), set(re.findall(r"[\"'](\w+)[\"']", "\n".join(sources)))


def version_of(root: Path) -> str:
    """The version of a checkout of ai-toolkit, as its version.py says; nothing is imported."""
    file, match = root / "version.py", None
    if file.is_file():
        match = re.search(r"VERSION\s*=\s*[\"']([^\"']+)", file.read_text(encoding="utf-8"))
    return match[1] if match else "of unknown version"


def find_toolkit(given: str | os.PathLike[str] | None = None) -> Path | None:
    """The checkout `given` or AI_TOOLKIT_ROOT (raises ConfigError), else the working directory if it is one."""
    place = given or os.environ.get(ROOT_VARIABLE)
    root = Path(place or Path.cwd())
    if (root / CLASSES_FILE).is_file():
        return root
    if place:
        name = "--ai-toolkit" if given else ROOT_VARIABLE
        raise ConfigError(f"{name}={place}: has no {CLASSES_FILE}; give the folder with ai-toolkit's run.py")
    return None


def check_keys(raw: Any, path: str, toolkit: Toolkit, findings: Findings, block: str = PROCESS) -> None:
    """Check a block (`block` in the table) and its nested blocks: unknown keys, wrong types, unknown values."""
    rows = BLOCKS[block] | OWN_ROWS.get(block, {})
    nested = []
    for name, row in rows.items():
        nested += [f"{name}.{leaf}" for leaf in BLOCKS.get(row["inner"], ())]
    for key, value, where in known_keys(raw, path, findings, rows, nested, toolkit.strings - KNOWN):
        row = rows[key]
        if row["kind"].startswith("{"):
            check_keys(value, where, toolkit, findings, row["inner"])
        elif row["kind"].startswith("["):
            for at, entry in as_entries(value, where, findings):
                check_keys(entry, at, toolkit, findings, row["inner"])
        elif row["kind"]:
            check_value(value, where, row, toolkit, findings)


def check_value(value: Any, path: str, row: Mapping[str, str], toolkit: Toolkit, findings: Findings) -> None:
    """Check one value against its kind, its range and its choices."""
    words, kind = row["values"].split(), row["kind"]
    limits = [word.split("=") for word in words if "=" in word]
    bounds: dict[str, Any] = {name: float(number) for name, number in limits}
    kinds = kind.removesuffix("?").split("|")
    nullable = kind.endswith("?") or kind == "any"
    default = json.loads(row.get("default") or "null")
    refusals = [Option("", default, each, nullable=nullable, **bounds).refusal(value) for each in kinds]
    if None not in refusals:
        names = " or ".join(OPTION_KINDS[each][0] for each in kinds)
        findings.add(path, f"must be {names}; write one" if len(kinds) > 1 else refusals[0], value)
        return
    if limits or not words or value is None:  # without choices
        return
    word = value if isinstance(value, str) else show(value)
    if row["key"] in ANY_CASE:
        word = word.lower()
    elif row["key"] == "qtype":
        word = word.partition("|")[0]  # uint3|a/recovery/adapter
    refusal = Option("", None, "choice", choices=tuple(words)).refusal(word)
    if refusal is not None and toolkit.version == VERSION:
        findings.add(path, refusal, value)
    elif refusal is not None:
        findings.warn(path, f"not a value of the ai-toolkit we know, yours is {toolkit.version}: {refusal}", value)
