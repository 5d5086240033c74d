"""One option of a config, declared once with its type, default, range and help; and the reader of config blocks.

A config is a dataclass: `key(...)` declares one key, a nested block is a `field(default_factory=ItsDataclass)`, a list
of blocks `blocks(...)`; other fields are not keys of the config. `build` fills the dataclass from a YAML block.
"""

from __future__ import annotations

import json
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from .findings import REMOVED, Findings, closest, show, suggest_key

T = TypeVar("T")

FORMATS, INT8 = ("e4m3", "e5m2"), "int8"  # of FP8; torch is not imported here
COLOURS = {"white": "#ffffff", "grey": "#808080", "black": "#000000"}
ONLY_AI_TOOLKIT = "not supported by the stand-alone trainer"
BLOCK_WORDS = ("auto", "all")
WHOLE = ("int", "sizes", "count or names", "blocks")  # kinds of whole numbers


class OptionError(Exception):
    """Why a value is refused: the rule and the remedy, without file and key."""


@dataclass(frozen=True)
class Option:
    """One key of a config."""

    key: str  # dotted if nested
    default: Any
    kind: str  # of `OPTION_KINDS`
    doc: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    nullable: bool = False
    required: bool = False
    example: Any = None  # suggested in place of a wrong value; None: the default

    def parse(self, value: Any) -> Any:
        """The checked value; raises OptionError with the rule."""
        if value is None:
            if self.nullable:
                return None
            raise OptionError(f"has no value, {self.rule()}; write one, or remove the line")
        kind, is_list = self.kind, isinstance(value, (list, tuple))
        if kind == "choice":
            return self._choice(value)
        if kind in ("int", "float"):
            return self.number(value)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "str" and isinstance(value, str):
            if self.required and not value.strip():
                raise OptionError("is empty; write one")
            return value
        if kind == "mapping" and isinstance(value, Mapping):
            return dict(value)
        if (kind == "list" and is_list) or (kind == "any" and not isinstance(value, Mapping)):
            return value
        if kind == "colour" and isinstance(value, str):
            colour = value.lower()
            if colour in COLOURS or re.fullmatch("#[0-9a-f]{6}", colour):
                return colour
        if kind == "blocks":
            return value if value in BLOCK_WORDS else self.number(value)
        if kind == "betas" and is_list and len(value) == 2:
            return tuple(map(self.number, value))
        if kind == "sizes" and (value or not is_list):
            return tuple(map(self.number, value if is_list else [value]))
        if kind == "count or names" and not is_list:
            return self.number(value)
        are_names = is_list and all(isinstance(item, str) and item for item in value)
        if are_names and (kind == "strings" or (kind == "count or names" and value)):
            return tuple(value)
        _, remedy = OPTION_KINDS[kind]
        raise self.error(remedy)

    def refusal(self, value: Any) -> str | None:
        """Why `value` is refused, as `<rule>; <remedy>`, or None."""
        try:
            self.parse(value)
        except OptionError as error:
            return str(error)
        return None

    def rule(self) -> str:
        """The allowed values, as a sentence: "must be …"."""
        limits = [words.format(limit) for _, words, limit in self._limits()]
        if self.minimum is not None and self.maximum is not None:  # the first two
            limits[:2] = [f"from {self.minimum:g} to {self.maximum:g}"]
        name, _ = OPTION_KINDS[self.kind]
        text = f"must be {name}"
        if self.choices:
            text = f"must be one of {', '.join(map(str, self.choices))}"
        elif limits:
            text += f" {' and '.join(limits)}"
        return f"{text}, or null" if self.nullable else text

    def error(self, remedy: str) -> OptionError:
        """An error of the rule and a remedy."""
        return OptionError(f"{self.rule()}; {remedy}")

    def number(self, value: Any) -> Any:
        """A number of the kind, within the bounds; never NaN or infinity."""
        whole = self.kind in WHOLE
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise self.error("write a number, without quotes" if isinstance(value, str) else "write a number")
        if abs(value) <= sys.float_info.max and all(holds(value, limit) for holds, _, limit in self._limits()):
            return value if whole else float(value)
        example = self.default if self.example is None else self.example
        raise self.error("write a value in that range" if example is None else f"write {show(example)}, for example")

    def _limits(self) -> list[tuple[Callable[[Any, Any], bool], str, Any]]:
        """Of each limit that is set: the test of a value, the words, the limit."""
        limits = [(holds, words, getattr(self, name)) for name, (holds, words) in LIMITS.items()]
        return [(holds, words, limit) for holds, words, limit in limits if limit is not None]

    def _choice(self, value: Any) -> Any:
        for known in self.choices:
            if type(value) is type(known) and value == known:
                return known
        near = None
        if isinstance(value, str):
            if value in map(str, self.choices):
                raise self.error(f"write {value} without quotes")
            near = closest(value, map(str, self.choices))
        raise self.error(f"did you mean '{near}'?" if near else f"write {self.choices[0]}, for example")


