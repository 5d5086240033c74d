"""Every key of a process entry against what ai-toolkit reads: unknown ones, wrong types, values no code knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ai_toolkit_schema import ANY_CASE, BLOCKS, CHOICES, RANGES
from .ai_toolkit_source import PROCESS, HostSchema
from .build import as_mapping
from .findings import Findings, suggest_key
from .options import Option

OWN_KEYS = ("coat", "validation")  # of the process entry; read by this package
_OPTION_KINDS = {"bool": "bool", "int": "int", "number": "float", "str": "str", "dict": "mapping"}
_WORDS = {"int": "a whole number", "number": "a number", "str": "a string", "list": "a list", "bool": "true or false"}


def check_keys(raw: Any, path: str, schema: HostSchema, findings: Findings, block: str = PROCESS) -> None:
    """Check one block and those in it.

    Args:
        raw: the block as read; null counts as empty.
        path: its dotted key.
        schema: what ai-toolkit reads.
        findings: receives what is wrong; every key that was written goes into `findings.given`.
        block: which block of `schema` it is.
    """
    kinds, inner = schema.classes[block], BLOCKS.get(block, {})
    for key, value in as_mapping(raw, path, findings).items():
        where = f"{path}.{key}"
        findings.given.add(where)
        if key in inner:
            _check_block(value, where, inner[key], schema, findings)
        elif key in kinds:
            _check_value(value, where, block, kinds[key], schema, findings)
        elif block != PROCESS or key not in OWN_KEYS:
            known = {*kinds, *inner, *(OWN_KEYS if block == PROCESS else ())}
            findings.add(where, f"unknown key; {suggest_key(key, known, _keys_of(inner, schema))}")


def _keys_of(blocks: Mapping[str, str], schema: HostSchema) -> list[str]:
    return [f"{name}.{key}" for name, block in blocks.items() for key in schema.classes[block.removeprefix("[]")]]


def _check_block(value: Any, path: str, block: str, schema: HostSchema, findings: Findings) -> None:
    if not block.startswith("[]"):
        check_keys(value, path, schema, findings, block)
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            check_keys(entry, f"{path}[{i}]", schema, findings, block.removeprefix("[]"))
    elif value is not None:
        findings.add(path, "must be a list; put '- ' before the first key of each entry", value)


def _check_value(value: Any, path: str, block: str, kind: str, schema: HostSchema, findings: Findings) -> None:
    key = path.rpartition(".")[2]
    refusal = _refusal(value, kind, RANGES.get(block, {}).get(key, {}))
    if refusal is not None:
        findings.add(path, refusal, value)
        return
    choices = CHOICES.get(block, {}).get(key, ())
    word = value.lower() if isinstance(value, str) and key in ANY_CASE else value
    if key == "qtype" and isinstance(value, str):
        word = value.partition("|")[0]  # uint3|a/recovery/adapter
    refusal = Option(key, None, "choice", "", choices=choices).refusal(word) if choices and word is not None else None
    if refusal is None:
        return
    if schema.known_version:
        findings.add(path, refusal, value)
    else:
        findings.warn(path, f"not a value of the ai-toolkit we know, yours is {schema.version}: {refusal}", value)


def _refusal(value: Any, kind: str, limits: Mapping[str, float]) -> str | None:
    """Why `value` is not of `kind`, as `<rule>; <remedy>`; None where it is."""
    kinds, nullable = kind.removesuffix("?").split("|"), kind.endswith("?")
    if value is None and nullable:
        return None
    if kinds == ["any"]:
        return "is no block; write one value after the colon" if isinstance(value, Mapping) else None
    if value is None and "list" in kinds:
        return "has no value; write [] or remove the line"
    if len(kinds) == 1 and kinds[0] in _OPTION_KINDS:
        return Option("", None, _OPTION_KINDS[kinds[0]], "", nullable=nullable, **limits).refusal(value)
    fitting = [isinstance(value, (list, tuple)) if one == "list" else _refusal(value, one, {}) is None for one in kinds]
    return None if any(fitting) else f"must be {' or '.join(_WORDS[one] for one in kinds)}; write one"
