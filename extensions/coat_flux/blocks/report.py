"""What COAT did to a model: asked, got, why, as a table for the start of a run and as metadata of its LoRA.

`CoatReport` has a row for each group of linears; `shared_rows` are those on what all blocks share, from their plan.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8
from coat_core.linear.function import fp8_gemm_obstacle
from coat_core.linear.module import FP8TrainableLinear
from coat_core.ops.dispatch import replaced, triton_obstacle

from ..base.text import MB
from .decide import BlockPlan, flow_settings, saving_of
from .lora import DROPOUT
from .measure import MEASURED
from .models import READ_BLOCKS
from .sizes import block_bytes

OUTSIDE = "outside the blocks: kept in high precision"
UNASKED = "-"
QUANTIZED = "quantized by ai-toolkit"
OWN_PRODUCTS = "its own products, gradients by the dequantized weight"


class TableRow(NamedTuple):
    """One line of the table."""

    part: str  # a group of layers, or what the blocks share (GEMMs, kernels, attention, optimizer, ...)
    asked: str  # what the config asks for
    got: str  # what there is
    why: str = ""  # the reason, where they differ or where the config leaves the choice
    count: int = 0  # layers; 0 where none are counted
    measured: str = ""  # numbers of this run, for the table alone: equal runs have equal metadata


@dataclass
class CoatReport:
    """Result of `apply_coat`, by full module name; the first step fills in its own decisions."""

    asked: str = ""  # what the config asks of a linear of the blocks, in words
    converted: dict[str, Any] = field(default_factory=dict, repr=False)  # linears whose weight or GEMMs are FP8
    why: dict[str, str] = field(default_factory=dict)  # where a layer got less than the config asks for
    quantized: dict[str, str] = field(default_factory=dict)  # how ai-toolkit quantized linears its own way
    skipped: dict[str, str] = field(default_factory=dict)  # why linears are left in high precision
    shared: Callable[[], Iterable[TableRow]] = field(default=tuple, repr=False)  # rows on what the blocks share, now
    _added: dict[str, TableRow] = field(default_factory=dict, repr=False)

    def add_row(self, part: str, asked: str, got: str, why: str = "", measured: str = "") -> None:
        """Add or replace the row of a part unknown to `apply_coat`, such as the optimizer."""
        self._added[part] = TableRow(part, asked, got, why, 0, measured)

    def parts(self) -> list[TableRow]:
        """All rows of the table, as it is now; what is outside the blocks is one of them."""
        treated: list[tuple[str, str, str]] = []
        for name, module in self.converted.items():
            config = getattr(module, "coat_linear_config", None) or module.config
            stored = not isinstance(module, FP8TrainableLinear)
            got = describe_linear(config, stored, high_precision=name in self.why)
            treated.append((name, got, self.why.get(name, "")))
        for name, quantization in self.quantized.items():
            treated.append((name, f"W {quantization}, {OWN_PRODUCTS}", QUANTIZED))
        for name, reason in self.skipped.items():
            treated.append((name, "high precision", reason))
        counts: Counter[tuple[str, str, str]] = Counter()
        for name, got, why in treated:
            first, dot, _ = name.partition(".")
            counts[f"{first}.*" if dot else first, got, why] += 1
        rows, outside = [], {}
        for (part, got, why), count in counts.items():
            if why == OUTSIDE:
                outside[part] = count
            else:
                rows.append(TableRow(part, self.asked, got, why, count))
        if outside:
            why = f"{OUTSIDE} ({', '.join(outside)})"
            rows.append(TableRow("outside", UNASKED, "high precision", why, sum(outside.values())))
        return [*rows, *self.shared(), *self._added.values()]

    def table(self, width: int = 100, *, shared: bool = False) -> str:
        """The table in `width` columns: part, got, and in brackets what was asked where it differs, and why.

        With `shared` only what the first step decides.
        """
        rows = []
        for row in self.shared() if shared else self.parts():
            got, behind = row.got, []
            if got.startswith("as asked"):
                got = got.replace("as asked", row.asked, 1)
            elif row.asked not in (got, UNASKED):
                behind.append(f"asked: {row.asked}")
            behind += [text for text in (row.why, row.measured) if text]
            part = f"{row.part} ({row.count})" if row.count else row.part
            rows.append((part, f"{got} ({'; '.join(behind)})" if behind else got))
        left = max((len(part) for part, _ in rows), default=0) + 2
        lines = []
        for part, text in rows:
            first, *more = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
            lines.append(part.ljust(left) + first)
            lines += [" " * left + line for line in more]
        return "\n".join(lines)

    def metadata(self) -> dict[str, str]:
        """The current table, flat: `coat.asked.<part>`, `coat.got.<part>`, `coat.why.<part>`."""
        texts: dict[str, dict[str, None]] = {}
        for row in self.parts():
            part = row.part.removesuffix(".*").replace(" ", "_").lower()
            got = f"{row.count} x {row.got}" if row.count else row.got
            for key, text in (("asked", row.asked), ("got", got), ("why", row.why)):
                if text not in ("", UNASKED):
                    texts.setdefault(f"coat.{key}.{part}", {})[text] = None
        return {name: "; ".join(each) for name, each in texts.items()}


def describe_linear(linear: FP8LinearConfig, stored: bool, high_precision: bool) -> str:
    """Describe weight, forward input and backward gradient of a linear; `stored`: it holds codes."""
    weight = f"W {linear.weight_stored_as}" + ("" if stored else " cast at each use")
    if high_precision or not linear.use_fp8_gemm:
        return f"{weight}, high precision GEMM"
    return f"{weight}, x {linear.input_format}/{linear.input_granularity}, dy {linear.grad_format}"


# --- what all blocks share ---

NO_READER = "blocks without a reader"
NOT_REACHED = {"idle": "untouched, not called", "host": "untouched, in a checkpoint of the model's own"}
LATER = "decided at the first step"
DEQUANTIZED = "products of dequantized weights"


def shared_rows(plan: BlockPlan, device: torch.device, ran: Mapping[int, str], own: bool = False) -> list[TableRow]:
    """Return asked, got and why of what all blocks share, without measured numbers: equal runs have equal metadata.

    Args:
        ran: block index → how it ran, as `BlockRunner.ran`; empty before the first step.
        own: all linears multiply as ai-toolkit quantized them.
    """
    config = plan.config
    gemms = _gemms(plan, device)
    if own:
        gemms = gemms._replace(got=OWN_PRODUCTS, why=QUANTIZED)
    rows = [gemms, _kernels(plan, device), _saved(plan, ran), _attention(plan), _checkpointing(plan)]
    if plan.given.stream_bytes:
        rows.append(_streamed(plan))
    if config.weight.use_fp8 and config.activation.use_fp8 and not own:
        rows.append(_transposed(plan))
    rows.append(_execution(plan))
    return rows


def _kernels(plan: BlockPlan, device: torch.device) -> TableRow:
    speed = plan.config.speed
    obstacle: str | None = f"Triton kernels need a GPU, this is a {device.type}"
    if speed.kernels == "none":
        obstacle = "as configured: speed.kernels: none"
    elif device.type == "cuda":
        here = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        obstacle = triton_obstacle(here)
    if obstacle is not None:
        return TableRow("kernels", "Triton", "PyTorch reference", obstacle)
    reasons = {name.removeprefix("coat::"): why for name, why in replaced.items()}
    reasons |= dict.fromkeys(speed.kernels_left_out, "as configured")
    got = f"Triton, PyTorch reference for {', '.join(reasons)}" if reasons else "Triton"
    return TableRow("kernels", "Triton", got, "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def _gemms(plan: BlockPlan, device: torch.device) -> TableRow:
    config = plan.config
    if not config.activation.use_fp8:
        got = DEQUANTIZED if config.weight.use_fp8 else "products of the weights"
        return TableRow("GEMMs", "high precision", got, "activation.use_fp8: false")
    linear = config.linear_config()
    in_int8 = linear.input_format == INT8.name
    backward = "dequantized weights" if linear.grad_format == "bf16" else linear.grad_format
    asked = f"{'INT8' if in_int8 else 'FP8'}, forward {linear.input_format}, backward {backward}"
    obstacle, got = fp8_gemm_obstacle(device, linear), DEQUANTIZED
    if obstacle is not None:
        why = f"fallback: {obstacle}"
    elif plan.gemm == "bf16":
        why = "faster here, and at least as precise; see execution"
    elif device.type == "cpu":
        got = "int32 products of the INT8 codes" if in_int8 else "fp32 products of the FP8 codes"
        why = "a cpu: a GPU's values, not its speed"
    else:
        got = "int8_mm" if in_int8 else "torch._scaled_mm"
        why = f"a trial on {device} ran"
        obstacle = fp8_gemm_obstacle(device, FP8LinearConfig()) if in_int8 else None
        if obstacle is not None:
            why += f"; no FP8 products: {obstacle}"
    return TableRow("GEMMs", asked, got, why)


def _saved(plan: BlockPlan, ran: Mapping[int, str]) -> TableRow:
    activation = plan.config.activation
    if not activation.use_fp8:
        return TableRow("saved tensors", "high precision", "high precision", "activation.use_fp8: false")
    storage = saving_of(plan.config).tensors
    assert storage is not None
    stored = f"FP8 {storage.format} {storage.granularity.name}"
    asked = f"{stored}, {activation.flow} flow"
    if ran:
        got = "; ".join(f"{count} {what}" for what, count in treatments(plan, ran).items())
        obstacles = set()
        for name, choice in zip(plan.given.classes, plan.blocks, strict=True):
            if choice.obstacle and name in READ_BLOCKS:
                obstacles.add(f"{name}: {choice.obstacle}")
        return TableRow("saved tensors", asked, got, "; ".join(sorted(obstacles)))
    unfused = plan.given.unfused
    if activation.flow != "fused" or not unfused:
        return TableRow("saved tensors", asked, f"{LATER}, expected: as asked")
    got = f"{LATER}, expected: {stored}, generic flow"
    if len(unfused) < len(plan.blocks):
        got += f" in {len(unfused)} of {len(plan.blocks)} blocks"
    why = "; ".join(dict.fromkeys(unfused.values())) if _has_readers(plan) else NO_READER
    return TableRow("saved tensors", asked, got, why)


def _attention(plan: BlockPlan) -> TableRow:
    activation = plan.config.activation
    kept = activation.attention if activation.use_fp8 else "high precision"
    asked = f"q, k, v, out kept in {kept}"
    if plan.given.attention is None:
        kernel = LATER if _has_readers(plan) else "chosen by torch at each call"
        why = ""
    else:
        picked = plan.given.attention
        kernel, why = picked.name, MEASURED if picked.milliseconds else picked.why
    if kernel == "plain":
        why = "no fused kernel takes these tensors: backward runs it again"
    return TableRow("attention", asked, f"as asked; kernel {kernel}", why)


def _checkpointing(plan: BlockPlan) -> TableRow:
    memory = plan.config.memory
    asked = memory.checkpointing
    if memory.budget_gb is not None:
        asked += f" within {memory.budget_gb:g} GB"
    if plan.recomputed is None:
        return TableRow("checkpointing", asked, LATER)
    inputs = "FP8" if memory.enable_efficient_checkpoint else "high precision"
    got = f"{len(plan.recomputed)} of {len(plan.blocks)} blocks recompute from {inputs} inputs"
    why = ""
    if plan.checkpointing != memory.checkpointing:
        why = "train.gradient_checkpointing: false"
    elif plan.given.ran_out_with is not None:
        why = f"memory ran out with {plan.given.ran_out_with}"
    elif plan.checkpointing == "auto":
        why = "the fewest with which a step fits the budget"
    return TableRow("checkpointing", asked, got, why)


def _streamed(plan: BlockPlan) -> TableRow:
    asked = str(plan.config.memory.stream_blocks)
    if plan.given.tokens is None and asked == "auto":
        return TableRow("streamed weights", asked, LATER)
    got = "none"
    if plan.streamed:
        size = sum(plan.given.stream_bytes[i] for i in plan.streamed)
        got = f"{len(plan.streamed)} of {len(plan.blocks)} blocks, {size / 1e9:.2f} GB in CPU memory"
    return TableRow("streamed weights", asked, got, "takes least time of what fits" if asked == "auto" else "")


def _transposed(plan: BlockPlan) -> TableRow:
    mode, given = plan.config.memory.transposed_weights, plan.given
    got = f"{plan.transposed_bytes / 1e9:.2f} GB" if plan.transposed_bytes else "none"
    if given.tokens is None:
        got, why = LATER, ""
    elif given.device != "cuda":
        why = f"not needed on a {given.device}"
    elif not given.transposed_bytes:
        why = "not needed for such weights or products"
    elif mode != "auto":
        why = "as configured"
    elif given.without_copies:
        why = "memory ran out with them"
    elif plan.spare_bytes < 0:
        why = "blocks recompute or are streamed, or checkpointing is not auto"
    elif plan.transposed_bytes:
        why = "a step leaves room for them"
    else:
        why = "a step leaves no room for them"
    return TableRow("transposed weights", mode, got, why)


def _execution(plan: BlockPlan) -> TableRow:
    speed = plan.config.speed
    asked = f"CUDA graphs {speed.cuda_graphs}, measure {speed.measure}"
    given, readers = plan.given, _has_readers(plan)
    if given.tokens is None and readers and speed.measure != "never" and not given.quantized:
        return TableRow("execution", asked, LATER)
    got = "steps as CUDA graphs" if plan.captured else "eager"
    picked = given.picked
    if picked is not None:
        got = f"{picked.name} GEMM, {got}"
        why = MEASURED if picked.milliseconds else picked.why
    else:
        why = "as configured" if readers else f"as configured: {NO_READER}"
    if speed.cuda_graphs == "auto" and given.graph_obstacle:
        why = f"{why}; {given.graph_obstacle}"
    return TableRow("execution", asked, got, why)


def _has_readers(plan: BlockPlan) -> bool:
    return all(name in READ_BLOCKS for name in plan.given.classes)


# --- lines of the log ---


def auto_line(plan: BlockPlan) -> str:
    """One line: what `auto` chose by the sizes; empty where it did not."""
    given, free = plan.given, plan.free_bytes
    if given.tokens is None or given.recomputed is not None or free is None:
        return ""
    count, chosen = len(plan.blocks), []
    if plan.checkpointing == "auto":
        chosen.append(f"checkpointing auto: {len(plan.recomputed or ())} of {count} blocks recompute")
    if plan.config.memory.stream_blocks == "auto" and given.stream_bytes:
        chosen.append(f"stream_blocks auto: {len(plan.streamed)} of {count} blocks stream")
    if not chosen:
        return ""
    return f"{'; '.join(chosen)} ({plan.peak_bytes / 1e9:.2f} GB for a step, {free / 1e9:.2f} GB free for it)"


def dropout_line(plan: BlockPlan) -> str:
    """One line: what blocks with LoRA dropout keep for backward; empty without such blocks."""
    given = plan.given
    places = [i for i, why in given.unfused.items() if why == DROPOUT]
    if given.tokens is None or not places or plan.config.activation.flow != "fused":
        return ""
    sizes = []
    for fused in (False, True):
        with_it = replace(given, dropout=given.dropout and not fused)
        settings = flow_settings(plan.config, with_it, fused)
        kept = 0
        for i in places:
            kept += block_bytes(given.blocks[i], given.tokens, settings).kept
        sizes.append(f"{kept / MB:.2f} MB for backward")
    count = f"{len(places)} of {len(plan.blocks)}"
    text = f"network.dropout: {count} blocks take the generic flow, which keeps"
    return f"{text} {sizes[0]}; without dropout {sizes[1]}"


def treatments(plan: BlockPlan, ran: Mapping[int, str]) -> Counter[str]:
    """What the blocks do, in words → how many; `ran` as of `shared_rows`."""
    counts: Counter[str] = Counter()
    for i, choice in enumerate(plan.blocks):
        way = ran.get(i, "idle")
        if way in NOT_REACHED:
            words = NOT_REACHED[way]
        elif choice.recomputed:
            words = "recomputed"
        elif choice.saved is None:
            words = "kept in high precision"
        else:
            flow = "fused" if way == "fused" else "generic"
            words = f"kept in FP8, {flow} flow, attention {choice.saved.attention}"
        counts[words] += 1
    return counts
