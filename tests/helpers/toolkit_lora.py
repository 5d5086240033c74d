"""LoRA as ai-toolkit has it: fp32 modules next to the linears whose `forward` they replace, run without autocast.

ai-toolkit's own with AI_TOOLKIT_ROOT, else a stand-in; in training mode, with strength 1 until `multiplier` is set.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

ROOT_VARIABLE = "AI_TOOLKIT_ROOT"


def toolkit_is_real() -> bool:
    """Whether `attach_network` will use ai-toolkit's own modules."""
    return bool(os.environ.get(ROOT_VARIABLE))


class LoRAModule(nn.Module):
    """y = linear(x) + (lora_up(lora_down(x)) · scale · strength), the second term in fp32 until it is added."""

    dropout = rank_dropout = module_dropout = None

    def __init__(self, linear: nn.Linear, rank: int, network: Network) -> None:
        super().__init__()
        self.lora_down = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = 1.0
        self.register_buffer("_runtime_scale", torch.ones(()), persistent=False)
        self.network_ref = weakref.ref(network)
        self.org_module = [linear]  # a list, so that it is not a submodule
        self.org_forward = linear.forward
        linear.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.org_forward(x)
        adapted = self.lora_up(self.lora_down(x.to(self.lora_down.weight.dtype)))
        strengths = self.network_ref().torch_multiplier  # type: ignore[union-attr]
        strengths = strengths.repeat_interleave(len(adapted) // len(strengths)).view(-1, *[1] * (adapted.ndim - 1))
        return base + (adapted * self._runtime_scale * strengths).to(base.dtype)


class LokrModule(nn.Module):
    """y = (W + (W1 ⊗ W2) · scale · mean strength) x; W2, or both, are products of two matrices below a rank."""

    rank_dropout = None

    def __init__(self, linear: nn.Linear, network: Network, factor: int, rank: int | None, both: bool = False) -> None:
        super().__init__()
        sizes = [self._split(size, factor) for size in (linear.out_features, linear.in_features)]
        for name, (rows, columns), is_whole in zip(
            ("lokr_w1", "lokr_w2"), zip(*sizes, strict=True), (not both, rank is None), strict=True
        ):
            shapes = {name: (rows, columns)}
            if not is_whole:
                shapes = {f"{name}_a": (rows, rank or 2), f"{name}_b": (rank or 2, columns)}
            for key, shape in shapes.items():
                self.register_parameter(key, nn.Parameter(torch.randn(shape) * 0.3))
        self.scale = 1.0 if rank is None else 0.5
        self.network_ref = weakref.ref(network)
        self.org_module = [linear]
        self.org_forward = linear.forward
        linear.forward = self.forward  # type: ignore[method-assign]

    @staticmethod
    def _split(size: int, factor: int) -> tuple[int, int]:
        """The divisors of a size nearest to its root, the smaller first and at most `factor`; -1: no limit."""
        small = max(i for i in range(1, int(size**0.5) + 1) if size % i == 0 and not 0 < factor < i)
        return small, size // small

    def _matrix(self, name: str) -> Tensor:
        whole = getattr(self, name, None)
        return whole if whole is not None else getattr(self, f"{name}_a") @ getattr(self, f"{name}_b")

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.org_forward(x)
        strength = self.network_ref().torch_multiplier.mean()  # type: ignore[union-attr]
        matrix = torch.kron(self._matrix("lokr_w1"), self._matrix("lokr_w2")) * self.scale * strength
        return base + nn.functional.linear(x.to(matrix.dtype), matrix).to(base.dtype)


class Network(nn.Module):
    """All adapters of a model."""

    is_active, is_merged_in, is_lorm = True, False, False

    def __init__(self, linears: list[nn.Linear], rank: int, lokr: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.multiplier = 1.0
        made = (LoRAModule(each, rank, self) if lokr is None else LokrModule(each, self, **lokr) for each in linears)
        self.unet_loras = nn.ModuleList(made)

    @property
    def multiplier(self) -> float | list[float]:
        """Strength of the LoRA; the trainer sets a list with one entry per image at every step."""
        return self._multiplier

    @multiplier.setter
    def multiplier(self, value: float | list[float]) -> None:
        self._multiplier = value
        self.torch_multiplier = torch.tensor(value if isinstance(value, list) else [value])


def attach_network(model: nn.Module, names: list[str], rank: int) -> Any:
    """Put an fp32 adapter on each of the linears called `names`, or (ai-toolkit's own) on all in the blocks."""
    if not toolkit_is_real():
        return Network([model.get_submodule(name) for name in names], rank).train()  # type: ignore[misc]
    sys.path.insert(0, os.environ[ROOT_VARIABLE])
    network = real_network(model, rank, is_flux=True, transformer_only=True)
    assert len(network.unet_loras) == len(names)
    return network


def real_network(model: nn.Module, rank: int, **options: Any) -> Any:
    """ai-toolkit's own adapters of a model."""
    from toolkit.lora_special import LoRASpecialNetwork

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it makes
        network = LoRASpecialNetwork([], model, lora_dim=rank, alpha=rank, train_text_encoder=False, **options)
        network.apply_to([], model, False, True)
        network.force_to(torch.device("cpu"), torch.float32)
    network._update_torch_multiplier()
    network.is_active = True
    return network.train()


def convert_linears(model: nn.Module, config: Any) -> None:
    """Convert the linears as COAT's process type does in ai-toolkit; with the stand-in, `apply_coat` does it itself."""
    if not toolkit_is_real():
        return
    sys.path.insert(0, os.environ[ROOT_VARIABLE])
    from coat_flux.trainers.ai_toolkit.quantizer import convert, plain_linears

    convert(model, plain_linears(model), config.linear_config())
