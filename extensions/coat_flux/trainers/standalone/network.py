"""The LoRA network of the stand-alone engine: PEFT adapters on the same linears ai-toolkit chooses.

As ai-toolkit's: alpha = rank, fp32 parameters, A uniform in ±1/sqrt(K) and B = 0. A is drawn from the run's seed, so
bf16 and COAT runs start bit-identical.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from peft import LoraConfig
from torch import nn

from ...blocks.models import KEY_PREFIX, target_names
from ...config.findings import ConfigError
from .seeding import Stream, generator_for

__all__ = ["add_lora", "lora_parameters", "lora_targets"]

ADAPTER = "default"


def lora_targets(
    model: nn.Module,
    *,
    only_if_contains: Sequence[str] | None = None,
    ignore_if_contains: Sequence[str] | None = None,
    transformer_only: bool = True,
) -> list[str]:
    """Full names of the linears that get an adapter, in module order, by the rule of `coat_flux.blocks.models`.

    Raises:
        ConfigError: nothing is left to train.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = target_names(linears, transformer_only=transformer_only)
    chosen = target_names(
        names,
        only_if_contains=only_if_contains,
        ignore_if_contains=ignore_if_contains,
        transformer_only=transformer_only,
    )
    if not chosen:
        raise ConfigError(
            f"network.network_kwargs: only_if_contains={only_if_contains}, ignore_if_contains={ignore_if_contains}: "
            f"none of the model's {len(names)} linears is left to train; a name looks like {KEY_PREFIX}{names[0]}"
        )
    return chosen


def add_lora(model: nn.Module, targets: Sequence[str], rank: int, *, seed: int, dropout: float = 0.0) -> None:
    """Add PEFT adapters (alpha is `rank`) to the named linears, A drawn from `seed`; only they require gradients."""
    model.requires_grad_(False)
    exactly = "|".join(map(re.escape, targets))  # PEFT matches a list as suffixes: proj_out would be every block's, too
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, lora_dropout=dropout, target_modules=exactly), ADAPTER)
    generator = generator_for(seed, Stream.LORA_INIT, 0)
    for name, param in lora_parameters(model).items():
        param.data = param.data.to(torch.float32)
        if ".lora_A." in name:
            start = torch.empty(param.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            param.data.copy_(start)
        else:
            param.data.zero_()


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Adapter parameters by their saved names, `transformer.<module>.lora_A.weight`."""
    return {
        KEY_PREFIX + name.replace(f".{ADAPTER}.", "."): param
        for name, param in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
