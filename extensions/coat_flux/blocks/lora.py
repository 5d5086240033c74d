"""Make every LoRA adapter save its input as FP8, shared with the FP8 base linear that reads the same x.

  * PEFT: a layer with `base_layer`, `lora_A` and `lora_B` (module dicts by adapter name), around the base linear;
  * ai-toolkit: a module with `lora_down`, `lora_up` and `org_module` (a list) or `orig_module_ref`, run in its place.

In both, base linear and down projection run in turn on the same x (possibly cast in between). The fused flow reads
them as plain matrices, y = base(x) + Σ (x Aᵀ)·factor·strength Bᵀ (`plain_adapters`), with ai-toolkit's strength
per image (a dataset's `network_weight`). ai-toolkit's LoKr is read as its two matrices, y = base(x) + (W1 ⊗ W2) x at
the mean of the strengths, as in its own forward. Dropout, DoRA or a merged LoRA is refused with its reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.activation import FP8InputLinear
from coat_core.linear.function import input_storage
from coat_core.linear.module import FP8Linear, FP8TrainableLinear

from ..config.coat import COATConfig
from .quantized import is_adopted

logger = logging.getLogger(__name__)

SHARED, OWN = "x of the base linear", "an FP8 x of its own"  # what an adapter saves
DROPOUT = "LoRA dropout"  # why a linear with an adapter cannot be fused
LOKR = "LokrModule"  # ai-toolkit's class


def attach_lora(root: nn.Module, config: COATConfig) -> dict[str, str]:
    """Convert the down projections of all adapters in a PEFT model or ai-toolkit's LoRA network, in place.

    Returns adapter → `SHARED` or `OWN`, or why it is left in high precision. With `enabled` or `activation.use_fp8`
    off nothing is changed. ValueError if COAT is on and `root` has no adapter.
    """
    inputs: dict[str, str] = {}
    if not (config.enabled and config.activation.use_fp8):
        return inputs
    linear_config = config.linear_config()
    for name, down, base, sees_base_input in _adapters(root):
        if type(down) is not nn.Linear or down.bias is not None:
            inputs[name] = f"its down projection is a {type(down).__name__}"
            continue
        hands_over = isinstance(base, FP8Linear | FP8TrainableLinear) or hasattr(base, "coat_linear_config")
        shares = sees_base_input and (hands_over or is_adopted(base))
        FP8InputLinear.from_linear(down, input_storage(linear_config), base if shares else None)
        inputs[name] = SHARED if shares else OWN
    if not inputs:
        raise ValueError(f"{type(root).__name__}: no LoRA adapter found; attach after the LoRA network is made")
    ways = list(inputs.values())
    shared, own = ways.count(SHARED), ways.count(OWN)
    text = "LoRA inputs in FP8: %d shared with their base linear, %d of their own, %d left in high precision"
    logger.info(text, shared, own, len(ways) - shared - own)
    return inputs


def _adapters(root: nn.Module) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield (name, down projection, base linear, whether it reads the base linear's very input)."""
    for name, module in root.named_modules():
        layer: Any = module
        if hasattr(layer, "base_layer") and isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
            for adapter, down in layer.lora_A.items():
                dropout = layer.lora_dropout[adapter] if adapter in layer.lora_dropout else nn.Identity()
                vanilla = adapter not in layer.lora_variant  # DoRA and others call the down projection on other inputs
                yield f"{name}.{adapter}", down, layer.base_layer, vanilla and isinstance(dropout, nn.Identity)
        elif hasattr(layer, "lora_down"):
            base = base_of(layer)
            if base is not None:
                yield name, layer.lora_down, base, True


def base_of(lora: Any) -> nn.Module | None:
    """The linear that one of ai-toolkit's LoRA modules is on; None where it holds none, in either of its ways."""
    if getattr(lora, "org_module", None):
        base: nn.Module = lora.org_module[0]
        return base
    reference = getattr(lora, "orig_module_ref", None)
    return None if reference is None else reference()


class NotFusable(Exception):
    """A block cannot run through the fused flow; the message says why."""


