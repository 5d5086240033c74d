"""What COAT did to a model: asked, got, why, as a table for the start of a run and as metadata of its LoRA."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from coat_core.config import FP8LinearConfig
from coat_core.kernels.dispatch import triton_obstacle
from coat_core.linear.function import fp8_gemm_obstacle
from coat_core.linear.module import FP8TrainableLinear

if TYPE_CHECKING:
    from ..config.coat import COATConfig
    from .runner import BlockPolicy

__all__ = ["OUTSIDE", "CoatReport", "Row", "describe_linear", "shared_rows"]

OUTSIDE = "outside the blocks: kept in high precision"
UNASKED = "-"
LATER = "decided at the first step"
DEQUANTIZED = "products of dequantized weights"
HEADER = ("part", "count", "asked", "got", "why")


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        part: a group of layers, or what the blocks share (GEMMs, kernels, attention, optimizer, ...).
        asked: what the config asks for.
        got: what there is.
        why: the reason, where they differ or where the config leaves the choice.
        count: layers; 0 where none are counted.
    """

    part: str
    asked: str
    got: str
    why: str = ""
    count: int = 0


@dataclass
class CoatReport:
    """Result of `apply_coat`, by full module name. What the first step decides is there from the first step on.

    Attributes:
        asked: what the config asks of a linear of the blocks, in words.
        converted: linears whose weight is FP8 or whose GEMMs are.
        got: name → what the layer does when the run starts, in words.
        why: name → reason, where a layer got less than the config asks for in general.
        skipped: name → reason, for linears left in high precision.
        checkpointing: one line on recomputation and saved tensors.
        path: one line on who chooses the GEMMs' scaling and compilation.
        linears: name → the layer, whose GEMM the first step may change.
        shared: gives the rows on what the blocks share, as it is now.
    """

    asked: str = ""
    converted: list[str] = field(default_factory=list)
    got: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    checkpointing: str = ""
    path: str = ""
    linears: Mapping[str, Any] = field(default_factory=dict, repr=False)
    shared: Callable[[], Iterable[Row]] = field(default=tuple, repr=False)
    _added: dict[str, Row] = field(default_factory=dict, repr=False)

    def add(self, name: str, got: str, why: str = "") -> None:
        """Note a converted layer."""
        self.converted.append(name)
        self.got[name] = got
        if why:
            self.why[name] = why

    def add_row(self, part: str, asked: str, got: str, why: str = "") -> None:
        """Add what is not known to `apply_coat`, or replace the row of that part: the optimizer, for example."""
        self._added[part] = Row(part, asked, got, why)

    def rows(self) -> list[tuple[str, int, str, str]]:
        """Return (layers, count, got, why), one row per part of the model and treatment, as it is now."""
        counted: dict[tuple[str, str, str], int] = {}
        for name in self.converted:
            key = (_part(name), self._got_now(name), self.why.get(name, ""))
            counted[key] = counted.get(key, 0) + 1
        for name, reason in self.skipped.items():
            key = (_part(name), "high precision", reason)
            counted[key] = counted.get(key, 0) + 1
        return [(group, count, got, why) for (group, got, why), count in counted.items()]

    def parts(self) -> list[Row]:
        """Return all rows of the table, as it is now; what lies outside the blocks is one of them."""
        rows = [Row(g, self.asked, got, why, count) for g, count, got, why in self.rows() if why != OUTSIDE]
        outside = {group: count for group, count, _, why in self.rows() if why == OUTSIDE}
        if outside:
            why = f"{OUTSIDE} ({', '.join(outside)})"
            rows.append(Row("outside", UNASKED, "high precision", why, sum(outside.values())))
        return [*rows, *self.shared(), *self._added.values()]

    def table(self) -> str:
        """Return the table as text."""
        cells = [
            (row.part, str(row.count or ""), row.asked, "as asked" if row.got == row.asked else row.got, row.why)
            for row in self.parts()
        ]
        widths = [max(len(row[i]) for row in (HEADER, *cells)) for i in range(4)]
        lines = ("  ".join([*map(str.ljust, row, widths), row[4]]) for row in (HEADER, *cells))
        return "\n".join(line.rstrip() for line in lines)

    def brief(self, width: int = 100) -> str:
        """Return a table that fits `width` columns: parts, what they got, and behind it what was asked, and why."""
        rows = [(f"{row.part} ({row.count})" if row.count else row.part, _in_words(row)) for row in self.parts()]
        left = max((len(part) for part, _ in rows), default=0) + 2
        lines = []
        for part, text in rows:
            first, *more = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
            lines += [part.ljust(left) + first, *(" " * left + line for line in more)]
        return "\n".join(lines)

    def metadata(self) -> dict[str, str]:
        """Return the table as it is now, flat: `coat.asked.<part>`, `coat.got.<part>`, `coat.why.<part>`.

        A group of layers with several treatments has all of them in `coat.got`, with their counts. There is no
        `coat.asked` or `coat.why` where there is nothing to say.
        """
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
    """What a linear does, in words: weight, forward input and backward gradient.

    Args:
        linear: its config.
        stored: whether it holds codes instead of a weight.
        high_precision: whether it multiplies in high precision whatever its config says.
    """
    weight = f"W {linear.weight_format}/{linear.weight_granularity}" + ("" if stored else " cast at each use")
    if high_precision or not linear.use_fp8_gemm:
        return f"{weight}, high precision GEMM"
    return f"{weight}, x {linear.input_format}/{linear.input_granularity}, dy {linear.grad_format}"


