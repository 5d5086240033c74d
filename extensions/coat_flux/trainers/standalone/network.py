"""What a run trains under ai-toolkit's rules: PEFT adapters on the linears it chooses, and their moving average.

As ai-toolkit's: alpha = rank, fp32 parameters, A uniform in ±1/sqrt(K) and B = 0. A is drawn from the run's seed, so
bf16 and COAT runs start bit-identical. Training continues on the raw parameters, and the average is saved and sampled;
a resume has both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from peft import LoraConfig
from torch import Tensor, nn

from coat_core.optim.sharded import local_values

from ...base.rng import Stream, mixed_seed
from ...blocks.lora import LokrLinear
from ...blocks.models import KEY_PREFIX, target_names
from ...config.findings import ConfigError
from ...config.job_sections import EMASection, NetworkKwargs, NetworkSection

ADAPTER = "default"
FEEDBACK = 10.0  # times the average's own step, as in ai-toolkit


def lora_targets(model: nn.Module, network: NetworkSection) -> list[str]:
    """Full names of the linears that get an adapter, in module order; ConfigError if nothing is left to train."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = target_names(linears, network)
    if not chosen:
        words = network.network_kwargs
        names = target_names(linears, replace(network, network_kwargs=NetworkKwargs()))
        raise ConfigError(
            f"network.network_kwargs: only_if_contains={words.only_if_contains}, "
            f"ignore_if_contains={words.ignore_if_contains}: none of the model's {len(names)} linears is left to "
            f"train; a name looks like {KEY_PREFIX}{names[0]}"
        )
    return chosen


def add_lora(model: nn.Module, network: NetworkSection, seed: int) -> dict[str, nn.Parameter]:
    """Add PEFT adapters or LoKrs, drawn from `seed`, which alone require gradients; returns their `lora_parameters`."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(mixed_seed(seed, Stream.LORA_INIT, 0))
    if network.type == "lokr":
        device = next(model.parameters()).device
        for name in lora_targets(model, network):
            linear = model.get_submodule(name)
            lokr = LokrLinear(linear, network.lokr_factor, network.lokr_rank, device, generator)
            model.set_submodule(name, lokr)
        return lora_parameters(model)
    # PEFT matches a list as suffixes: proj_out would be every block's, too
    targets = "|".join(map(re.escape, lora_targets(model, network)))
    rank = network.linear
    config = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=network.dropout or 0.0, target_modules=targets)
    model.add_adapter(config, ADAPTER)
    params = lora_parameters(model)
    for name, param in params.items():
        start = torch.zeros(param.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        param.data = start.to(param.device)
    return params


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Adapter parameters by their saved names, `transformer.<module>.lora_A.weight` or `.lokr_w1`."""
    return {
        KEY_PREFIX + name.replace(f".{ADAPTER}.", "."): param
        for name, param in model.named_parameters()
        if any(mark in name for mark in (".lora_A.", ".lora_B.", ".lokr_w"))
    }


class LoraEMA:
    """shadow ← decay · shadow + (1 - decay) · parameter; `shadow` has the averages by name, in fp32.

    After an update, `options.use_feedback` moves each parameter by 10 · (1 - decay) · (shadow - parameter), and
    `options.param_multiplier` multiplies it.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], options: EMASection):
        self._options = options
        self.shadow = {name: param.detach().float().clone() for name, param in params.items()}
        self._params = [local_values(param.detach()) for param in params.values()]
        self._averages = [local_values(average) for average in self.shadow.values()]

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Update the average after an optimizer step, unless `found_inf`, fp32 [] on the device, is 1."""
        options = self._options
        deltas = torch._foreach_sub(self._averages, [param.float() for param in self._params])
        torch._foreach_mul_(deltas, 1.0 - options.ema_decay)
        multiplier: float | Tensor = options.param_multiplier
        if found_inf is not None:
            torch._foreach_mul_(deltas, 1 - found_inf)
            multiplier = torch.where(found_inf > 0, 1.0, options.param_multiplier)
        torch._foreach_sub_(self._averages, deltas)
        if options.use_feedback:
            moves = [delta.to(param.dtype) for delta, param in zip(deltas, self._params, strict=True)]
            torch._foreach_add_(self._params, moves, alpha=FEEDBACK)
        if options.param_multiplier != 1.0:
            torch._foreach_mul_(self._params, multiplier)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the parameters for a `with` block; the raw values are restored bit for bit."""
        raw = [param.clone() for param in self._params]
        torch._foreach_copy_(self._params, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._params, raw)
