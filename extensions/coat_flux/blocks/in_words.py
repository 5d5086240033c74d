"""What a plan of blocks does, in words: the rows of the start table that they share, and lines of the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8
from coat_core.linear.function import fp8_gemm_obstacle
from coat_core.ops.dispatch import triton_obstacle

from .block_bytes import block_bytes, read_blocks, shown_by
from .decide import BlockChoice, BlockPlan, Given, block_settings, packing_of
from .described import Block
from .lookup import READ_BLOCKS
from .report import OWN_PRODUCTS, QUANTIZED, TableRow
from .sizes import Tokens

if TYPE_CHECKING:
    from ..config.coat import COATConfig

NO_READER = "blocks without a reader"
GENERIC = "generic flow in place of the fused one, which keeps less"
NOT_REACHED = {"idle": "untouched, not called", "host": "untouched, in a checkpoint of the model's own"}
LATER = "decided at the first step"
DEQUANTIZED = "products of dequantized weights"


def shared_rows(
    plan: BlockPlan, config: COATConfig, device: torch.device, ran: Mapping[int, str], own: bool = False
) -> list[TableRow]:
    """Return asked, got and why of what all blocks share, without measured numbers: equal runs have equal metadata."""
    gemms, saved = _gemms(plan, config, device), _saved(plan, config, ran)
    gemms = gemms._replace(got=OWN_PRODUCTS, why=QUANTIZED) if own else gemms
    rows = [gemms, _kernels(device), saved, _attention(plan, config), _checkpointing(plan, config)]
    if plan.given.stream_bytes:
        rows.append(_streamed(plan, config))
    if config.weight.use_fp8 and config.activation.use_fp8 and not own:
        rows.append(_transposed(plan, config))
    rows.append(_execution(plan, config))
    return rows


def checkpointing_line(plan: BlockPlan, config: COATConfig) -> str:
    """One line: what is recomputed, how kept blocks store what they save."""
    stored = f"{_stored(config)}, attention {config.activation.attention}"
    flow = "fused" if config.activation.flow == "fused" and set(plan.given.classes) & READ_BLOCKS.keys() else "generic"
    kept = f"kept blocks save {stored}, {flow} flow" if config.activation.use_fp8 else "kept blocks save high precision"
    if plan.recomputed is None:
        recomputed = f"recomputed blocks keep {_inputs(config)} inputs"
        return f"checkpointing auto (chosen at the first step); {kept}; {recomputed}"
    count = f"{len(plan.recomputed)} of {len(plan.blocks)} blocks recompute from {_inputs(config)} inputs"
    return f"checkpointing {plan.checkpointing}: {count}; {kept}"


def execution_line(plan: BlockPlan, config: COATConfig, device: torch.device) -> str:
    """One line: whether the GEMMs' scaling is as configured, or is picked at the first step."""
    measures = plan.given.picks_later and (device.type == "cuda" or config.speed.measure == "always")
    when = "picked by measurement at the first step" if measures else "as configured"
    return f"execution: {when} (speed.measure: {config.speed.measure})"


def auto_line(plan: BlockPlan, config: COATConfig) -> str:
    """One line: what `auto` chose by the sizes; empty where it did not."""
    given, free = plan.given, plan.free_bytes
    if given.tokens is None or given.recomputed is not None or free is None:
        return ""
    count, chosen = len(plan.blocks), []
    if plan.checkpointing == "auto":
        chosen.append(f"checkpointing auto: {len(plan.recomputed or ())} of {count} blocks recompute")
    if config.memory.stream_blocks == "auto" and given.stream_bytes:
        chosen.append(f"stream_blocks auto: {len(plan.streamed)} of {count} blocks stream")
    sizes = f" ({plan.peak_bytes / 1e9:.2f} GB for a step, {free / 1e9:.2f} GB free for it)"
    return "; ".join(chosen) + sizes if chosen else ""


def treatments(plan: BlockPlan, ran: Mapping[int, str] | None = None) -> Counter[str]:
    """What the blocks do, in words → how many; `ran` as of `shared_rows`, None for what is planned."""
    ran = dict(enumerate(choice.flow for choice in plan.blocks)) if ran is None else ran
    return Counter(_treatment(plan, choice, ran.get(i, "idle")) for i, choice in enumerate(plan.blocks))


def generic_cost(config: COATConfig, given: Given, block: nn.Module, args: tuple[Any, ...]) -> str:
    """What the generic flow saves of a block instead of the fused one; empty if unknown."""
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return ""
    (described,) = read_blocks([block], args, 0)
    if not isinstance(described, Block):
        return ""
    tokens = Tokens(len(args[0]), args[1].shape[1], args[0].shape[1])
    given = replace(given, blocks=(described,), tokens=tokens, unfused={}, **shown_by(args))
    kept = [block_bytes(described, tokens, block_settings(config, given, fused=x)[0]).kept for x in (False, True)]
    generic, fused = (size / (tokens.rows * described.hidden) for size in kept)
    return (
        f"; such a block keeps {kept[0] / 1e6:.2f} MB instead of {kept[1] / 1e6:.2f} MB "
        f"({generic:.1f} instead of {fused:.1f} bytes per token and channel)"
    )


