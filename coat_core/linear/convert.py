"""Convert the linear layers of a model to FP8 and back, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from coat_core.config import FP8LinearConfig
from coat_core.linear.module import FP8Linear, FP8TrainableLinear, obstacle_to_conversion

logger = logging.getLogger(__name__)

ADAPTER_PARTS = {"lora_A", "lora_B", "lora_down", "lora_up"}  # module names of PEFT and of ai-toolkit


@dataclass
class ConversionReport:
    """Layers converted and skipped, by full module name."""

    converted: list[str] = field(default_factory=list)  # names of the layers that are FP8 now
    skipped: dict[str, str] = field(default_factory=dict)  # name → reason, for the linear layers that are not

    def summary(self) -> str:
        """One line: counts, and the reasons with their counts."""
        reasons: dict[str, int] = {}
        for reason in self.skipped.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        listed = "; ".join(f"{count} left: {reason}" for reason, count in reasons.items())
        return f"{len(self.converted)} linear layers in FP8" + (f"; {listed}" if listed else "")


def replace_linear_with_fp8(
    model: nn.Module,
    config: FP8LinearConfig | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    trainable: bool = False,
) -> nn.Module:
    """Convert nn.Linear layers to FP8Linear in place, the model itself too if it is one; returns the model.

    `filter_fn(module, full_name)` returning False leaves a layer alone. `trainable` keeps high precision weights and
    trains them (`FP8TrainableLinear`). Converted and skipped layers are logged, and in `model.fp8_report`.
    """
    target = FP8TrainableLinear if trainable else FP8Linear
    report = ConversionReport()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if isinstance(module, (FP8Linear, FP8TrainableLinear)):
            report.skipped[name] = "already FP8"
        elif not ADAPTER_PARTS.isdisjoint(name.split(".")):
            report.skipped[name] = "a LoRA matrix: never quantized"
        elif filter_fn is not None and not filter_fn(module, name):
            report.skipped[name] = "excluded by the filter"
        elif type(module) is not nn.Linear:
            report.skipped[name] = f"a subclass of nn.Linear ({type(module).__name__})"
        elif (reason := obstacle_to_conversion(module)) is not None:
            report.skipped[name] = reason
        else:
            target.from_linear(module, config)
            report.converted.append(name)
    model.fp8_report = report  # type: ignore[assignment]
    logger.info("%s: %s", type(model).__name__, report.summary())
    return model


def restore_linear(model: nn.Module) -> nn.Module:
    """Convert every FP8 linear back to nn.Linear in place; frozen ones get their dequantized weight."""
    for module in model.modules():
        if isinstance(module, (FP8Linear, FP8TrainableLinear)):
            module.to_linear()
    return model