@dataclass(frozen=True, eq=False)
class PlainAdapter:
    """One adapter's matrices; `strengths` [images] scale x Aᵀ image by image, None if all are equal."""

    down: nn.Parameter  # A [r, K]
    up: nn.Parameter  # B [N, r]
    factor: float  # of x Aᵀ
    strengths: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KroneckerAdapter:
    """A LoKr, y + factor·(W1 ⊗ W2) x: each of W1 [a, c] and W2 [b, d] is one matrix, or the product of two."""

    first: tuple[nn.Parameter, ...]
    second: tuple[nn.Parameter, ...]
    factor: float

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W1 · factor and W2 in `dtype`."""
        first, second = (x[0] if len(x) == 1 else x[0] @ x[1] for x in (self.first, self.second))
        return (first if self.factor == 1.0 else first * self.factor).to(dtype), second.to(dtype)


Adapter = PlainAdapter | KroneckerAdapter


def plain_adapters(module: Any) -> tuple[nn.Module, tuple[Adapter, ...]]:
    """The base linear and active adapters of a linear, PEFT layer or ai-toolkit LoRA or LoKr; else NotFusable."""
    if hasattr(module, "base_layer"):
        base, below = plain_adapters(module.base_layer)
        return base, (*below, *([module.adapter] if hasattr(module, "adapter") else _of_peft(module)))
    adapters: tuple[Adapter, ...] = ()
    forward = vars(module).get("forward")
    if forward is None:
        return module, adapters
    for owner in toolkit_adapters(module):
        adapters, forward = (*_of_toolkit(owner), *adapters), owner.org_forward
    owner = getattr(forward, "__self__", None)
    if isinstance(owner, nn.Module) and owner is not module:  # LoHa
        raise NotFusable(f"a {type(owner).__name__}")
    if owner is not module or forward.__func__ is not type(module).forward or forward is vars(module)["forward"]:
        raise NotFusable(f"the forward of a {type(module).__name__} was replaced by something other than a LoRA")
    return module, adapters


def trained_parameters(block: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a block and of ai-toolkit's adapters on it, which are no part of it."""
    owners = [block, *(owner for module in block.modules() if (owner := toolkit_adapter(module)) is not None)]
    return [p for owner in owners for p in owner.parameters() if p.requires_grad]


def toolkit_adapters(module: nn.Module) -> Iterator[Any]:
    """ai-toolkit's LoRAs and LoKrs on a linear, the trained one first: an assistant LoRA is below it."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    while hasattr(owner, "org_forward") and (hasattr(owner, "lora_down") or type(owner).__name__ == LOKR):
        yield owner
        owner = getattr(owner.org_forward, "__self__", None)


def toolkit_adapter(module: nn.Module) -> Any:
    """Ai-toolkit's module that has replaced this one's forward, of a LoRA or another kind; None where there is none."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, nn.Module) and owner is not module else None


def _of_peft(layer: Any) -> tuple[PlainAdapter, ...]:
    if layer.disable_adapters:
        return ()
    if layer.merged:
        raise NotFusable("a LoRA is merged into its base")
    adapters = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        if name in layer.lora_variant:
            raise NotFusable(f"a LoRA variant ({type(layer.lora_variant[name]).__name__})")
        if layer.training and getattr(layer.lora_dropout[name], "p", 0.0):
            raise NotFusable(DROPOUT)
        down, up = layer.lora_A[name], layer.lora_B[name]
        _check_matrices(down, up)
        adapters.append(PlainAdapter(down.weight, up.weight, float(layer.scaling[name])))
    return tuple(adapters)


def _of_toolkit(lora: Any) -> tuple[Adapter, ...]:
    network = lora.network_ref()
    if not network.is_active or network.is_merged_in or network._multiplier == 0:
        return ()
    # the trainer's list of strengths is compared, not its tensor, which would synchronize for every adapter
    entries = network._multiplier if isinstance(network._multiplier, list) else [network._multiplier]
    if type(lora).__name__ == LOKR and not network.is_lorm:
        return (_of_lokr(lora, entries),)
    if type(lora).__name__ != "LoRAModule" or network.is_lorm:
        raise NotFusable(f"a {type(lora).__name__}")
    dropout = getattr(lora.dropout, "p", 0.0) if isinstance(lora.dropout, nn.Module) else lora.dropout
    if lora.training and (dropout or lora.rank_dropout or lora.module_dropout):
        raise NotFusable(DROPOUT)
    if hasattr(lora, "scalar") or getattr(lora, "lora_mid", None) is not None:
        raise NotFusable("a LoRA with a scalar or a middle matrix")
    _check_matrices(lora.lora_down, lora.lora_up)
    factor, strengths = float(lora.scale), None
    if all(isinstance(entry, int | float) and entry == entries[0] for entry in entries):
        factor *= entries[0]
    else:
        strengths = network.torch_multiplier
        if strengths.ndim != 1:
            raise NotFusable(f"LoRA strengths of shape {tuple(strengths.shape)}, not one per image")
    return (PlainAdapter(lora.lora_down.weight, lora.lora_up.weight, factor, strengths),)


