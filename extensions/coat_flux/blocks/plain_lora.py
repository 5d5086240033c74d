"""Read a linear with its LoRA adapters as plain matrices: y = base(x) + Σ (x Aᵀ)·factor·strength Bᵀ.

Two shapes of adapter, as in `attach`: PEFT's layers around a base linear, and ai-toolkit's modules that have replaced
their base linear's `forward`. ai-toolkit gives each image of a batch its own strength (a dataset's `network_weight`).
What is more than matrices (dropout, DoRA, LoKr, a merged LoRA) is refused with its reason, so that the caller can run
the module as it is instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class NotPlain(Exception):
    """This module does more than linear plus LoRA; the message says what."""


@dataclass(frozen=True)
class PlainAdapter:
    """One adapter's matrices.

    Attributes:
        down: A [r, K].
        up: B [N, r].
        factors: numbers or one-element tensors that multiply x Aᵀ.
        strengths: [images], multiplies the rows of x Aᵀ image by image; None where all images have the same.
    """

    down: nn.Parameter
    up: nn.Parameter
    factors: tuple[float | Tensor, ...]
    strengths: Tensor | None = None


def plain_adapters(module: Any) -> tuple[nn.Module, tuple[PlainAdapter, ...]]:
    """Return the base linear and its active adapters.

    Args:
        module: a linear, a PEFT layer around one, or a linear whose `forward` is an ai-toolkit LoRA module's.

    Returns:
        (base linear, adapters); no adapters where they are switched off.

    Raises:
        NotPlain: it is none of these, or does more.
    """
    if hasattr(module, "base_layer"):
        base, below = plain_adapters(module.base_layer)
        return base, (*below, *_of_peft(module))
    adapters: tuple[PlainAdapter, ...] = ()
    forward = vars(module).get("forward")
    if forward is None:
        return module, adapters
    owner = getattr(forward, "__self__", None)
    while hasattr(owner, "lora_down") and hasattr(owner, "org_module"):  # an assistant LoRA lies below the trained one
        adapters, forward = (*_of_toolkit(owner), *adapters), owner.org_forward
        owner = getattr(forward, "__self__", None)
    if owner is not module or forward.__func__ is not type(module).forward or forward is vars(module)["forward"]:
        raise NotPlain(f"the forward of a {type(module).__name__} was replaced by something other than a LoRA")
    return module, adapters


def trained_parameters(block: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of a block and of ai-toolkit LoRA modules on it, which are no part of it."""
    beside = [getattr(vars(module).get("forward"), "__self__", None) for module in block.modules()]
    owners = [block, *(owner for owner in beside if hasattr(owner, "lora_down"))]
    return [p for owner in owners for p in owner.parameters() if p.requires_grad]


def _of_peft(layer: Any) -> tuple[PlainAdapter, ...]:
    if layer.disable_adapters:
        return ()
    if layer.merged:
        raise NotPlain("a LoRA is merged into its base")
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return tuple(_of_peft_one(layer, name) for name in names)


def _of_peft_one(layer: Any, name: str) -> PlainAdapter:
    down, up = layer.lora_A[name], layer.lora_B[name]
    if name in layer.lora_variant:
        raise NotPlain(f"a LoRA variant ({type(layer.lora_variant[name]).__name__})")
    if layer.training and getattr(layer.lora_dropout[name], "p", 0.0):
        raise NotPlain("LoRA dropout")
    _check_matrices(down, up)
    return PlainAdapter(down.weight, up.weight, (layer.scaling[name],))


def _of_toolkit(lora: Any) -> tuple[PlainAdapter, ...]:
    network = lora.network_ref()
    if not network.is_active or network.is_merged_in or network._multiplier == 0:
        return ()
    if type(lora).__name__ != "LoRAModule" or network.is_lorm:
        raise NotPlain(f"a {type(lora).__name__}")
    dropout = getattr(lora.dropout, "p", 0.0) if isinstance(lora.dropout, nn.Module) else lora.dropout
    if lora.training and (dropout or lora.rank_dropout or lora.module_dropout):
        raise NotPlain("LoRA dropout")
    if hasattr(lora, "scalar") or getattr(lora, "lora_mid", None) is not None:
        raise NotPlain("a LoRA with a scalar or a middle matrix")
    _check_matrices(lora.lora_down, lora.lora_up)
    strength, strengths = _strength_of(network)
    return (PlainAdapter(lora.lora_down.weight, lora.lora_up.weight, (lora._runtime_scale, strength), strengths),)


def _strength_of(network: Any) -> tuple[float | Tensor, Tensor | None]:
    """The strength of ai-toolkit's network as one factor, and as one per image where images differ.

    The trainer sets a list with one entry per image at every step, mostly of equal numbers. The list is compared here,
    not the tensor made from it: that would wait for the GPU, for every adapter of every block.
    """
    given = network._multiplier
    entries = given if isinstance(given, list) else [given]
    if all(isinstance(entry, int | float) and entry == entries[0] for entry in entries):
        return entries[0], None
    tensor: Tensor = network.torch_multiplier
    if tensor.ndim > 1:
        raise NotPlain(f"LoRA strengths of shape {tuple(tensor.shape)}, not one per image")
    return (tensor, None) if tensor.numel() == 1 else (1.0, tensor)


def _check_matrices(down: Any, up: Any) -> None:
    for part in (down, up):
        if not isinstance(part, nn.Linear):
            raise NotPlain(f"a LoRA made of a {type(part).__name__}")
        if part.bias is not None:
            raise NotPlain("a LoRA with a bias")
