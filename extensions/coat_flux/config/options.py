"""One option of a config: its type, default, range and help, declared once, and how a value is checked.

A value must have the YAML type its kind asks for; nothing is converted from text, since a config that guesses hides
mistakes. The only conversion is from a whole number to a float.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from .findings import closest, show

FORMATS, INT8 = ("e4m3", "e5m2"), "int8"  # of FP8; torch is not imported here
COLOURS = {"white": "#ffffff", "grey": "#808080", "black": "#000000"}
BLOCK_WORDS = ("auto", "all")
# options of the `coat:` block that version 0 had: key, or key=value → why it went; what to write instead
REMOVED = {
    "activation.linear_granularity=per_group": "was removed, GPUs multiplied it in bf16; write per_row",
    "memory.checkpointing=every_n": "was removed; write auto with a budget_gb, or all",
    "memory.every_n": "was removed; write checkpointing: auto with a budget_gb instead, or checkpointing: all",
    "speed.attention=fa3": "is chosen automatically where it is installed; write auto",
    "speed.attention=fa4": "is chosen automatically where it is installed; write auto",
    "speed.compile": "was removed; write speed.cuda_graphs: auto or never instead",
    "weight.cache": "was removed, quantized weights are no longer kept on disk; remove it",
}
BOOL_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


class OptionError(Exception):
    """Why a value is refused: the rule and the remedy, without file and key."""


@dataclass(frozen=True)
class Option:
    """One key of a config.

    Args:
        key: its name, dotted where it is nested.
        default: its value where the user writes none.
        kind: bool, int, float, str, choice, colour, strings (list of strings), sizes (whole number or a list of them),
            count or names (whole number or a list of file names), blocks (whole number or a word of BLOCK_WORDS), betas
            (two numbers), mapping.
        doc: one line: what it does.
        choices: allowed values, the default first.
        minimum: smallest allowed number.
        above: a number must be greater than this.
        maximum: largest allowed number.
        below: a number must be less than this.
        multiple_of: a whole number must be a multiple of this.
        nullable: null is allowed.
        required: there is no default.
        refused: (value, reason) of values that are known but cannot be had.
        example: a value people write, where the default is none; offered in place of a wrong one.
    """

    key: str
    default: Any
    kind: str
    doc: str
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
        """The checked value.

        Raises:
            OptionError: the value is not allowed; says what is.
        """
        if value is None:
            if self.nullable:
                return None
            shown = self.default if self.example is None else self.example
            remedy = "write one" if shown is None else f"write {_bare(shown)} or remove the line"
            raise OptionError(f"has no value, {self.rule()}; {remedy}")
        for refused, reason in self.refused:
            if _same(value, refused):
                raise OptionError(reason)
        return _KINDS[self.kind][1](self, value)

    def refusal(self, value: Any) -> str | None:
        """Why `value` is refused, as `<rule>; <remedy>`; None where it is allowed."""
        try:
            self.parse(value)
        except OptionError as error:
            return str(error)
        return None

    def rule(self) -> str:
        """What is allowed, as a sentence: "must be …"."""
        if self.choices:
            text = f"must be one of {', '.join(map(_bare, self.choices))}"
        else:
            text = f"must be {_KINDS[self.kind][0]}{self._range()}"
        return f"{text}, or null" if self.nullable else text

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

    def error(self, remedy: str) -> OptionError:
        """The rule, and what to write instead."""
        return OptionError(f"{self.rule()}; {remedy}")

    def check_range(self, number: float) -> None:
        """Raise OptionError unless `number` is within the bounds; NaN never is."""
        inside = (
            math.isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.multiple_of is None or number % self.multiple_of == 0)
        )
        if not inside:
            shown = self.default if self.example is None else self.example
            raise self.error("write " + ("a value in that range" if shown is None else f"{show(shown)}, for example"))


def key(default: Any, kind: str, doc: str, **rules: Any) -> Any:
    """A dataclass field that is one key of the block; arguments as those of `Option`."""
    return field(default=default, metadata={"option": Option("", default, kind, doc, **rules)})


def switch(default: bool, doc: str, **rules: Any) -> Any:
    """A key that is true or false."""
    return key(default, "bool", doc, **rules)


def choice(choices: Iterable[Any], doc: str, **rules: Any) -> Any:
    """A key with these values, the default first."""
    choices = tuple(choices)
    return key(choices[0], "choice", doc, choices=choices, **rules)


def _parse_bool(option: Option, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = BOOL_WORDS.get(value.lower()) if isinstance(value, str) else None
    if word:
        raise option.error(f"write {word} without quotes")
    raise option.error(f"write {'true' if value else 'false'}" if value in (0, 1) else "write true or false")


def _parse_number(option: Option, value: Any) -> Any:
    whole = option.kind in ("int", "sizes", "count or names", "blocks")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise option.error(_number_remedy(value, whole=whole))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    option.check_range(number)
    return value if whole else number


def _parse_str(option: Option, value: Any) -> str:
    if isinstance(value, (bool, int, float, date)):
        raise option.error("write it in quotes")
    if not isinstance(value, str):
        raise option.error("write one string")
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
            rule = f"{option.rule()}, {show(item)} is not a string"
            raise OptionError(f"{rule}; write it in quotes, or remove it")
    return tuple(value)


def _parse_count_or_names(option: Option, value: Any) -> int | tuple[str, ...]:
    if isinstance(value, (list, tuple)) and value:
        return _parse_strings(option, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise option.error("write 4 or ['photo.jpg'], for example")
    return _parse_number(option, value)


def _parse_blocks(option: Option, value: Any) -> int | str:
    if isinstance(value, str) and value in BLOCK_WORDS:
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise option.error(f"write {BLOCK_WORDS[0]}, for example")
    return int(_parse_number(option, value))


def _parse_sizes(option: Option, value: Any) -> tuple[int, ...]:
    sizes = list(value) if isinstance(value, (list, tuple)) else [value]
    if not sizes:
        raise OptionError(f"{option.rule()}, the list is empty; write [{show(option.default[0])}]")
    return tuple(_parse_number(option, size) for size in sizes)


def _parse_betas(option: Option, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise option.error("write [0.9, 0.999], for example")
    return tuple(_parse_number(option, beta) for beta in value)


def _parse_mapping(option: Option, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise option.error("write its keys below it, indented")
    return dict(value)


# kind → what it is called in a rule, and how it is checked
_KINDS: dict[str, tuple[str, Callable[[Option, Any], Any]]] = {
    "bool": ("true or false", _parse_bool),
    "int": ("a whole number", _parse_number),
    "float": ("a number", _parse_number),
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
_SLIPS = (  # how people write a number, and YAML does not read it: a pattern, and what Python reads
    (re.compile(r"([-+]?\d{1,3}),(\d{3}(?:,\d{3})*)"), r"\1\2"),  # 1,500
    (re.compile(r"([-+]?\d*),(\d+(?:[eE][-+]?\d+)?)"), r"\1.\2"),  # 0,0001
    (re.compile(r"(\d+(?:\.\d+)?)\s*k", re.IGNORECASE), r"\1e3"),  # 2k
    (re.compile(r"10\^(-?\d+)"), r"1e\1"),  # 10^-4
)


def _number_remedy(value: Any, *, whole: bool) -> str:
    """What to write for a value that is not a number, or not one of the kind."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"write {int(value)}"
    if not isinstance(value, str):
        return "write a number"
    text = unicodedata.normalize("NFKC", value).strip()  # １０ is 10
    for pattern, plain in _SLIPS:
        if pattern.fullmatch(text):
            text = pattern.sub(plain, text).replace(",", "")
    try:
        number = float(text)
    except ValueError:
        return "write a number"
    if not math.isfinite(number) or (whole and not number.is_integer()):
        return "write a number"
    if text == value and not re.match(r"[-+]?0\d", text):
        return f"write {value} without quotes"
    return f"write {int(number) if number.is_integer() and abs(number) < 2**53 else show(number)}"


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