def _treatment(plan: BlockPlan, choice: BlockChoice, way: str) -> str:
    if way in NOT_REACHED:
        return NOT_REACHED[way]
    if choice.recomputed:
        return "recomputed"
    if choice.saved is None:
        return "kept in high precision"
    flow = "fused" if way == "fused" else "generic"
    return f"kept in FP8, {flow} flow, attention {choice.saved.attention}"


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
    kind = "INT8" if linear.input_format == INT8.name else "FP8"
    asked = f"{kind}, forward {linear.input_format}, backward {backward}"
    obstacle = fp8_gemm_obstacle(device, linear)
    if obstacle is not None:
        return TableRow("GEMMs", asked, DEQUANTIZED, f"fallback: {obstacle}")
    if plan.gemm == "bf16":
        return TableRow("GEMMs", asked, DEQUANTIZED, "faster here, and at least as precise; see execution")
    if device.type == "cpu":
        got = f"{'int32' if kind == 'INT8' else 'fp32'} products of the {kind} codes"
        return TableRow("GEMMs", asked, got, "a cpu: a GPU's values, not its speed")
    ran, lacks = f"a trial on {device} ran", fp8_gemm_obstacle(device, FP8LinearConfig()) if kind == "INT8" else None
    why = ran if lacks is None else f"{ran}; no FP8 products: {lacks}"
    return TableRow("GEMMs", asked, "int8_mm" if kind == "INT8" else "torch._scaled_mm", why)


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
    return TableRow("saved tensors", asked, got, "; ".join(sorted(obstacles)))


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
    asked = memory.checkpointing + ("" if memory.budget_gb is None else f" within {memory.budget_gb:g} GB")
    if plan.recomputed is None:
        return TableRow("checkpointing", asked, LATER)
    got = f"{len(plan.recomputed)} of {len(plan.blocks)} blocks recompute from {_inputs(config)} inputs"
    why = "the fewest with which a step fits the budget" if plan.checkpointing == "auto" else ""
    if given.ran_out_with is not None:
        why = f"memory ran out with {given.ran_out_with}"
    if plan.checkpointing != memory.checkpointing:
        why = "train.gradient_checkpointing: false"
    return TableRow("checkpointing", asked, got, why)


def _streamed(plan: BlockPlan, config: COATConfig) -> TableRow:
    asked, chosen = str(config.memory.stream_blocks), plan.streamed
    if plan.given.tokens is None and asked == "auto":
        return TableRow("streamed weights", asked, LATER)
    size = sum(plan.given.stream_bytes[i] for i in chosen)
    got = f"{len(chosen)} of {len(plan.blocks)} blocks, {size / 1e9:.2f} GB in host memory" if chosen else "none"
    return TableRow("streamed weights", asked, got, "takes least time of what fits" if asked == "auto" else "")


def _transposed(plan: BlockPlan, config: COATConfig) -> TableRow:
    mode, given = config.memory.transposed_weights, plan.given
    got = f"{plan.transposed_bytes / 1e9:.2f} GB" if plan.copies else "none"
    if given.tokens is None:
        got, why = LATER, ""
    elif given.device != "cuda" or not given.transposed_bytes:
        why = "not needed " + (f"on a {given.device}" if given.device != "cuda" else "for such weights or products")
    elif mode != "auto":
        why = "as configured"
    elif given.without_copies:
        why = "memory ran out with them"
    elif plan.spare_bytes < 0:
        why = "blocks recompute or are streamed, or checkpointing is not auto"
    else:
        why = "a step leaves room for them" if plan.copies else "a step leaves no room for them"
    return TableRow("transposed weights", mode, got, why)


def _execution(plan: BlockPlan, config: COATConfig) -> TableRow:
    asked = f"CUDA graphs {config.speed.cuda_graphs}, measure {config.speed.measure}"
    if plan.given.picks_later:
        return TableRow("execution", asked, LATER)
    picked, readers = plan.given.picked, _has_readers(plan)
    gemm = "" if picked is None else f"{picked.gemm} GEMM, "
    why = "as configured" if readers else f"as configured: {NO_READER}"
    if picked is not None:
        why = "the fastest of those that were measured" if picked.milliseconds else picked.why
    if config.speed.cuda_graphs == "auto" and plan.given.graph_obstacle:
        why = f"{why}; {plan.given.graph_obstacle}"
    return TableRow("execution", asked, f"{gemm}{'steps as CUDA graphs' if plan.captured else 'eager'}", why)
