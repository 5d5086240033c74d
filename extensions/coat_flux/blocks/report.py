"""What COAT did to a model: asked, got, why, as a table for the start of a run and as metadata of its LoRA."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from coat_core.config import FP8LinearConfig
from coat_core.kernels.dispatch import triton_obstacle
from coat_core.linear.function import fp8_gemm_obstacle
from coat_core.linear.module import FP8TrainableLinear

from ..base.text import columns
from .block_bytes import block_bytes
from .decide import BlockChoice, BlockPlan, Given, block_settings, packing_of
from .described import Block
from .lookup import READ_BLOCKS

if TYPE_CHECKING:
    from ..config.coat import COATConfig

__all__ = ["OUTSIDE", "CoatReport", "TableRow", "describe_linear", "shared_rows"]

OUTSIDE = "outside the blocks: kept in high precision"
UNASKED = "-"
NO_READER = "blocks without a reader"
GENERIC = "generic flow in place of the fused one, which keeps less"
EAGER = "runs eager, not compiled"
NOT_REACHED = {"idle": "untouched, not called", "host": "untouched, in a checkpoint of the model's own"}
LATER = "decided at the first step"
DEQUANTIZED = "products of dequantized weights"
QUANTIZED = "quantized by ai-toolkit"
OWN_PRODUCTS = "its own products, gradients by the dequantized weight"
HEADER = ("part", "count", "asked", "got", "why")


class TableRow(NamedTuple):
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
        quantized: name → how, for linears that ai-toolkit quantized its own way.
        got: name → what the layer does when the run starts, in words.
        why: name → reason, where a layer got less than the config asks for in general.
        skipped: name → reason, for linears left in high precision.
        checkpointing: one line on recomputation and saved tensors.
        execution: one line on who chooses the GEMMs' scaling and compilation.
        linears: name → the layer, whose GEMM the first step may change.
        shared: gives the rows on what the blocks share, as it is now.
    """

    asked: str = ""
    converted: list[str] = field(default_factory=list)
    quantized: dict[str, str] = field(default_factory=dict)
    got: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    checkpointing: str = ""
    execution: str = ""
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
        """Add what is not known to `apply_coat`, or replace the row of that part: the optimizer, for example."""
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
        """Return a table that fits `width` columns: parts, what they got, and after it what was asked, and why.

        With `shared`, only what the blocks share, which the first step decides.
        """
        found = self.shared() if shared else self.parts()
        rows = [(f"{row.part} ({row.count})" if row.count else row.part, _in_words(row)) for row in found]
        left = max((len(part) for part, _ in rows), default=0) + 2
        lines = []
        for part, text in rows:
            first, *more = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
            lines += [part.ljust(left) + first, *(" " * left + line for line in more)]
        return "\n".join(lines)

    def metadata(self) -> dict[str, str]:
        """Return the table as it is now, flat: `coat.asked.<part>`, `coat.got.<part>`, `coat.why.<part>`.

        A group of layers with several treatments has all of them in `coat.got`, with their counts. There is no
        `coat.asked` or `coat.why` where there is nothing to report.
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


def shared_rows(
    plan: BlockPlan, config: COATConfig, device: torch.device, ran: Mapping[int, str], own: bool = False
) -> list[TableRow]:
    """Return asked, got and why of what all blocks share: GEMMs, kernels, saved tensors, attention and so on.

    They are made each time they are read: before the first step they say what it will decide, after it what it did.
    They hold no measured number, so that runs that are the same have the same metadata; the log has those.

    Args:
        plan: of the model's blocks, as it is now.
        config: the `coat:` block.
        device: where the model runs.
        ran: how each block ran that did, as `BlockRunner.ran`.
        own: all weights are ai-toolkit's own.
    """
    gemms, saved = _gemms(plan, config, device), _saved(plan, config, ran)
    gemms = gemms._replace(got=OWN_PRODUCTS, why=QUANTIZED) if own else gemms
    rows = [gemms, _kernels(device), saved, _attention(plan, config), _checkpointing(plan, config)]
    if config.weight.use_fp8 and config.activation.use_fp8 and not own:
        rows.append(_transposed(plan, config))
    rows.append(_execution(plan, config, device))
    return rows


def checkpointing_line(plan: BlockPlan, config: COATConfig) -> str:
    """One line: what is recomputed, how kept blocks store what they save."""
    stored = f"{_stored(config)}, attention {config.activation.attention}"
    flow = "fused" if config.activation.flow == "fused" and set(plan.given.classes) & READ_BLOCKS.keys() else "generic"
    kept = f"kept blocks save {stored}, {flow} flow" if config.activation.use_fp8 else "kept blocks save high precision"
    kept += "; compiled blocks" if plan.execution.compile == "blocks" else ""
    if plan.recomputed is None:
        recomputed = f"recomputed blocks keep {_inputs(config)} inputs"
        return f"checkpointing auto (chosen at the first step); {kept}; {recomputed}"
    count = f"{len(plan.recomputed)} of {len(plan.blocks)} blocks recompute from {_inputs(config)} inputs"
    return f"checkpointing {plan.checkpointing}: {count}; {kept}"


def execution_line(plan: BlockPlan, config: COATConfig, device: torch.device) -> str:
    """One line: whether scaling and compilation are as configured, or are picked at the first step."""
    measures = plan.given.picks_later and (device.type == "cuda" or config.speed.measure == "always")
    when = "picked by measurement at the first step" if measures else "as configured"
    return f"execution: {when} (speed.measure: {config.speed.measure})"


def auto_line(plan: BlockPlan) -> str:
    """One line: what `auto` chose by the sizes; empty where it did not."""
    given = plan.given
    if plan.checkpointing != "auto" or given.tokens is None or given.recomputed is not None or given.free_bytes is None:
        return ""
    recomputed = f"{len(plan.recomputed or ())} of {len(plan.blocks)} blocks recompute"
    sizes = f"{plan.peak_bytes / 1e9:.2f} GB for a step, {given.free_bytes / 1e9:.2f} GB free for it"
    return f"checkpointing auto: {recomputed} ({sizes})"


def treatments(plan: BlockPlan, ran: Mapping[int, str] | None = None) -> Counter[str]:
    """What the blocks do, in words → how many; `ran` as of `shared_rows`, None for what is planned."""
    ran = dict(enumerate(choice.flow for choice in plan.blocks)) if ran is None else ran
    return Counter(_treatment(plan, choice, ran.get(i, "idle")) for i, choice in enumerate(plan.blocks))


def generic_cost(config: COATConfig, given: Given) -> str:
    """What the generic flow keeps of a block in place of the fused one; `given` has the one; empty where unknown."""
    (block,), tokens = given.blocks, given.tokens
    if tokens is None or not isinstance(block, Block):
        return ""
    kept = [block_bytes(block, tokens, block_settings(config, given, fused=x)[0]).kept for x in (False, True)]
    generic, fused = (size / (tokens.rows * block.hidden) for size in kept)
    return (
        f"; such a block keeps {kept[0] / 1e6:.2f} MB instead of {kept[1] / 1e6:.2f} MB "
        f"({generic:.1f} instead of {fused:.1f} bytes per token and channel)"
    )


def _treatment(plan: BlockPlan, choice: BlockChoice, way: str) -> str:
    if way in NOT_REACHED:
        return NOT_REACHED[way]
    compiled = "" if plan.execution.compile != "blocks" else ", compiled" if choice.compiled else ", eager"
    if choice.recomputed:
        return f"recomputed{compiled}"
    if choice.saved is None:
        return f"kept in high precision{compiled}"
    flow = "fused" if way == "fused" else "generic"
    return f"kept in FP8, {flow} flow, attention {choice.saved.attention}{compiled}"


def not_compiled(kind: str) -> str:
    """Why blocks of a class run eager."""
    return f"speed.compile='blocks': a {kind} that cannot be fused is not compiled"


def _has_readers(plan: BlockPlan) -> bool:
    return all(name in READ_BLOCKS for name in plan.given.classes)


def _stored(config: COATConfig) -> str:
    packing = packing_of(config)
    return f"FP8 {packing.format} {packing.granularity.name}"


def _inputs(config: COATConfig) -> str:
    return "FP8" if config.memory.enable_efficient_checkpoint else "high precision"


def _gemms(plan: BlockPlan, config: COATConfig, device: torch.device) -> TableRow:
    if not config.activation.use_fp8:
        weights = DEQUANTIZED if config.weight.use_fp8 else "products of the weights"
        return TableRow("GEMMs", "high precision", weights, "activation.use_fp8: false")
    linear = config.linear_config()
    backward = "dequantized weights" if linear.grad_format == "bf16" else linear.grad_format
    asked = f"FP8, forward {linear.input_format}, backward {backward}"
    obstacle = fp8_gemm_obstacle(device, linear)
    if obstacle is not None:
        return TableRow("GEMMs", asked, DEQUANTIZED, f"fallback: {obstacle}")
    if plan.execution.gemm == "bf16":
        return TableRow("GEMMs", asked, DEQUANTIZED, "faster here, and at least as precise; see execution")
    if device.type == "cpu":
        return TableRow("GEMMs", asked, "fp32 products of the FP8 codes", "a cpu: a GPU's values, not its speed")
    return TableRow("GEMMs", asked, "torch._scaled_mm", f"a trial on {device} ran")


def _kernels(device: torch.device) -> TableRow:
    asked, reference = "Triton", "PyTorch reference"
    if device.type != "cuda":
        return TableRow("kernels", asked, reference, f"Triton kernels need a GPU, this is a {device.type}")
    here = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    obstacle = triton_obstacle(here)
    return TableRow("kernels", asked, asked if obstacle is None else reference, obstacle or "")


def _saved(plan: BlockPlan, config: COATConfig, ran: Mapping[int, str]) -> TableRow:
    if not config.activation.use_fp8:
        return TableRow("saved tensors", "high precision", "high precision", "activation.use_fp8: false")
    asked = f"{_stored(config)}, {config.activation.flow} flow"
    if not ran:  # what is foreseen
        unfused = plan.given.unfused if config.activation.flow == "fused" else {}
        some = "" if len(unfused) == len(plan.blocks) else f" in {len(unfused)} of {len(plan.blocks)} blocks"
        why = "; ".join(dict.fromkeys(unfused.values())) if _has_readers(plan) else NO_READER
        expected = f"expected: {_stored(config)}, generic flow{some}" if unfused else "expected: as asked"
        return TableRow("saved tensors", asked, f"{LATER}, {expected}", why if unfused else "")
    got = "; ".join(f"{count} {what}" for what, count in treatments(plan, ran).items())
    blocks = list(zip(plan.given.classes, plan.blocks, strict=True))
    obstacles = {f"{name}: {choice.obstacle}" for name, choice in blocks if choice.obstacle and name in READ_BLOCKS}
    eager = {
        not_compiled(name) for name, choice in blocks if plan.execution.compile == "blocks" and choice.flow != "fused"
    }
    return TableRow("saved tensors", asked, got, "; ".join([*sorted(obstacles), *sorted(eager)]))


def _attention(plan: BlockPlan, config: COATConfig) -> TableRow:
    kept = config.activation.attention if config.activation.use_fp8 else "high precision"
    asked, picked = f"q, k, v, out kept in {kept}", plan.given.attention
    if picked is None:
        later = LATER if _has_readers(plan) else "chosen by torch at each call"
        return TableRow("attention", asked, f"as asked; kernel {later}")
    (kernel, why), plain = picked, "no fused kernel takes these tensors: backward runs it again"
    return TableRow("attention", asked, f"as asked; kernel {kernel}", plain if kernel == "plain" else why)


def _checkpointing(plan: BlockPlan, config: COATConfig) -> TableRow:
    memory, given = config.memory, plan.given
    asked = memory.checkpointing + (f" ({memory.every_n})" if memory.checkpointing == "every_n" else "")
    asked += "" if memory.budget_gb is None else f" within {memory.budget_gb:g} GB"
    if plan.recomputed is None:
        return TableRow("checkpointing", asked, LATER)
    got = f"{len(plan.recomputed)} of {len(plan.blocks)} blocks recompute from {_inputs(config)} inputs"
    why = "the fewest with which a step fits the budget" if plan.checkpointing == "auto" else ""
    if given.ran_out_with is not None:
        why = f"memory ran out with {given.ran_out_with}"
    if plan.checkpointing != memory.checkpointing:
        why = "train.gradient_checkpointing: false"
    return TableRow("checkpointing", asked, got, why)


def _transposed(plan: BlockPlan, config: COATConfig) -> TableRow:
    mode, given = config.memory.transposed_weights, plan.given
    got = f"{plan.transposed_bytes / 1e9:.2f} GB" if plan.copies else "none"
    if given.tokens is None:
        got, why = LATER, ""
    elif given.device != "cuda":
        why = f"not needed on a {given.device}"
    elif mode != "auto":
        why = "as configured"
    elif given.without_copies:
        why = "memory ran out with them"
    elif plan.spare_bytes < 0:
        why = "blocks recompute, or checkpointing is not auto"
    else:
        why = "a step leaves room for them" if plan.copies else "a step leaves no room for them"
    return TableRow("transposed weights", mode, got, why)


def _execution(plan: BlockPlan, config: COATConfig, device: torch.device) -> TableRow:
    asked, compile = f"compile {config.speed.compile}, measure {config.speed.measure}", plan.execution.compile
    if plan.given.picks_later:
        return TableRow("execution", asked, LATER)
    picked = plan.given.picked
    gemm = "" if picked is None else f"{picked.execution.gemm} GEMM, "
    if picked is None:
        why = "as configured" if _has_readers(plan) else f"as configured: {NO_READER}"
    else:
        why = "the fastest of those that were measured" if picked.milliseconds else picked.why
    if compile == "none":
        return TableRow("execution", asked, f"{gemm}eager", why)
    if plan.given.compile_failed:
        return TableRow("execution", asked, f"{gemm}eager", "torch.compile failed, the log has its reason")
    if compile == "cudagraphs":
        obstacle = plan.given.graph_obstacle
        return TableRow("execution", asked, f"{gemm}{'eager' if obstacle else 'steps as CUDA graphs'}", obstacle or why)
    return TableRow("execution", asked, f"{gemm}compiled blocks", why)
