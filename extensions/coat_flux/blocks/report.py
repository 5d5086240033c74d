"""What COAT did to a model: asked, got, why, as a table for the start of a run and as metadata of its LoRA."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from coat_core.config import FP8LinearConfig
from coat_core.linear.module import FP8TrainableLinear

from ..base.text import columns

if TYPE_CHECKING:
    pass

__all__ = ["OUTSIDE", "CoatReport", "TableRow", "describe_linear"]

OUTSIDE = "outside the blocks: kept in high precision"
UNASKED = "-"
QUANTIZED = "quantized by ai-toolkit"
OWN_PRODUCTS = "its own products, gradients by the dequantized weight"
HEADER = ("part", "count", "asked", "got", "why")


class TableRow(NamedTuple):
    """One line of the table."""

    part: str  # a group of layers, or what the blocks share (GEMMs, kernels, attention, optimizer, ...)
    asked: str  # what the config asks for
    got: str  # what there is
    why: str = ""  # the reason, where they differ or where the config leaves the choice
    count: int = 0  # layers; 0 where none are counted


@dataclass
class CoatReport:
    """Result of `apply_coat`, by full module name; the first step fills in its own decisions.

    Attributes:
        quantized: name → how, for linears that ai-toolkit quantized its own way.
        why: name → reason, where a layer got less than the config asks for.
        shared: returns the current rows on what the blocks share.
    """

    asked: str = ""  # what the config asks of a linear of the blocks, in words
    converted: list[str] = field(default_factory=list)  # linears whose weight is FP8 or whose GEMMs are
    quantized: dict[str, str] = field(default_factory=dict)
    got: dict[str, str] = field(default_factory=dict)  # name → what the layer does when the run starts, in words
    why: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # name → reason, for linears left in high precision
    checkpointing: str = ""  # one line on recomputation and saved tensors
    execution: str = ""  # one line on who chooses the GEMMs' scaling and compilation
    linears: Mapping[str, Any] = field(default_factory=dict, repr=False)
    shared: Callable[[], Iterable[TableRow]] = field(default=tuple, repr=False)
    _added: dict[str, TableRow] = field(default_factory=dict, repr=False)

    def add(self, name: str, got: str, why: str = "") -> None:
        """Note a converted layer."""
        self.converted.append(name)
        self.got[name] = got
        if why:
            self.why[name] = why

    def add_row(self, part: str, asked: str, got: str, why: str = "") -> None:
        """Add or replace the row of a part unknown to `apply_coat`, such as the optimizer."""
        self._added[part] = TableRow(part, asked, got, why)

    def rows(self) -> list[tuple[str, int, str, str]]:
        """Return (layers, count, got, why), one row per part of the model and treatment, as it is now."""
        ours = ((_part(name), self._got_now(name), self.why.get(name, "")) for name in self.converted)
        own = ((_part(name), f"W {how}, {OWN_PRODUCTS}", QUANTIZED) for name, how in self.quantized.items())
        rest = ((_part(name), "high precision", reason) for name, reason in self.skipped.items())
        counted = Counter(chain(ours, own, rest))
        return [(group, count, got, why) for (group, got, why), count in counted.items()]

    def parts(self) -> list[TableRow]:
        """Return all rows of the table, as it is now; what is outside the blocks is one of them."""
        rows = [TableRow(g, self.asked, got, why, count) for g, count, got, why in self.rows() if why != OUTSIDE]
        outside = {group: count for group, count, _, why in self.rows() if why == OUTSIDE}
        if outside:
            why = f"{OUTSIDE} ({', '.join(outside)})"
            rows.append(TableRow("outside", UNASKED, "high precision", why, sum(outside.values())))
        return [*rows, *self.shared(), *self._added.values()]

    def table(self) -> str:
        """Return the table as text."""
        cells = [
            (row.part, str(row.count or ""), row.asked, "as asked" if row.got == row.asked else row.got, row.why)
            for row in self.parts()
        ]
        return "\n".join(columns((HEADER, *cells), left=range(len(HEADER))))

    def brief(self, width: int = 100, *, shared: bool = False) -> str:
        """Return a table in `width` columns: parts, got, asked, why; with `shared` only what the first step decides."""
        found = self.shared() if shared else self.parts()
        rows = [(f"{row.part} ({row.count})" if row.count else row.part, _in_words(row)) for row in found]
        left = max((len(part) for part, _ in rows), default=0) + 2
        lines = []
        for part, text in rows:
            first, *more = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
            lines += [part.ljust(left) + first, *(" " * left + line for line in more)]
        return "\n".join(lines)

    def metadata(self) -> dict[str, str]:
        """Return the current table, flat: `coat.asked.<part>`, `coat.got.<part>`, `coat.why.<part>`."""
        found: dict[str, list[str]] = {}
        for row in self.parts():
            part = row.part.removesuffix(".*").replace(" ", "_").lower()
            got = f"{row.count} x {row.got}" if row.count else row.got
            for key, text in (("asked", row.asked), ("got", got), ("why", row.why)):
                texts = found.setdefault(f"coat.{key}.{part}", [])
                if text not in ("", UNASKED, *texts):
                    texts.append(text)
        return {name: "; ".join(texts) for name, texts in found.items() if texts}

    def _got_now(self, name: str) -> str:
        module = self.linears.get(name)
        if module is None:
            return self.got[name]
        config = getattr(module, "coat_linear_config", None) or module.config
        return describe_linear(config, not isinstance(module, FP8TrainableLinear), bool(self.why.get(name)))


def describe_linear(linear: FP8LinearConfig, stored: bool, high_precision: bool) -> str:
    """Describe weight, forward input and backward gradient of a linear; `stored`: it holds codes."""
    weight = f"W {linear.weight_stored_as}" + ("" if stored else " cast at each use")
    if high_precision or not linear.use_fp8_gemm:
        return f"{weight}, high precision GEMM"
    return f"{weight}, x {linear.input_format}/{linear.input_granularity}, dy {linear.grad_format}"


def _in_words(row: TableRow) -> str:
    if row.got == row.asked:
        return f"{row.got}{f' ({row.why})' if row.why else ''}"
    differs = row.asked != UNASKED and not row.got.startswith("as asked")
    behind = [f"asked: {row.asked}"] * differs + [row.why] * bool(row.why)
    got = row.got.replace("as asked", row.asked, 1) if row.got.startswith("as asked") else row.got
    return f"{got} ({'; '.join(behind)})" if behind else got


def _part(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{part}.*" if rest else part
