"""Make every LoRA adapter keep its input as FP8, shared with the FP8 base linear that reads the same x.

Two hosts, two shapes of adapter:

* PEFT: a layer with `base_layer`, `lora_A` and `lora_B` (module dicts by adapter name), around the base linear;
* ai-toolkit: a module with `lora_down`, `lora_up` and `org_module` (a list), beside the base linear, whose forward it
  has replaced.

In both, base linear and down projection are called one after the other with the same x (the host may cast it between).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from coat_core.activation import FP8InputLinear
from coat_core.linear.function import input_granularity
from coat_core.linear.module import FP8Linear, FP8TrainableLinear

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)


@dataclass
class LoraReport:
    """Result of `attach_lora`, by adapter name.

    Attributes:
        shared: adapters that keep the FP8 x of their base linear.
        own: adapters that keep an FP8 x of their own (base not converted, dropout before the down projection, DoRA).
        skipped: name → reason.
    """

    shared: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """One line with the counts."""
        return (
            f"LoRA inputs in FP8: {len(self.shared)} shared with their base linear, {len(self.own)} of their own, "
            f"{len(self.skipped)} left in high precision"
        )


def attach_lora(root: nn.Module, config: COATConfig) -> LoraReport:
    """Convert the down projections of all adapters below `root`, in place.

    Args:
        root: a PEFT-wrapped model, or ai-toolkit's LoRA network.
        config: the `coat:` block; with `enabled` or `activation.use_fp8` off nothing is changed.

    Returns:
        LoraReport.

    Raises:
        ValueError: COAT is on and there is no adapter below `root`.
    """
    report = LoraReport()
    if not (config.enabled and config.activation.use_fp8):
        return report
    linear_config = config.linear_config()
    for name, down, base, sees_base_input in _adapters(root):
        if type(down) is not nn.Linear or down.bias is not None:
            report.skipped[name] = f"its down projection is a {type(down).__name__}"
            continue
        shares = sees_base_input and _hands_over_input(base)
        FP8InputLinear.from_linear(
            down, linear_config.input_format, input_granularity(linear_config), base if shares else None
        )
        (report.shared if shares else report.own).append(name)
    if not (report.shared or report.own or report.skipped):
        raise ValueError(f"{type(root).__name__}: no LoRA adapter found; attach after the LoRA network is made")
    logger.info(report.summary())
    return report


def _hands_over_input(base: Any) -> bool:
    return isinstance(base, FP8Linear | FP8TrainableLinear) or hasattr(base, "coat_linear_config")


def _adapters(root: nn.Module) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield (name, down projection, base linear, whether it reads the base linear's very input)."""
    for name, module in root.named_modules():
        layer: Any = module
        if hasattr(layer, "base_layer") and isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
            for adapter, down in layer.lora_A.items():
                dropout = layer.lora_dropout[adapter] if adapter in layer.lora_dropout else nn.Identity()
                vanilla = adapter not in layer.lora_variant  # DoRA and others call the down projection on other inputs
                yield f"{name}.{adapter}", down, layer.base_layer, vanilla and isinstance(dropout, nn.Identity)
        elif hasattr(layer, "lora_down") and hasattr(layer, "org_module"):
            yield name, layer.lora_down, layer.org_module[0], True
