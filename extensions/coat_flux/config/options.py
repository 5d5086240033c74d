"""One option of a config, declared once with its type, default, range and help; and the reader of config blocks.

A value must have the YAML type of its kind; only whole numbers are converted, to floats, since guessing hides
mistakes.

A config is a dataclass: `key(...)` declares one key, a nested block is a `field(default_factory=ItsDataclass)`, a list
of blocks `blocks(...)`; other fields are not keys of the config. `build` fills the dataclass from a YAML block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from .findings import Findings, closest, show, suggest_key

T = TypeVar("T")

FORMATS, INT8 = ("e4m3", "e5m2"), "int8"  # of FP8; torch is not imported here
COLOURS = {"white": "#ffffff", "grey": "#808080", "black": "#000000"}
BLOCK_WORDS = ("auto", "all")
WHOLE = ("int", "sizes", "count or names", "blocks")  # kinds whose numbers are whole
# removed options of the `coat:` block: key, or key=value → reason; replacement
REMOVED = {
    "activation.linear_granularity=per_group": "was removed, GPUs multiplied it in bf16; write per_row",
    "data.prepare": "was removed, photos that ai-toolkit would misread are always corrected; remove it",
    **dict.fromkeys(
        (
            *("guard.nonfinite_steps", "guard.diverging_steps", "guard.zero_gradient_steps", "guard.dead_lora_steps"),
            *("guard.pinned_loss_steps", "guard.health_every", "guard.max_saturation", "guard.max_underflow"),
        ),
        "was removed, the guard has fixed limits; remove it, or write guard.enabled: false",
    ),
    "memory.checkpointing=every_n": "was removed; write auto with a budget_gb, or all",
    "memory.every_n": "was removed; write checkpointing: auto with a budget_gb instead, or checkpointing: all",
    "speed.attention=fa3": "is chosen automatically where it is installed; write auto",
    "speed.attention=fa4": "is chosen automatically where it is installed; write auto",
    "speed.compile": "was removed; write speed.cuda_graphs: auto or never instead",
    "weight.cache": "was removed, quantized weights are no longer kept on disk; remove it",
}


class OptionError(Exception):
    """Why a value is refused: the rule and the remedy, without file and key."""


@dataclass(frozen=True)
class Option:
    """One key of a config.

    Args:
        key: dotted if nested.
        kind: one of `_KINDS`.
        choices: allowed values, the default first.
        refused: (value, reason) of known but unsupported values.
        example: a typical value for an option without default; suggested in place of a wrong one.
    """

    key: str
    default: Any
    kind: str
    doc: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    nullable: bool = False
    required: bool = False
    refused: tuple[tuple[Any, str], ...] = ()
    example: Any = None

    def parse(self, value: Any) -> Any:
        """The checked value; raises OptionError with the rule."""
        if value is None:
            if self.nullable:
                return None
            remedy = "write one" if self._shown() is None else f"write {_bare(self._shown())} or remove the line"
            raise OptionError(f"has no value, {self.rule()}; {remedy}")
        for refused, reason in self.refused:
            if _same(value, refused):
                raise OptionError(reason)
        return _KINDS[self.kind][1](self, value)

    def refusal(self, value: Any) -> str | None:
        """Return why `value` is refused, as `<rule>; <remedy>`, or None."""
        try:
            self.parse(value)
        except OptionError as error:
            return str(error)
        return None

    def rule(self) -> str:
        """The allowed values, as a sentence: "must be …"."""
        if self.choices:
            text = f"must be one of {', '.join(map(_bare, self.choices))}"
        else:
            text = f"must be {_KINDS[self.kind][0]}{self._range()}"
        return f"{text}, or null" if self.nullable else text

    def error(self, remedy: str) -> OptionError:
        """The rule, and a remedy."""
        return OptionError(f"{self.rule()}; {remedy}")

    def number(self, value: Any) -> Any:
        """A number of the kind, within the bounds; never NaN or infinity."""
        whole = self.kind in WHOLE
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise self.error(_number_remedy(value, whole))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        inside = (
            math.isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )
        if not inside:
            example = self._shown()
            raise self.error(
                "write " + ("a value in that range" if example is None else f"{show(example)}, for example")
            )
        return value if whole else number

    def _shown(self) -> Any:
        return self.default if self.example is None else self.example

    def _range(self) -> str:
        parts = []
        if self.minimum is not None and self.maximum is not None:
            parts.append(f"from {self.minimum:g} to {self.maximum:g}")
        elif self.minimum is not None:
            parts.append(f"of at least {self.minimum:g}")
        elif self.maximum is not None:
            parts.append(f"of at most {self.maximum:g}")
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.below is not None:
            parts.append(f"below {self.below:g}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return f" {' and '.join(parts)}" if parts else ""


def key(default: Any, kind: str, doc: str = "", **rules: Any) -> Any:
    """A dataclass field that is one key of the block; `rules` are `Option`'s."""
    return field(default=default, metadata={"option": Option("", default, kind, doc, **rules)})