def _in_words(row: Row) -> str:
    if row.got == row.asked:
        return f"{row.got}{f' ({row.why})' if row.why else ''}"
    differs = row.asked != UNASKED and not row.got.startswith("as asked")
    behind = [f"asked: {row.asked}"] * differs + [row.why] * bool(row.why)
    got = row.got.replace("as asked", row.asked, 1) if row.got.startswith("as asked") else row.got
    return f"{got} ({'; '.join(behind)})" if behind else got


def _part(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{part}.*" if rest else part


def shared_rows(policy: BlockPolicy, config: COATConfig, device: torch.device) -> list[Row]:
    """Return asked, got and why of what all blocks share: GEMMs, kernels, saved tensors, attention, path and so on.

    They are made each time they are read: before the first step they say what it will decide, after it what it did.
    They hold no measured number, so that runs that are the same have the same metadata; the log has those.

    Args:
        policy: of the model's blocks.
        config: the `coat:` block.
        device: where the model runs.
    """
    rows = [_gemms(policy, config, device), _kernels(device), _saved(policy, config), _attention(policy)]
    rows.append(_checkpointing(policy, config))
    if config.weight.use_fp8 and config.activation.use_fp8:
        asked, (got, why) = config.memory.transposed_weights, policy.transposed_weights
        rows.append(Row("transposed weights", asked, got or LATER, why))
    rows.append(_path(policy, config, device))
    return rows


def _gemms(policy: BlockPolicy, config: COATConfig, device: torch.device) -> Row:
    if not config.activation.use_fp8:
        weights = DEQUANTIZED if config.weight.use_fp8 else "products of the weights"
        return Row("GEMMs", "high precision", weights, "activation.use_fp8: false")
    linear = config.linear_config()
    backward = "dequantized weights" if linear.grad_format == "bf16" else linear.grad_format
    asked = f"FP8, forward {linear.input_format}, backward {backward}"
    obstacle = fp8_gemm_obstacle(device, linear)
    if obstacle is not None:
        return Row("GEMMs", asked, DEQUANTIZED, f"fallback: {obstacle}")
    if policy.picked is not None and policy.picked.path.gemm == "bf16":
        return Row("GEMMs", asked, DEQUANTIZED, "faster here, and at least as precise; see path")
    if device.type == "cpu":
        return Row("GEMMs", asked, "fp32 products of the FP8 codes", "a cpu: a GPU's values, not its speed")
    return Row("GEMMs", asked, "torch._scaled_mm", f"a trial on {device} ran")


def _kernels(device: torch.device) -> Row:
    asked, reference = "Triton", "PyTorch reference"
    if device.type != "cuda":
        return Row("kernels", asked, reference, f"Triton kernels need a GPU, this is a {device.type}")
    here = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    obstacle = triton_obstacle(here)
    return Row("kernels", asked, asked if obstacle is None else reference, obstacle or "")


def _saved(policy: BlockPolicy, config: COATConfig) -> Row:
    if not policy.packs:
        return Row("saved tensors", "high precision", "high precision", "activation.use_fp8: false")
    stored = f"FP8 {policy.packing.format} {policy.packing.granularity.name}"
    asked = f"{stored}, {config.activation.flow} flow"
    if policy.treatments:
        got = "; ".join(f"{count} {what}" for what, count in policy.treatments.items())
        return Row("saved tensors", asked, got, "; ".join(policy.obstacles))
    obstacles = policy.foreseen_obstacles()
    if not obstacles:
        return Row("saved tensors", asked, asked)
    generic, all_of_them = len(obstacles), len(obstacles) == len(policy.blocks)
    got = f"{stored}, generic flow" + ("" if all_of_them else f" in {generic} of {len(policy.blocks)} blocks")
    why = "; ".join(dict.fromkeys(obstacles.values()))
    return Row("saved tensors", asked, got, why if policy.fusable else "no FLUX.1 blocks")


def _attention(policy: BlockPolicy) -> Row:
    kept = policy.packing.attention if policy.packs else "high precision"
    asked = f"q, k, v, out kept in {kept}"
    if policy.attention_kernel is None:
        return Row(
            "attention", asked, f"as asked; kernel {LATER if policy.fusable else 'chosen by torch at each call'}"
        )
    plain = policy.attention_kernel == "plain"
    why = "torch has no fused kernel for these tensors: backward runs it again" if plain else "torch's choice"
    return Row("attention", asked, f"as asked; kernel {policy.attention_kernel}", why)


def _checkpointing(policy: BlockPolicy, config: COATConfig) -> Row:
    memory = config.memory
    asked = memory.checkpointing + (f" ({memory.every_n})" if memory.checkpointing == "every_n" else "")
    asked += "" if memory.budget_gb is None else f" within {memory.budget_gb:g} GB"
    if policy.recomputed is None:
        return Row("checkpointing", asked, LATER)
    inputs = "FP8" if memory.enable_efficient_checkpoint else "high precision"
    got = f"{len(policy.recomputed)} of {len(policy.blocks)} blocks recompute from {inputs} inputs"
    forbidden = "train.gradient_checkpointing: false" if policy.mode != memory.checkpointing else ""
    return Row("checkpointing", asked, got, forbidden or policy.recomputation_reason)


def _path(policy: BlockPolicy, config: COATConfig, device: torch.device) -> Row:
    asked = f"compile {config.speed.compile}, measure {config.speed.measure}"
    if policy.will_pick:
        return Row("path", asked, LATER)
    picked = policy.picked
    gemm = "" if picked is None else f"{picked.path.gemm} GEMM, "
    if picked is None:
        why = "as written" if policy.fusable else "as written: no FLUX.1 blocks"
    else:
        why = "the fastest of those that were measured" if picked.milliseconds else picked.why
    if policy.compile == "none":
        return Row("path", asked, f"{gemm}eager", why)
    if policy.compilation_failed:
        return Row("path", asked, f"{gemm}eager", "torch.compile failed, the log has its reason")
    if policy.compile == "cudagraphs" and device.type != "cuda":
        return Row("path", asked, f"{gemm}compiled blocks", f"there are no CUDA graphs on a {device.type}")
    return Row("path", asked, f"{gemm}compiled {policy.compile}", why)