def _of_lokr(lokr: Any, entries: list[Any]) -> KroneckerAdapter:
    if lokr.training and lokr.rank_dropout:
        raise NotFusable(DROPOUT)
    if not all(isinstance(entry, int | float) for entry in entries):
        raise NotFusable("LoKr strengths that are not one number per image")
    pairs = []
    for name in ("lokr_w1", "lokr_w2"):
        whole = getattr(lokr, name, None)
        factors = (whole,) if whole is not None else (getattr(lokr, f"{name}_a"), getattr(lokr, f"{name}_b"))
        if any(factor.ndim != 2 for factor in factors):
            raise NotFusable("a LoKr of a convolution")
        pairs.append(factors)
    return KroneckerAdapter(*pairs, float(lokr.scale) * sum(entries) / len(entries))


def _check_matrices(down: Any, up: Any) -> None:
    for part in (down, up):
        if not isinstance(part, nn.Linear):
            raise NotFusable(f"a LoRA made of a {type(part).__name__}")
        if part.bias is not None:
            raise NotFusable("a LoRA with a bias")


# --- LoKr ---


def split_width(width: int, factor: int) -> tuple[int, int]:
    """`factor` and the rest where it divides the width, else the largest divisor up to it and the root (-1: no limit).

    ai-toolkit's and LyCORIS's rule.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    small = max(m for m in range(1, math.isqrt(width) + 1) if width % m == 0 and not 0 < factor < m)
    return small, width // small


def lokr_shapes(outputs: int, inputs: int, factor: int, rank: int | None) -> dict[str, tuple[int, int]]:
    """Shape of each matrix by its name in a file; W2 is whole without a rank, or where that saves nothing."""
    (a, b), (c, d) = split_width(outputs, factor), split_width(inputs, factor)
    if rank is None or 2 * rank >= max(b, d):
        return {"lokr_w1": (a, c), "lokr_w2": (b, d)}
    return {"lokr_w1": (a, c), "lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d)}


class LokrLinear(nn.Module):
    """The stand-alone trainer's LoKr around a linear: ai-toolkit's matrices, names and start, drawn by `generator`.

        y = linear(x) + (W1 ⊗ W2) x,   W1 [a, c], W2 [b, d] or w2_a [b, r] · w2_b [r, d];   a·b outputs, c·d inputs

    W1 is uniform in ±1/sqrt(c) and W2, or its second factor, zero. The Kronecker product is not formed. Alpha is the
    rank, so the scale is 1. Behaviour: ai-toolkit's toolkit/models/lokr.py, which is LyCORIS's.
    """

    def __init__(
        self, base: Any, factor: int, rank: int | None, device: torch.device, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        shapes = lokr_shapes(base.out_features, base.in_features, factor, rank)
        for name, shape in shapes.items():
            start = torch.zeros(shape)
            if name in ("lokr_w1", "lokr_w2_a"):
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            self.register_parameter(name, nn.Parameter(start.to(device)))

    @property
    def adapter(self) -> KroneckerAdapter:
        """Its matrices, as the fused flow reads them."""
        first, *second = self.parameters(recurse=False)
        return KroneckerAdapter((first,), tuple(second), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., a·b] for x [..., c·d]."""
        y: Tensor = self.base_layer(x)
        first, second = self.adapter.matrices(y.dtype)
        z = x.to(y.dtype).unflatten(-1, (first.shape[1], second.shape[1])) @ second.t()
        return y + (first @ z).flatten(-2)
