"""Frozen linears, alone or as one: the FP8 weights of those that read the same x become one matrix.

One GEMM then makes q, k, v (and what the MLP reads) at once, and one makes the gradient of x: its K is all their
outputs, so it is summed in fp32 and x's gradient is written once. Each linear's own weight becomes a view of the
matrix, so nothing is in memory twice. Weights that moved apart again (to another device and back) are joined where they
are next read.

What ai-toolkit quantized its own way multiplies its own way, each linear by itself.

Shapes: weights [N_i, K], joined [ΣN, K]; transposed copies [K, N_i], joined [K, ΣN].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8
from coat_core.granularity import Granularity
from coat_core.linear.function import (
    compute_dtype,
    dgrad,
    fp8_gemm_obstacle,
    fprop,
    input_granularity,
    unit_scale,
    wants_fp8_gemm,
)
from coat_core.linear.module import FP8Linear, FP8TrainableLinear
from coat_core.linear.weight import OUTPUT_DIM, StoredWeight, as_stored, load_weight, quantize_weight
from coat_core.ops.quantize import quantize
from coat_core.ops.scaled_mm import row_scale
from coat_core.quantize import Quantized

from ..quantized import input_gradient, is_adopted, own_product

Spec = tuple[str, Granularity]


class NotFusable(Exception):
    """A block cannot run through the fused flow; the message says why."""


@dataclass(frozen=True)
class FrozenLinear:
    """The base: an FP8 linear of ours, in either trainer's shape, or a plain frozen nn.Linear; or several as one.

    Attributes:
        weight: W [N, K] as it is stored, or its values.
        bias: [N] or None.
        config: how it multiplies; None for a plain nn.Linear. Values with a config are quantized at each use.
        in_fp8: whether this device multiplies so; False multiplies by the dequantized weight.
        row_scales: the scale of a stored weight for a row-wise GEMM, and what dgrad has in its place, fp32 [N, 1] and
            [K, 1]; None where the GEMMs are not row-wise.
        input_spec: format and scaling of x in the GEMM; None where it multiplies in high precision.
        grad_spec: the same of dy; None also where dy is multiplied by the weight's scales before the cast.
    """

    weight: StoredWeight | Tensor
    bias: Tensor | None
    config: FP8LinearConfig | None = None
    in_fp8: bool = False
    row_scales: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        config, input_spec, grad_spec = self.config, None, None
        if config is not None and self.in_fp8:
            input_spec = config.input_format, input_granularity(config)
            stored = None if isinstance(self.weight, Tensor) else self.weight
            by_rows = config.weight_granularity == "per_row" or (stored is not None and stored.scale.ndim)
            if config.grad_format != "bf16" and not by_rows:
                grad_spec = config.grad_format, input_granularity(config)
        vars(self).update(input_spec=input_spec, grad_spec=grad_spec)  # asked for many times; they follow from fields

    def forward(self, x: Tensor, quantized: Quantized | None) -> Tensor:
        """Return x Wᵀ + b.

        Args:
            x: [..., K].
            quantized: x in FP8 by `input_spec`; None where that is.
        """
        if self.config is None:
            return torch.nn.functional.linear(x, self._values, self.bias)
        weight = self._stored(self.config)
        if quantized is not None and self.row_scales is not None:
            weight = weight._replace(scale=self.row_scales[0])
        return fprop(x, quantized, weight, self.bias, compute_dtype(x))

    def dgrad(self, grad: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dy W.

        Args:
            grad: dy [..., N].
            quantized: dy in FP8, where whoever made it has quantized it by `grad_spec`.
        """
        if self.config is None:
            return grad @ self._values.to(grad.dtype)
        unit = None if self.row_scales is None else self.row_scales[1]
        return dgrad(grad, self._stored(self.config), self.config, self.in_fp8, quantized, unit)

    @property
    def _values(self) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return self.weight

    def _stored(self, config: FP8LinearConfig) -> StoredWeight:
        return quantize_weight(self.weight, config) if isinstance(self.weight, Tensor) else self.weight


@dataclass(frozen=True)
class AdoptedLinear:
    """The base, quantized by ai-toolkit its own way (`quantized.adopt`); methods as those of `FrozenLinear`."""

    module: Any
    config: ClassVar[None] = None
    input_spec: ClassVar[None] = None
    grad_spec: ClassVar[None] = None

    def forward(self, x: Tensor, quantized: None) -> Tensor:
        """Return x Wᵀ + b by its own code, as in training; for rows x [B, K], which modulate, as x asks for it."""
        return own_product(self.module, x, x.ndim > 2 or x.requires_grad)

    def dgrad(self, grad: Tensor, quantized: None = None) -> Tensor:
        """Return dy W."""
        return input_gradient(self.module, grad)


