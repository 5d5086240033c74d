"""The gate and the residual at the end of a block, forward and backward, as operators.

    gate_residual            y = residual + gate·result
    gate_residual_backward   dy = grad·gate, which the dgrad of the linear before it reads, in FP8 too;
                             dgate = Σ_S grad·result

Shapes: residual, result, grad [B, S, D]; gate [B, D]; `fmt` and `granularity` as in `coat_core.kernels.codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.casts import GRADIENT, Cast, declares
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.kernels.codes import cast_of, codes_of, fake_codes_of
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.operators import operator
from coat_core.quantize import dequantize


@operator("coat::gate_residual")
def gate_residual(residual: Tensor, gate: Tensor, result: Tensor) -> Tensor:
    """Return residual + gate·result.

    Args:
        residual: floating [B, S, D].
        gate: [B, D].
        result: [B, S, D].

    Returns:
        Tensor like residual, in the dtype all three promote to.

    Numerics: the product is rounded before the sum, as eager PyTorch does; kernel and reference have the same bits.
    Source: FLUX's adaLN-Zero gates, diffusers models/transformers/transformer_flux.py.
    """
    return (residual + gate[:, None] * result).contiguous()


@gate_residual.register_fake
def _(residual: Tensor, gate: Tensor, result: Tensor) -> Tensor:
    dtype = torch.promote_types(residual.dtype, torch.promote_types(gate.dtype, result.dtype))
    return residual.new_empty(residual.shape, dtype=dtype)


@operator("coat::gate_residual_backward")
def gate_residual_backward(
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of result and gate; that of residual is `grad` itself.

        dy = grad·gate,   dgate = Σ_S grad·result

    Args:
        grad: of the output [B, S, D].
        gate: [B, D].
        result: [B, S, D], as it was, or its FP8 codes; None where dgate is not needed.
        result_scale: of the codes, of the shape of any granularity; None where result is not codes.
        group_size: elements that share a scale where each row has several.
        dtype: of result when it was made: what dy, and result from its codes, are rounded to.
        fmt: of the codes of dy, "e4m3" or "e5m2".
        granularity: of the codes of dy, "none", "per_row" or "per_tensor".

    Returns:
        dy [B, S, D] of `dtype`; its codes; the scale of the codes; dgate like gate, summed in fp32 and rounded once,
        or of shape [0] without result.

    Raises:
        ValueError: unknown format or granularity.
    """
    dy = (grad * gate[:, None]).to(dtype).contiguous()
    dgate = gate.new_empty(0)
    if result is not None:
        if result_scale is not None:
            result = dequantize(result, result_scale, _granularity_of(result_scale, group_size), dtype)
        dgate = (grad.to(torch.float32) * result.to(torch.float32)).sum(1).to(gate.dtype)
    return dy, *codes_of(dy, fmt, granularity), dgate


@gate_residual_backward.register_fake
def _(
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy = grad.new_empty(grad.shape, dtype=dtype)
    return dy, *fake_codes_of(dy, fmt, granularity), gate.new_empty(0 if result is None else gate.shape)


@declares(gate_residual_backward)
def _(
    out: tuple[Tensor, ...],
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> Cast | None:
    return cast_of(GRADIENT, out, granularity)


def _granularity_of(scale: Tensor, group_size: int) -> Granularity:
    """The granularity of a scale of this shape; one group per row is per_row."""
    if scale.ndim == 0:
        return PER_TENSOR
    return PER_ROW if scale.shape[-1] == 1 else per_group(group_size)


run_by_triton(gate_residual, "gate.gate_residual")
run_by_triton(gate_residual_backward, "gate.gate_residual_backward")
