"""What options of the `coat:` block exclude each other, or have no effect together; `config` is a COATConfig."""

from __future__ import annotations

from typing import Any

from .findings import Findings, closest
from .options import FORMATS, INT8

RESUME_PARTS = ("data", "seed", "world_size")  # of a run's identity that a resume may change where `allow` names it


def check_combinations(config: Any, path: str, findings: Findings) -> None:
    """Refuse options that the user wrote and that would have no effect with the others."""
    memory = f"{path}.memory"
    mode = config.memory.checkpointing
    if config.memory.budget_gb is not None and mode != "auto":
        rule = f"only used with checkpointing: auto, which is {mode}; write null or checkpointing: auto"
        findings.add(f"{memory}.budget_gb", rule, config.memory.budget_gb)
    if config.memory.stream_blocks != 0 and not config.weight.use_fp8:
        rule = "streams FP8 codes, and weight.use_fp8 is false; write stream_blocks: 0 or use_fp8: true"
        findings.add(f"{memory}.stream_blocks", rule, config.memory.stream_blocks)
    if config.memory.stream_blocks != 0 and config.memory.transposed_weights == "always":
        rule = "copies of weights stay on the GPU, which stream_blocks is to spare; write auto, or stream_blocks: 0"
        findings.add(f"{memory}.transposed_weights", rule, "always")
    expansion = f"{path}.optimizer.use_dynamic_range_expansion"
    optimizer = config.optimizer
    if expansion in findings.given and optimizer.use_dynamic_range_expansion and not optimizer.has_fp8_moment:
        rule = f"expands blocks of e4m3 and e5m2, not of {optimizer.m1_format} and {optimizer.m2_format}; remove it"
        findings.add(expansion, rule, True)
    _check_stored(config, path, findings)
    _check_int8(config, path, findings)
    _check_products(config, path, findings)
    if config.activation.min_sqnr_db is not None and not config.activation.use_fp8:
        rule = "only used with activation.use_fp8: true; write null or use_fp8: true"
        findings.add(f"{path}.activation.min_sqnr_db", rule, config.activation.min_sqnr_db)
    wgrad = config.activation.wgrad_format
    if wgrad != "bf16" and config.weight.format == INT8:
        findings.add(f"{path}.activation.wgrad_format", "is not for int8; write bf16, or inputs in e4m3", wgrad)
    for part in config.resume.allow:
        if part not in RESUME_PARTS:
            near = closest(part, RESUME_PARTS)
            remedy = f"did you mean '{near}'?" if near else f"write {RESUME_PARTS[0]}, for example"
            findings.add(f"{path}.resume.allow", f"each must be one of {', '.join(RESUME_PARTS)}; {remedy}", part)


def _check_stored(config: Any, path: str, findings: Findings) -> None:
    """Refuse what has no effect on, or no meaning with, a weight in fewer than 8 bits."""
    weight = config.weight
    if weight.format in FORMATS:
        return
    if not weight.use_fp8:
        rule = "is how weights are stored, and weight.use_fp8: false stores none; write e4m3, or weight.use_fp8: true"
        findings.add(f"{path}.weight.format", rule, weight.format)
    if weight.granularity == "per_row" and weight.format != INT8:
        rule = f"is for e4m3 and e5m2; {weight.format} has a scale for each 16 numbers; remove it"
        findings.add(f"{path}.weight.granularity", rule, weight.granularity)
    if config.memory.transposed_weights == "always" and weight.format != INT8:
        rule = f"weights in {weight.format} are decoded to either layout, there is nothing to copy; write auto or never"
        findings.add(f"{path}.memory.transposed_weights", rule, "always")


def _check_int8(config: Any, path: str, findings: Findings) -> None:
    """INT8 comes on both sides of a product, one scale per row."""
    weight, activation, given = config.weight, config.activation, findings.given
    stored, key = weight.format == INT8, f"{path}.activation"
    if not activation.use_fp8:
        return
    if stored != (activation.format == INT8):
        rule = "weights in int8 multiply inputs in int8; write int8, or weight.format: e4m3"
        other = f"is for weights in int8, and weight.format is {weight.format}; write int8 there too, or e4m3"
        findings.add(f"{key}.format", rule if stored else other, activation.format)
    if stored and activation.grad_format in FORMATS and f"{key}.grad_format" in given:
        rule = "weights in int8 multiply gradients in int8 or bf16; write one of them"
        findings.add(f"{key}.grad_format", rule, activation.grad_format)
    if not stored and activation.grad_format == INT8:
        rule = f"is for weights in int8, and weight.format is {weight.format}; write e5m2, e4m3 or bf16"
        findings.add(f"{key}.grad_format", rule, INT8)
    if stored and activation.linear_granularity != "per_row":
        rule = "int8 has one scale per row; write per_row"
        findings.add(f"{key}.linear_granularity", rule, activation.linear_granularity)
    if stored and weight.granularity == "per_tensor" and f"{path}.weight.granularity" in given:
        findings.add(f"{path}.weight.granularity", "int8 has one scale per row; remove it", weight.granularity)


def _check_products(config: Any, path: str, findings: Findings) -> None:
    """Refuse e5m2 × e5m2, which no GPU multiplies."""
    activation = config.activation
    if config.weight.format != "e5m2" or not activation.use_fp8:
        return
    written = {"format": activation.format, "grad_format": activation.grad_format}
    others = [key for key, value in written.items() if value == "e5m2"]
    if others:
        keys = " and ".join(f"activation.{key}" for key in others)
        remedy = f"write e4m3, or {keys}: e4m3"
        rule = f"no GPU multiplies e5m2 by e5m2, and {keys} {'is' if len(others) == 1 else 'are'} e5m2 too; {remedy}"
        findings.add(f"{path}.weight.format", rule, config.weight.format)