def key(default: Any, kind: str, doc: str = "", **rules: Any) -> Any:
    """A dataclass field that is one key of the block; `rules` are `Option`'s."""
    return field(default=default, metadata={"option": Option("", default, kind, doc, **rules)})


def switch(default: bool, doc: str = "") -> Any:
    """A boolean key."""
    return key(default, "bool", doc)


def choice(choices: Iterable[Any], doc: str = "", **rules: Any) -> Any:
    """A key with these values, the default first."""
    choices = tuple(choices)
    return key(choices[0], "choice", doc, choices=choices, **rules)


def blocks(cls: type) -> Any:
    """A dataclass field that is a list of blocks; a tuple once built."""
    return field(default=(), metadata={"blocks": cls})


# field of `Option` → whether a value keeps it, its words in a rule
LIMITS = {
    "minimum": (operator.ge, "of at least {:g}"),
    "maximum": (operator.le, "of at most {:g}"),
    "above": (operator.gt, "above {:g}"),
    "below": (operator.lt, "below {:g}"),
    "multiple_of": (lambda value, step: value % step == 0, "a multiple of {:g}"),
}
# kind → its name in a rule, and the remedy for a value of another kind
OPTION_KINDS = {
    "bool": ("true or false", "write true or false, without quotes"),
    "int": ("a whole number", "write a number"),
    "float": ("a number", "write a number"),
    "str": ("a string", "write it in quotes"),
    "choice": ("one of its values", "write one of them"),
    "colour": (f"a colour ({', '.join(COLOURS)} or '#rrggbb')", "write white, or a colour such as '#f0f0f0' in quotes"),
    "strings": ("a list of strings", "write ['…'], or []"),
    "sizes": ("a whole number, or a list of them, each", "write [512], for example"),
    "count or names": ("a list of file names, or a whole number", "write ['…'], or a number"),
    "blocks": (f"{', '.join(BLOCK_WORDS)}, or a whole number", "write a number"),
    "betas": ("a list of two numbers, each", "write [0.9, 0.999], for example"),
    "mapping": ("a block of keys", "write its keys below it, indented"),
    "list": ("a list", "write one in brackets"),  # this and the next only in ai-toolkit's blocks
    "any": ("a single value", "write one value after the colon"),
}


def config_fields(cls: type) -> dict[str, Field[Any]]:
    """The fields of `cls` that are keys of the config."""
    return {item.name: item for item in fields(cls) if item.metadata or block_of(item)}


def block_of(item: Field[Any]) -> type | None:
    """The dataclass of a nested block's field, or None."""
    made_by = item.default_factory
    return made_by if isinstance(made_by, type) and is_dataclass(made_by) else None


def options_of(cls: type, prefix: str = "") -> list[Option]:
    """Every option of a config and its nested blocks, with dotted keys."""
    options = []
    for name, item in config_fields(cls).items():
        if nested := block_of(item):
            options += options_of(nested, f"{prefix}{name}.")
        elif "option" in item.metadata:
            options.append(replace(item.metadata["option"], key=f"{prefix}{name}"))
    return options


