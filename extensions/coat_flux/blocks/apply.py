"""Turn a diffusion transformer into a COAT one: FP8 weights, FP8 GEMMs, FP8 saved tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coat_core.activation import keep_no_input
from coat_core.config import FP8LinearConfig
from coat_core.linear.function import CODES, StoredWeight, fp8_gemm_obstacle
from coat_core.linear.module import FP8Linear, FP8TrainableLinear, fit_to_diffusers, obstacle_to_conversion
from coat_core.ops.dispatch import use_kernels

from ..base.errors import UserError
from ..config.coat import AUTO, COATConfig
from ..config.findings import ConfigError
from .cast_loss import note_weight
from .formats import config_for
from .gemms import high_precision_reason
from .measure import MEASURED
from .models import Family, family_of, matches
from .models.encodings import keeps_codes
from .proving import prove_step
from .quantized import adopt, quantization_of
from .report import OUTSIDE, CoatReport, describe_linear, shared_rows
from .runner import BlockRunner
from .streaming import codes_to_host, unpark

logger = logging.getLogger(__name__)


class FallbackError(UserError, RuntimeError):
    """`fallback: error`, and FP8 cannot be used for a layer or on this device."""


def apply_coat(
    model: nn.Module,
    config: COATConfig,
    *,
    allow_recompute: bool = True,
    device: torch.device | str | None = None,
    trained: Collection[str] = (),
) -> CoatReport:
    """Convert a diffusion transformer's linears and take over what its blocks save for backward, in place.

    `model` is a transformer or UNet, not yet wrapped by PEFT. Linears that a trainer quantized with our backend
    (attribute `coat_linear_config`) are configured; those it quantized its own way are left alone.
    `allow_recompute=False` (the job's `train.gradient_checkpointing: false`) forbids recomputation. `trained`
    names linears whose weights are trained without an adapter: those with FP8 GEMMs are cast at each use.

    ConfigError if an include/exclude pattern matches no layer; ValueError if `memory.checkpointing` asks for
    recomputation that the job forbids, or the model has no blocks; FallbackError with `fallback: error` if
    FP8 cannot be used on this device.
    """
    report = CoatReport()
    if not config.enabled:
        return report
    wrapped = next((name for name, module in model.named_modules() if hasattr(module, "base_layer")), None)
    if wrapped is not None:
        raise ValueError(
            f"{wrapped}: already has an adapter; call apply_coat before adding the LoRA, attach_lora after"
        )
    family = family_of(model)
    run_device = torch.device(device) if device is not None else next(model.parameters()).device
    config = config_for(run_device, config)
    use_kernels(config.speed.kernels, config.speed.kernels_left_out)
    if config.speed.kernels == "auto":
        prove_step()
    if (picked := config.chosen) is not None:
        numbers = [f"{name} {ms:.2f} ms" for name, ms in picked.milliseconds.items()]
        numbers += [f"{name}: {reason}" for name, reason in picked.refused.items()]
        why = MEASURED if picked.milliseconds else picked.why
        report.add_row("weights", AUTO, picked.name, why, "; ".join(numbers))
    stored = config.weight.use_fp8 and not trained
    multiplies = config.activation.use_fp8
    report.asked = "W and GEMMs in high precision"
    if stored or multiplies:
        report.asked = describe_linear(config.linear_config(), stored, not multiplies)
    _check_patterns(model, config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            _convert_one(name, module, config, family, run_device, report, name in trained)
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            report.skipped[name] = f"a {type(module).__name__}: only linear layers become FP8"
            if config.activation.use_fp8:
                keep_no_input(module)
    _check_fallback(report, config)
    fit_to_diffusers(model, on_meta=device is not None)
    for module in model.modules():
        unpark(module)
    runner = BlockRunner.install(model, family.blocks, config, allow_recompute, run_device)
    for module in model.modules() if config.memory.stream_blocks != 0 else ():
        if CODES in module._buffers and "fetch_weight" not in vars(module):  # outside the streamed blocks
            module.to(run_device)
    own = bool(report.quantized) and not report.converted
    report.shared = lambda: shared_rows(runner.plan, run_device, runner.ran, own)
    logger.info(
        "%s: %d linears converted, %d as ai-toolkit quantized them, %d layers left",
        type(model).__name__,
        len(report.converted),
        len(report.quantized),
        len(report.skipped),
    )
    return report


def convert_weights(
    model: nn.Module, config: COATConfig, device: torch.device, trained: Collection[str] = ()
) -> Callable[[str, nn.Module, StoredWeight | None], None] | None:
    """A converter (name, linear, codes) that quantizes weights one by one while a model loads; None if none are stored.

    Codes that the file has are used unchanged where ours have their format and granularity.
    The weights of `model` may be on the meta device. `apply_coat` later recognizes and configures the converted
    linears. ConfigError if an include/exclude pattern matches no layer.
    """
    if not (config.enabled and config.weight.use_fp8):
        return None
    _check_patterns(model, config)
    config, family = config_for(device, config), family_of(model)

    def convert(name: str, module: nn.Module, codes: StoredWeight | None = None) -> None:
        if isinstance(module, nn.Linear):
            _convert_one(name, module, config, family, device, CoatReport(), name in trained, codes)

    return convert


def _check_patterns(model: nn.Module, config: COATConfig) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for key in ("include", "exclude"):
        for pattern in getattr(config.activation, key):
            if not any(matches(name, (pattern,)) for name in names):
                raise ConfigError(
                    f"coat.activation.{key}: {pattern!r} matches no linear layer of {type(model).__name__}; "
                    f"patterns are matched against full names such as {names[-1]!r}"
                )


def _convert_one(
    name: str,
    module: Any,
    config: COATConfig,
    family: Family,
    device: torch.device,
    report: CoatReport,
    trained: bool,
    codes: StoredWeight | None = None,
) -> None:
    linear_config = config.linear_config()
    why = high_precision_reason(name, config, family)
    if why:
        linear_config = replace(linear_config, use_fp8_gemm=False)
    elif (obstacle := fp8_gemm_obstacle(device, linear_config)) is not None:
        why = f"fallback: {obstacle}"
    if isinstance(module, FP8TrainableLinear):
        module.config = linear_config
    elif isinstance(module, FP8Linear):
        _check_stored(name, module.config, linear_config)
        module.config = linear_config
    elif hasattr(module, "coat_linear_config"):
        _check_stored(name, module.coat_linear_config, linear_config)
        module.coat_linear_config = linear_config
    elif (quantization := quantization_of(module)) is not None:
        report.quantized[name] = quantization
        if matches(name, family.convert):
            adopt(module, linear_config)
        return
    elif not matches(name, family.convert):
        report.skipped[name] = next((why for key, why in family.left.items() if matches(name, (key,))), OUTSIDE)
        return
    elif type(module) is not nn.Linear:
        report.skipped[name] = f"fallback: a {type(module).__name__}, not a plain nn.Linear"
        return
    elif (reason := obstacle_to_conversion(module)) is not None:
        report.skipped[name] = f"fallback: {reason}"
        return
    elif trained and not linear_config.use_fp8_gemm:
        report.skipped[name] = f"trained; {why}"
        return
    elif config.weight.use_fp8 and not trained:
        # quantized where it will run: fast, and the high precision model is never whole on a GPU
        weight = module.to(device).weight
        codes = _as_configured(codes, linear_config, device)
        FP8Linear.from_linear(module, linear_config, codes)
        note_weight(module, weight if codes is None else codes.dequantize(), linear_config)
        if config.memory.stream_blocks != 0:
            codes_to_host(module)
    elif linear_config.use_fp8_gemm:
        FP8TrainableLinear.from_linear(module, linear_config)
    else:
        report.skipped[name] = f"weight.use_fp8: false; {why}"
        return
    report.converted[name] = module
    if why:
        report.why[name] = why


def _as_configured(codes: StoredWeight | None, config: FP8LinearConfig, device: torch.device) -> StoredWeight | None:
    """A file's E4M3 codes on `device`, with scales as the configuration asks for; None where it asks for others."""
    if codes is None or not keeps_codes(config, row_scales=codes.scale.ndim > 0):
        return None
    scale = codes.scale.to(device)
    if config.weight_has_row_scales:
        scale = scale.expand(len(codes.codes), 1).contiguous()
    return StoredWeight(codes.codes.to(device, copy=True), scale)


def _check_stored(name: str, stored: FP8LinearConfig, asked: FP8LinearConfig) -> None:
    """Check the stored format: another one would misread the codes."""
    for key in ("weight_format", "weight_granularity"):
        held, wanted = getattr(stored, key), getattr(asked, key)
        if held != wanted:
            raise ValueError(
                f"coat.{key.replace('_', '.')}={wanted!r}: {name} is already stored as {held!r}; "
                "load the model again, or convert it back with coat_core.restore_linear first"
            )


def _check_fallback(report: CoatReport, config: COATConfig) -> None:
    reasons = {**report.why, **report.skipped}
    failed = {name: why for name, why in reasons.items() if why.startswith("fallback: ")}
    if failed and config.fallback == "error":
        name, why = next(iter(failed.items()))
        raise FallbackError(
            f"coat.fallback='error': {len(failed)} layers cannot be FP8 (first {name}: "
            f"{why.removeprefix('fallback: ')}); set coat.fallback: bf16 or change coat.activation / coat.weight"
        )
    if failed:
        logger.warning("%d layers stay in high precision: %s", len(failed), next(iter(failed.values())))
