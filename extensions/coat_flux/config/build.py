"""From a YAML block to a dataclass: every key checked, every finding kept.

A config is a dataclass: `options.key(...)` declares one key, a nested block is a `field(default_factory=ItsDataclass)`,
a list of blocks `blocks(...)`; fields made otherwise are no keys of the config. `build` walks a YAML block and its
dataclass together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from .findings import Findings, suggest_key
from .options import REMOVED, Option, OptionError

T = TypeVar("T")


def blocks(cls: type) -> Any:
    """A dataclass field that is a list of blocks; a tuple once built."""
    return field(default=(), metadata={"blocks": cls})


def config_fields(cls: type) -> dict[str, Field[Any]]:
    """The fields of `cls` that are keys of the config."""
    return {item.name: item for item in fields(cls) if item.metadata or _block_of(item)}


def options_of(cls: type, prefix: str = "") -> list[Option]:
    """Every option of a config and of the blocks in it, under its dotted key."""
    options: list[Option] = []
    for name, item in config_fields(cls).items():
        if nested := _block_of(item):
            options += options_of(nested, f"{prefix}{name}.")
        elif "option" in item.metadata:
            options.append(replace(item.metadata["option"], key=f"{prefix}{name}"))
    return options


def _block_of(item: Field[Any]) -> type | None:
    """The dataclass of a field that is a nested block."""
    made_by = item.default_factory
    return made_by if isinstance(made_by, type) and is_dataclass(made_by) else None


@dataclass(frozen=True)
class OtherKeys:
    """What ai-toolkit knows in one block beyond the keys of ours.

    Args:
        no_effect: key → why it changes nothing here; accepted, and reported as a note.
        unsupported: key → ai-toolkit's default; any other value is refused.
    """

    no_effect: Mapping[str, str]
    unsupported: Mapping[str, Any]


def build(
    cls: type[T],
    raw: Any,
    path: str,
    findings: Findings,
    /,
    *,
    others: Mapping[type, OtherKeys] | None = None,
    **extra: Any,
) -> T:
    """Make a `cls` from a YAML block.

    Args:
        cls: dataclass with config fields.
        raw: the block; null counts as empty.
        path: its dotted key.
        findings: receives what is wrong; a refused value is replaced by its default, so that the rest is checked too.
        others: what ai-toolkit knows beyond `cls` and the blocks in it.
        **extra: fields of `cls` that are no config keys.

    Returns:
        The dataclass. Every key the user wrote is in `findings.given`.
    """
    known = config_fields(cls)
    values = dict(extra)
    written = as_mapping(raw, path, findings)
    for name, value in written.items():
        where = f"{path}.{name}"
        findings.given.add(where)
        item = known.get(name)
        if reason := _removal(where, value):
            findings.add(where, reason, value)
        elif item is None:
            _check_other_key(name, value, where, known, (others or {}).get(cls, OtherKeys({}, {})), findings)
        elif nested := _block_of(item):
            values[name] = build(nested, value, where, findings, others=others)
        elif "option" in item.metadata:
            try:
                values[name] = item.metadata["option"].parse(value)
            except OptionError as error:
                findings.add(where, str(error), value)
        elif isinstance(value, (list, tuple)):
            inner = item.metadata["blocks"]
            entries = enumerate(value)
            values[name] = tuple(build(inner, entry, f"{where}[{i}]", findings, others=others) for i, entry in entries)
        elif value is not None:
            findings.add(where, "must be a list; put '- ' before the first key of each entry", value)
    for name, item in known.items():
        option = item.metadata.get("option")
        if option is not None and option.required and name not in written:
            findings.add(f"{path}.{name}", f"is missing, {option.rule()}; add it")
    return cls(**values)


def _removal(path: str, value: Any) -> str | None:
    """Why a key or value that an earlier version had was removed, and what replaces it."""
    _, block, key = path.rpartition("coat.")
    return (REMOVED.get(key) or REMOVED.get(f"{key}={value}")) if block else None


def as_mapping(raw: Any, path: str, findings: Findings) -> Mapping[Any, Any]:
    """`raw` where it is a block, an empty one for null, else a finding and an empty one."""
    if raw is None:
        return {}
    if isinstance(raw, Mapping):
        return raw
    findings.add(path, "must be a block of keys; write its keys below it, indented", raw)
    return {}


def parse_keys(options: Iterable[Option], raw: Any, path: str, findings: Findings) -> dict[str, Any]:
    """Check a block against a list of options; returns only the keys that were given."""
    known = {option.key.rsplit(".", 1)[-1]: option for option in options}
    values: dict[str, Any] = {}
    for name, value in as_mapping(raw, path, findings).items():
        if name not in known:
            findings.add(f"{path}.{name}", f"unknown key; {suggest_key(name, known)}")
            continue
        try:
            values[name] = known[name].parse(value)
        except OptionError as error:
            findings.add(f"{path}.{name}", str(error), value)
    return values


def to_plain(value: Any) -> Any:
    """A config and its blocks as plain YAML types."""
    if is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in config_fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _check_other_key(
    name: Any, value: Any, path: str, known: Mapping[str, Field[Any]], others: OtherKeys, findings: Findings
) -> None:
    if name in others.no_effect:
        if isinstance(value, Mapping):
            findings.add(path, "must not be a block, nothing reads what is in it; remove it", value)
        elif value:
            findings.warn(path, others.no_effect[name])
    elif name in others.unsupported:
        default = others.unsupported[name]
        same_kind = isinstance(value, bool) == isinstance(default, bool)
        if (value or default) and not (same_kind and value == default):
            findings.add(path, "not supported by the stand-alone trainer; remove it or run inside ai-toolkit", value)
    else:
        inner = {block: _block_of(item) for block, item in known.items()}
        nested = [f"{block}.{one}" for block, cls in inner.items() if cls for one in config_fields(cls)]
        siblings = {*known, *others.no_effect, *others.unsupported}
        findings.add(path, f"unknown key; {suggest_key(name, siblings, nested)}")
