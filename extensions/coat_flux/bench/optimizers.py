"""The optimizers of the comparison, on parameters of a LoRA's shapes. Imports no model code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..base.names import COAT_OPTIMIZER
from ..config.coat import COATConfig
from ..trainers.optimizer import build_optimizer
from .configurations import Configuration
from .limits import Geometry
from .timing import SEED, Measurement, Setting

LEARNING_RATE, EPS = 1e-4, 1e-6  # ai-toolkit's eps
PARAMETER_STD, GRADIENT_STD = 0.02, 1e-3
# (in, out) over d of every linear: modulation; q, k, v and output; MLP
STREAM = [(1, 6), *[(1, 1)] * 4, (1, 4), (4, 1)]  # a double block has two streams
SINGLE = [(1, 3), *[(1, 1)] * 3, (1, 4), (5, 1)]


def lora_shapes(geometry: Geometry) -> list[tuple[int, int]]:
    """Shapes of A [r, in] and B [out, r] for every linear of the blocks."""
    d, rank = geometry.hidden, geometry.rank
    linears = STREAM * 2 * geometry.double + SINGLE * geometry.single
    return [shape for k, n in linears for shape in ((rank, k * d), (n * d, rank))]


def measure_optimizer(row: Configuration, setting: Setting) -> Iterator[Measurement]:
    """One step over parameters of a LoRA's shapes, with gradients that stay the same."""
    draw = torch.Generator(setting.device).manual_seed(SEED)
    parameters = []
    for shape in lora_shapes(setting.geometry):
        parameter = nn.Parameter(torch.randn(shape, device=setting.device, generator=draw) * PARAMETER_STD)
        parameter.grad = torch.randn(shape, device=setting.device, generator=draw) * GRADIENT_STD
        parameters.append(parameter)
    optimizer = make_optimizer(row.name, parameters)
    timing = setting.timed("optimizer", optimizer.step)
    figures = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "state_bytes": state_bytes(optimizer),
    }
    yield Measurement("optimizer step", 0, 0, timing, figures)


def make_optimizer(name: str, parameters: list[nn.Parameter], *, capturable: bool = False) -> torch.optim.Optimizer:
    """The optimizer of this name in `configurations.CONFIGURATIONS`, with the same settings for all."""
    settings = {"lr": LEARNING_RATE, "eps": EPS}
    if name == COAT_OPTIMIZER:
        return build_optimizer(parameters, LEARNING_RATE, COATConfig(), capturable=capturable)
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **settings)
    if name == "adamw_fp8_torchao":
        from torchao.optim import AdamWFp8

        return AdamWFp8(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the optimizer's state, each storage once."""
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for tensor in _plain_tensors(state.values()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values`; of a wrapper subclass, those it is made of."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from _plain_tensors(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor):
            yield value