def switch(default: bool, doc: str = "", **rules: Any) -> Any:
    """A boolean key."""
    return key(default, "bool", doc, **rules)


def choice(choices: Iterable[Any], doc: str = "", **rules: Any) -> Any:
    """A key with these values, the default first."""
    choices = tuple(choices)
    return key(choices[0], "choice", doc, choices=choices, **rules)


def blocks(cls: type) -> Any:
    """A dataclass field that is a list of blocks; a tuple once built."""
    return field(default=(), metadata={"blocks": cls})


# -- values ------------------------------------------------------------------------------------------------------------


def _number_remedy(value: Any, whole: bool) -> str:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (whole and not number.is_integer()):
        return "write a number"
    return f"write {value} without quotes" if isinstance(value, str) else f"write {int(number)}"


def _parse_bool(option: Option, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise option.error("write true or false, without quotes")


def _parse_str(option: Option, value: Any) -> str:
    if not isinstance(value, str):
        raise option.error("write it in quotes")
    if option.required and not value.strip():
        raise OptionError("is empty; write one")
    return value


def _parse_choice(option: Option, value: Any) -> Any:
    for one in option.choices:
        if _same(value, one):
            return one
    if isinstance(value, str) and value in map(str, option.choices):
        raise option.error(f"write {value} without quotes")
    near = closest(value, map(str, option.choices)) if isinstance(value, str) else None
    raise option.error(f"did you mean '{near}'?" if near else f"write {_bare(option.choices[0])}, for example")


def _parse_colour(option: Option, value: Any) -> str:
    colour = value.lower() if isinstance(value, str) else ""
    if colour in COLOURS or re.fullmatch("#[0-9a-f]{6}", colour):
        return colour
    raise option.error("write white, or a colour such as '#f0f0f0' in quotes")


def _parse_strings(option: Option, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise option.error(f"write [{show(value)}]" if isinstance(value, str) else "write ['…'] or []")
    for item in value:
        if not isinstance(item, str) or not item:
            raise OptionError(f"{option.rule()}, {show(item)} is not a string; write it in quotes, or remove it")
    return tuple(value)


def _parse_count_or_names(option: Option, value: Any) -> int | tuple[str, ...]:
    return _parse_strings(option, value) if isinstance(value, (list, tuple)) and value else option.number(value)


def _parse_blocks(option: Option, value: Any) -> int | str:
    return value if value in BLOCK_WORDS else option.number(value)


def _parse_sizes(option: Option, value: Any) -> tuple[int, ...]:
    sizes = list(value) if isinstance(value, (list, tuple)) else [value]
    if not sizes:
        raise OptionError(f"{option.rule()}, the list is empty; write [{show(option.default[0])}]")
    return tuple(map(option.number, sizes))


def _parse_betas(option: Option, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise option.error("write [0.9, 0.999], for example")
    return tuple(map(option.number, value))


def _parse_mapping(option: Option, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise option.error("write its keys below it, indented")
    return dict(value)


# kind → its name in a rule, and its check
_KINDS: dict[str, tuple[str, Callable[[Option, Any], Any]]] = {
    "bool": ("true or false", _parse_bool),
    "int": ("a whole number", Option.number),
    "float": ("a number", Option.number),
    "str": ("a string", _parse_str),
    "choice": ("one of its values", _parse_choice),
    "colour": (f"a colour ({', '.join(COLOURS)} or '#rrggbb')", _parse_colour),
    "strings": ("a list of strings", _parse_strings),
    "sizes": ("a whole number, or a list of them, each", _parse_sizes),
    "count or names": ("a list of file names, or a whole number", _parse_count_or_names),
    "blocks": (f"{', '.join(BLOCK_WORDS)}, or a whole number", _parse_blocks),
    "betas": ("a list of two numbers, each", _parse_betas),
    "mapping": ("a block of keys", _parse_mapping),
}


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


# -- blocks ------------------------------------------------------------------------------------------------------------


def config_fields(cls: type) -> dict[str, Field[Any]]:
    """The fields of `cls` that are keys of the config."""
    return {item.name: item for item in fields(cls) if item.metadata or block_of(item)}


def block_of(item: Field[Any]) -> type | None:
    """The dataclass of a nested block's field, or None."""
    made_by = item.default_factory
    return made_by if isinstance(made_by, type) and is_dataclass(made_by) else None


def options_of(cls: type, prefix: str = "") -> list[Option]:
    """Every option of a config and its nested blocks, by dotted key."""
    options: list[Option] = []
    for name, item in config_fields(cls).items():
        if nested := block_of(item):
            options += options_of(nested, f"{prefix}{name}.")
        elif "option" in item.metadata:
            options.append(replace(item.metadata["option"], key=f"{prefix}{name}"))
    return options


@dataclass(frozen=True)
class OtherKeys:
    """Keys that only ai-toolkit has: ignored key → reason, unsupported key → ai-toolkit's default."""

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
    """Build `cls` from a YAML block; null counts as empty. `extra` fills fields of `cls` that are not config keys.

    Findings and present keys go into `findings`; a refused value is replaced by its default, so that the rest is still
    checked. `others` holds the keys of ai-toolkit that `cls` and its blocks lack.
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
        elif nested := block_of(item):
            values[name] = build(nested, value, where, findings, others=others)
        elif "option" in item.metadata:
            _parse_into(values, name, item.metadata["option"], value, where, findings)
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


def parse_keys(options: Iterable[Option], raw: Any, path: str, findings: Findings) -> dict[str, Any]:
    """Check a block against a list of options; returns only the keys present."""
    known = {option.key.rpartition(".")[2]: option for option in options}
    values: dict[str, Any] = {}
    for name, value in as_mapping(raw, path, findings).items():
        if name in known:
            _parse_into(values, name, known[name], value, f"{path}.{name}", findings)
        else:
            findings.add(f"{path}.{name}", f"unknown key; {suggest_key(name, known)}")
    return values


def as_mapping(raw: Any, path: str, findings: Findings) -> Mapping[Any, Any]:
    """`raw` if it is a block; else an empty one, with a finding unless null."""
    if raw is None or isinstance(raw, Mapping):
        return raw or {}
    findings.add(path, "must be a block of keys; write its keys below it, indented", raw)
    return {}


def to_plain(value: Any) -> Any:
    """A config and its blocks as plain YAML types."""
    if is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in config_fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _parse_into(values: dict[str, Any], name: str, option: Option, value: Any, path: str, findings: Findings) -> None:
    try:
        values[name] = option.parse(value)
    except OptionError as error:
        findings.add(path, str(error), value)


def _removal(path: str, value: Any) -> str | None:
    _, block, name = path.rpartition("coat.")
    return (REMOVED.get(name) or REMOVED.get(f"{name}={value}")) if block else None


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
        inner = {block: block_of(item) for block, item in known.items()}
        nested = [f"{block}.{one}" for block, cls in inner.items() if cls for one in config_fields(cls)]
        findings.add(
            path, f"unknown key; {suggest_key(name, {*known, *others.no_effect, *others.unsupported}, nested)}"
        )
