"""Asked, got and why of what all blocks share: GEMMs, kernels, saved tensors, attention, recomputation, path.

Made anew whenever they are read: before the first step they say what it will decide, after it what it did. They hold no
measured number, so that runs that are the same have the same metadata; the log has those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coat_core.kernels.dispatch import triton_obstacle
from coat_core.linear.function import fp8_gemm_obstacle

from .report import Row

if TYPE_CHECKING:
    from ..config.coat import COATConfig
    from .runner import BlockPolicy

__all__ = ["shared_rows"]

LATER = "decided at the first step"
DEQUANTIZED = "products of dequantized weights"


def shared_rows(policy: BlockPolicy, config: COATConfig, device: torch.device) -> list[Row]:
    """Return the rows.

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