def read_frozen(base: Any) -> FrozenLinear | AdoptedLinear:
    """Read a linear; NotFusable where it is trained itself or quantized by someone unknown."""
    bias = base.bias
    if bias is not None and bias.requires_grad:
        raise NotFusable("a linear whose bias is trained")
    if is_adopted(base):
        return AdoptedLinear(base)
    config = base.config if isinstance(base, FP8Linear) else getattr(base, "coat_linear_config", None)
    if config is not None:
        weight = load_weight(base, config)
        in_fp8 = wants_fp8_gemm(weight.scale.device, config)
        return FrozenLinear(weight, bias, config, in_fp8, _row_scales(weight, config, in_fp8))
    if not isinstance(base, nn.Linear) or type(base.weight.data) is not Tensor:
        raise NotFusable(f"a {type(base).__name__} of another quantization")
    if base.weight.requires_grad:
        raise NotFusable("a linear whose weight is trained")
    if isinstance(base, FP8TrainableLinear):
        in_fp8 = wants_fp8_gemm(base.weight.device, base.config)
        return FrozenLinear(base.weight, bias, base.config if in_fp8 else None, in_fp8)
    return FrozenLinear(base.weight, bias)


def joinable(bases: Sequence[FrozenLinear]) -> bool:
    """Whether linears can multiply by one matrix: FP8 weights of one config, in one place, with a row-wise GEMM."""
    stored = [base.weight for base in bases if isinstance(base, FrozenLinear) and isinstance(base.weight, StoredWeight)]
    first = bases[0].config
    if first is None or len(stored) < len(bases) or any(base.config != first for base in bases):
        return False
    places = {(weight.scale.device, base.in_fp8, base.bias is None) for weight, base in zip(stored, bases, strict=True)}
    if len(places) > 1:
        return False
    row_wise = replace(first, weight_granularity="per_row")  # each linear's scale is that of its rows
    return not bases[0].in_fp8 or fp8_gemm_obstacle(stored[0].scale.device, row_wise) is None


def join_frozen(modules: Sequence[Any], bases: Sequence[FrozenLinear]) -> FrozenLinear:
    """One base for several: weights and transposed copies in place, scales and biases copied."""
    config, in_fp8 = bases[0].config, bases[0].in_fp8
    assert config is not None
    buffers = {name: join_buffers(modules, name, dim) for name, dim in OUTPUT_DIM.items()}
    stored = [base.weight for base in bases if isinstance(base.weight, StoredWeight)]
    scale = torch.cat([weight.scale.reshape(-1, 1).expand(weight.shape[0], 1) for weight in stored])
    biases = [base.bias for base in bases if base.bias is not None]
    weight = as_stored(buffers, scale, config)
    rows = _row_scales(weight, config, in_fp8)
    return FrozenLinear(weight, torch.cat(biases) if biases else None, config, in_fp8, rows)


def _row_scales(weight: StoredWeight, config: FP8LinearConfig, in_fp8: bool) -> tuple[Tensor, Tensor] | None:
    if not in_fp8 or config.input_granularity != "per_row":
        return None
    rows, width = weight.shape
    return row_scale(weight.scale, rows), row_scale(unit_scale(weight.scale), width)


def join_buffers(modules: Sequence[nn.Module], name: str, dim: int) -> Tensor | None:
    """Return the buffers of that name as one, each module's a view of it; None where one has none.

    Args:
        modules: of one group, in order.
        name: of a buffer, two-dimensional.
        dim: along which they follow each other.
    """
    parts = [module._buffers.get(name) for module in modules]
    if any(part is None for part in parts):
        return None
    tensors: list[Any] = parts
    whole = _whole(tensors, dim)
    if whole is None:
        whole = torch.cat(tensors, dim=dim)
        for module, view in zip(modules, whole.split([part.shape[dim] for part in tensors], dim=dim), strict=True):
            module._buffers[name] = view
    return whole


def _whole(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The contiguous matrix that all parts are views of, side by side; None where there is none."""
    first, shape = parts[0], list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    stride, offset = (shape[1], 1), first.storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or part.stride() != stride or part.storage_offset() != offset:
            return None
        offset += part.shape[dim] * stride[dim]
    return first.as_strided(tuple(shape), stride)


def in_passing(spec: Spec | None, fmt: str = "e4m3") -> tuple[str, str]:
    """`fmt` and `granularity` of a kernel that quantizes what it makes; "none" where it is not to, or cannot."""
    if spec is None or not made_in_passing(spec):
        return fmt, "none"
    return spec[0], spec[1].name


def quantized_by(spec: Spec | None, x: Tensor, codes: Tensor, scale: Tensor) -> Quantized | None:
    """X in FP8 by `spec`: the codes that its kernel has made in passing, or made here."""
    if spec is None:
        return None
    fmt, granularity = spec
    return Quantized(codes, scale, granularity) if made_in_passing(spec) else quantize(x, fmt, granularity)


def made_in_passing(spec: Spec) -> bool:
    """Whether kernels that make values quantize them so: whole rows, or a tensor, but not 1×G, and not rotated."""
    return spec[1].name != "per_group" and spec[0] != INT8.name
