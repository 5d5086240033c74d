"""ai-toolkit's keys: the table of them, and the check of a job's keys against it.

`ai_toolkit_keys.tsv` has one line for each key that ai-toolkit reads for image jobs.
`scripts/update_ai_toolkit_keys.py` writes it from a checkout; the columns after `default` are written by hand and
carried over:

block, key      ai-toolkit's config class, `process` or `network_kwargs`; the key
kind            the YAML types that are right, as its source has them: `int`, `number|list`, `str?` (`?`: null is, too),
                `any` (not checked), `-` (ai-toolkit does not read the key, and says nothing)
default         ai-toolkit's, as JSON; where it is computed, by hand or empty
corrected       the kind where the source says nothing or something that its code contradicts; `{X}`: a block X, `[X]`:
                a list of blocks X
values          the choices of a string, or the range of a number as `minimum=1 maximum=2`
stand-alone     supported · unsupported (any other value than the default is refused) · no effect (accepted, with a note
                saying why) · empty (an unknown key)
reason          why it has no effect
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import OtherKeys, as_mapping
from .findings import Findings, suggest_key
from .options import Option

TABLE = Path(__file__).with_suffix(".tsv")
COLUMNS = ("block", "key", "kind", "default", "corrected", "values", "stand-alone", "reason")
PROCESS, NETWORK_KWARGS = "process", "network_kwargs"
ANY_CASE = ("optimizer", "type")  # ai-toolkit lowers these before it compares
OWN_KEYS = ("coat", "validation")  # of the process entry; read by this package
_OPTION_KINDS = {"bool": "bool", "int": "int", "number": "float", "str": "str", "dict": "mapping"}
_WORDS = {
    "int": "a whole number",
    "number": "a number",
    "str": "a string",
    "list": "a list",
    "bool": "true or false",
    "dict": "a block of keys",
}
Row = Mapping[str, str]


@dataclass(frozen=True)
class Schema:
    """The keys of one version of ai-toolkit.

    Args:
        version: of ai-toolkit.
        source: where the keys come from, in words.
        classes: config class, `process` or `network_kwargs` → key → kind.
        drops_cached_captions: caption_dropout_rate works with cached text embeddings, too.
    """

    version: str
    source: str
    classes: Mapping[str, Mapping[str, str]]
    drops_cached_captions: bool = True


def read_table(path: Path = TABLE) -> tuple[str, list[dict[str, str]]]:
    """The version of ai-toolkit that the table was made from, and its rows."""
    with path.open(encoding="utf-8", newline="") as file:
        version = file.readline().split()[2]
        return version, list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


VERSION, ROWS = read_table()
BLOCKS = tuple(dict.fromkeys(row["block"] for row in ROWS))


def shipped_schema() -> Schema:
    """The keys in the table."""
    classes: dict[str, dict[str, str]] = {block: {} for block in BLOCKS}
    for row in ROWS:
        if row["kind"] != "-":
            classes[row["block"]][row["key"]] = row["corrected"] or row["kind"]
    return Schema(VERSION, f"the list of {VERSION}", classes)


def other_keys(block: str) -> OtherKeys:
    """What the stand-alone trainer knows of a block beyond its own keys."""
    rows = [row for row in ROWS if row["block"] == block]
    return OtherKeys(
        {row["key"]: row["reason"] for row in rows if row["stand-alone"] == "no effect"},
        {row["key"]: json.loads(row["default"] or "null") for row in rows if row["stand-alone"] == "unsupported"},
    )


def values_of(row: Row) -> tuple[tuple[str, ...], dict[str, float]]:
    """The choices and the range in a row."""
    words = row["values"].split()
    limits = {word.partition("=")[0]: float(word.partition("=")[2]) for word in words if "=" in word}
    return (() if limits else tuple(words)), limits


_VALUES = {(row["block"], row["key"]): values_of(row) for row in ROWS if row["values"]}


def check_keys(raw: Any, path: str, schema: Schema, findings: Findings, block: str = PROCESS) -> None:
    """Check one block and those in it: unknown keys, wrong types, values that no code knows.

    Args:
        raw: the block as read; null counts as empty.
        path: its dotted key.
        schema: what ai-toolkit reads.
        findings: receives what is wrong; every key that was written goes into `findings.given`.
        block: which block of `schema` it is.
    """
    kinds = schema.classes[block]
    for key, value in as_mapping(raw, path, findings).items():
        where, kind = f"{path}.{key}", kinds.get(key)
        findings.given.add(where)
        if kind is None:
            if block != PROCESS or key not in OWN_KEYS:
                known = {*kinds, *(OWN_KEYS if block == PROCESS else ())}
                inner = {name: one.strip("{}") for name, one in kinds.items() if one[0] in "{["}
                nested = [f"{name}.{one}" for name, at in inner.items() for one in schema.classes[at.strip("[]")]]
                findings.add(where, f"unknown key; {suggest_key(key, known, nested)}")
        elif kind.startswith("{"):
            check_keys(value, where, schema, findings, kind.strip("{}"))
        elif not kind.startswith("["):
            _check_value(value, where, (block, key), kind, schema, findings)
        elif isinstance(value, (list, tuple)):
            for i, entry in enumerate(value):
                check_keys(entry, f"{where}[{i}]", schema, findings, kind.strip("[]"))
        elif value is not None:
            findings.add(where, "must be a list; put '- ' before the first key of each entry", value)


def _check_value(value: Any, path: str, place: tuple[str, str], kind: str, schema: Schema, findings: Findings) -> None:
    choices, limits = _VALUES.get(place, ((), {}))
    refusal = _wrong_kind(value, kind, limits)
    if refusal is not None:
        findings.add(path, refusal, value)
        return
    word = value.lower() if isinstance(value, str) and place[1] in ANY_CASE else value
    if place[1] == "qtype" and isinstance(value, str):
        word = value.partition("|")[0]  # uint3|a/recovery/adapter
    if not choices or word is None:
        return
    refusal = Option(place[1], None, "choice", "", choices=choices).refusal(word)
    if refusal is not None and schema.version == VERSION:
        findings.add(path, refusal, value)
    elif refusal is not None:
        findings.warn(path, f"not a value of the ai-toolkit we know, yours is {schema.version}: {refusal}", value)


def _wrong_kind(value: Any, kind: str, limits: Mapping[str, float]) -> str | None:
    """Why `value` is not of `kind`, as `<rule>; <remedy>`; None where it is."""
    kinds, nullable = kind.removesuffix("?").split("|"), kind.endswith("?")
    if value is None and nullable:
        return None
    if kinds == ["any"]:
        rule = "must be a single value, not a block; write one value after the colon"
        return rule if isinstance(value, Mapping) else None
    if value is None and "list" in kinds:
        return "has no value; write [] or remove the line"
    if len(kinds) == 1 and kinds[0] in _OPTION_KINDS:
        return Option("", None, _OPTION_KINDS[kinds[0]], "", nullable=nullable, **limits).refusal(value)
    for one in kinds:
        if isinstance(value, (list, tuple)) if one == "list" else _wrong_kind(value, one, {}) is None:
            return None
    return f"must be {' or '.join(_WORDS[one] for one in kinds)}; write one"