def build(
    cls: type[T],
    raw: Any,
    path: str,
    findings: Findings,
    /,
    *,
    rows: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None,
    block: str = "",
    **extra: Any,
) -> T:
    """Build `cls` from a YAML block; null counts as empty. `extra` fills fields of `cls` that are not config keys.

    A refused value is replaced by its default, so that the rest is still checked. `rows` are ai-toolkit's keys by block
    (`ai_toolkit_keys.py`); the block of `cls` is `block`.
    """
    known = config_fields(cls)
    toolkit = {name: row for name, row in (rows or {}).get(block, {}).items() if row["stand-alone"]}
    nested = []
    for outer, item in known.items():
        if nested_cls := block_of(item):
            nested += [f"{outer}.{leaf}" for leaf in config_fields(nested_cls)]
    values = dict(extra)
    for name, value, where in known_keys(raw, path, findings, {*known, *toolkit}, nested):
        item, row = known.get(name), toolkit.get(name)
        inner = "" if row is None else row["inner"]
        if item is None and row["stand-alone"] in ("no effect", "always"):
            if isinstance(value, Mapping):
                findings.add(where, "must not be a block, nothing reads what is in it; remove it", value)
            elif value and row["reason"]:
                findings.warn(where, row["reason"])
        elif item is None:  # unsupported, but for ai-toolkit's default
            default = json.loads(row["default"] or "null")
            same_kind = isinstance(value, bool) == isinstance(default, bool)
            if (value or default) and not (same_kind and value == default):
                findings.add(where, f"{ONLY_AI_TOOLKIT}; remove it or run inside ai-toolkit", value)
        elif nested_cls := block_of(item):
            values[name] = build(nested_cls, value, where, findings, rows=rows, block=inner)
        elif "option" in item.metadata:
            option = item.metadata["option"]
            try:
                values[name] = option.parse(value)
            except OptionError as error:
                text = str(error)
                if row is not None and isinstance(value, str) and value in row["values"].split():
                    choices = ", ".join(map(str, option.choices))
                    text = f"{ONLY_AI_TOOLKIT}; run this config inside ai-toolkit, or write {choices}"
                findings.add(where, text, value)
        else:  # a list of blocks
            entry_cls = item.metadata["blocks"]
            entries = as_entries(value, where, findings)
            built = [build(entry_cls, entry, at, findings, rows=rows, block=inner) for at, entry in entries]
            values[name] = tuple(built)
    for name, item in known.items():
        option = item.metadata.get("option")
        if option is not None and option.required and f"{path}.{name}" not in findings.given:
            findings.add(f"{path}.{name}", f"is missing, {option.rule()}; add it")
    return cls(**values)


def known_keys(
    raw: Any,
    path: str,
    findings: Findings,
    known: Collection[str],
    nested: Iterable[str] = (),
    ignored: Collection[str] = (),
) -> Iterator[tuple[Any, Any, str]]:
    """Yield name, value and path of each known key of a block (null: an empty one); unknown ones are findings.

    `nested` are the dotted keys of its blocks, for suggestions; `ignored` ones are no findings.
    """
    if raw is not None and not isinstance(raw, Mapping):
        findings.add(path, "must be a block of keys; write its keys below it, indented", raw)
        return
    for name, value in (raw or {}).items():
        where = f"{path}.{name}"
        findings.given.add(where)
        option_key = where.rpartition("coat.")[2]
        removed = REMOVED.get(option_key) or REMOVED.get(f"{option_key}={value}")
        if removed is not None:
            findings.add(where, removed, value)
        elif name in known:
            yield name, value, where
        elif name not in ignored:
            findings.add(where, f"unknown key; {suggest_key(name, known, nested)}")


def as_entries(raw: Any, path: str, findings: Findings) -> list[tuple[str, Any]]:
    """The entries of a list with their paths; none if `raw` is not a list, with a finding unless null."""
    if isinstance(raw, (list, tuple)):
        return [(f"{path}[{i}]", entry) for i, entry in enumerate(raw)]
    if raw is not None:
        findings.add(path, "must be a list; put '- ' before the first key of each entry", raw)
    return []


def to_plain(value: Any) -> Any:
    """A config and its blocks as plain YAML types."""
    if is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in config_fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
