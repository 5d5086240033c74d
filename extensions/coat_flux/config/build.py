"""From a YAML block to a dataclass: every key checked, every finding kept.

A config dataclass declares each key with `key(...)` or `from_option(...)`, a nested block by
`field(default_factory=ItsDataclass)` and a list of blocks with `blocks(...)`; `build` walks block and dataclass
together. Fields made otherwise are no keys of the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from .findings import Findings, suggest_key
from .values import Option, Refusal

T = TypeVar("T")


@dataclass(frozen=True)
class HostKeys:
    """What ai-toolkit knows in one block beyond the keys of ours.

    Args:
        no_effect: key → why it changes nothing here; accepted, and reported as a note.
        unsupported: key → ai-toolkit's default; any other value is refused.
    """

    no_effect: Mapping[str, str]
    unsupported: Mapping[str, Any]


def key(default: Any, kind: str, doc: str, **rules: Any) -> Any:
    """A dataclass field that is one key of the block; arguments as those of `Option`."""
    return field(default=default, metadata={"option": Option("", default, kind, doc, **rules)})


def from_option(option: Option) -> Any:
    """A dataclass field for a row of an option table."""
    return field(default=option.default, metadata={"option": option})


def blocks(cls: type) -> Any:
    """A dataclass field that is a list of blocks; a tuple once built."""
    return field(default=(), metadata={"blocks": cls})


def config_fields(cls: type) -> dict[str, Field[Any]]:
    """The fields of `cls` that are keys of the config."""
    return {item.name: item for item in fields(cls) if item.metadata or _block_of(item)}


def _block_of(item: Field[Any]) -> type | None:
    """The dataclass of a field that is a nested block."""
    made_by = item.default_factory
    return made_by if isinstance(made_by, type) and is_dataclass(made_by) else None


def build(
    cls: type[T],
    raw: Any,
    path: str,
    findings: Findings,
    /,
    *,
    host: Mapping[type, HostKeys] | None = None,
    **extra: Any,
) -> T:
    """Make a `cls` from a YAML block.

    Args:
        cls: dataclass with config fields.
        raw: the block; null counts as empty.
        path: its dotted key.
        findings: receives what is wrong; a refused value is replaced by its default, so that the rest is checked too.
        host: what ai-toolkit knows beyond `cls` and the blocks in it.
        **extra: fields of `cls` that are no config keys.

    Returns:
        The dataclass. Every key the user wrote is in `findings.given`.
    """
    known = config_fields(cls)
    host_keys = (host or {}).get(cls, HostKeys({}, {}))
    values = dict(extra)
    written = as_mapping(raw, path, findings)
    for name, value in written.items():
        where = f"{path}.{name}"
        findings.given.add(where)
        if name in known:
            _build_field(known[name], value, where, findings, host, values)
        else:
            _check_other_key(name, value, where, known, host_keys, findings)
    for name, item in known.items():
        option = item.metadata.get("option")
        if option is not None and option.required and name not in written:
            findings.add(f"{path}.{name}", f"is missing, {option.rule()}; add it")
    return cls(**values)


def as_mapping(raw: Any, path: str, findings: Findings) -> Mapping[Any, Any]:
    """`raw` where it is a block, an empty one for null, else a finding and an empty one."""
    if raw is None:
        return {}
    if isinstance(raw, Mapping):
        return raw
    findings.add(path, "must be a block of keys; write its keys below it, indented", raw)
    return {}


def parse_keys(options: Iterable[Option], raw: Any, path: str, findings: Findings) -> dict[str, Any]:
    """Check a block against a plain table of options; returns only the keys that were given."""
    table = {option.key.rsplit(".", 1)[-1]: option for option in options}
    values: dict[str, Any] = {}
    for name, value in as_mapping(raw, path, findings).items():
        if name not in table:
            findings.add(f"{path}.{name}", f"unknown key; {suggest_key(name, table)}")
            continue
        try:
            values[name] = table[name].parse(value)
        except Refusal as refusal:
            findings.add(f"{path}.{name}", str(refusal), value)
    return values


def to_plain(config: Any) -> dict[str, Any]:
    """The config keys of a dataclass and its blocks as plain YAML types."""
    return {name: _plain(getattr(config, name)) for name in config_fields(type(config))}


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return to_plain(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _build_field(
    item: Field[Any],
    value: Any,
    path: str,
    findings: Findings,
    host: Mapping[type, HostKeys] | None,
    values: dict[str, Any],
) -> None:
    if nested := _block_of(item):
        values[item.name] = build(nested, value, path, findings, host=host)
    elif "blocks" in item.metadata:
        values[item.name] = _build_list(item.metadata["blocks"], value, path, findings, host)
    else:
        try:
            values[item.name] = item.metadata["option"].parse(value)
        except Refusal as refusal:
            findings.add(path, str(refusal), value)


def _build_list(
    cls: type[T], value: Any, path: str, findings: Findings, host: Mapping[type, HostKeys] | None
) -> tuple[T, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        findings.add(path, "must be a list; put '- ' before the first key of each entry", value)
        return ()
    return tuple(build(cls, entry, f"{path}[{i}]", findings, host=host) for i, entry in enumerate(value))


def _check_other_key(
    name: Any, value: Any, path: str, known: Mapping[str, Field[Any]], host: HostKeys, findings: Findings
) -> None:
    if name in host.no_effect:
        if isinstance(value, Mapping):
            findings.add(path, "is no block, nothing reads what is in it; remove it", value)
        elif value:
            findings.warn(path, host.no_effect[name])
    elif name in host.unsupported:
        _check_unsupported(value, host.unsupported[name], path, findings)
    else:
        siblings = {*known, *host.no_effect, *host.unsupported}
        findings.add(path, f"unknown key; {suggest_key(name, siblings, _nested_keys(known))}")


def _check_unsupported(value: Any, default: Any, path: str, findings: Findings) -> None:
    same_kind = isinstance(value, bool) == isinstance(default, bool)
    if (not value and not default) or (same_kind and value == default):
        return
    findings.add(path, "not supported by the stand-alone trainer; remove it or run inside ai-toolkit", value)


def _nested_keys(known: Mapping[str, Field[Any]]) -> list[str]:
    blocks_here = {name: _block_of(item) for name, item in known.items()}
    return [f"{name}.{inner}" for name, nested in blocks_here.items() if nested for inner in config_fields(nested)]
