"""The gate and the residual at the end of a block, forward and backward, as operators.

    gated_sum            y = residual + gate·result, with the result's adapter, and what is saved of it
    gated_sum_backward   dy = grad·gate, which the dgrad of the linear before it reads, in FP8 too;
                         dgate = Σ_S grad·result

Shapes: residual, result, grad [B, S, D]; gate [B, D]; h [B, S, r]; up [D, r]. `fmt`, `granularity`, `saved_format` and
`group_size` as in `coat_core.kernels.codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.casts import GRADIENT, Cast, declares
from coat_core.kernels.codes import (
    cast_of,
    codes_of,
    fake_codes_of,
    fake_saved_codes_of,
    saved_cast_of,
    saved_codes_of,
    values_of,
    with_adapter,
)
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.operators import operator


@operator("coat::gated_sum")
def gated_sum(
    residual: Tensor,
    gate: Tensor,
    result: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    saved_format: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return residual + gate·result', result' = result + h upᵀ, and result' as it is saved.

    Args:
        residual: floating [B, S, D].
        gate: [B, D].
        result: of the linear [B, S, D].
        h: what its adapter's up-projection reads [B, S, r], r at most 256, in the dtype of result; None: no adapter.
        up: [D, r], likewise.
        saved_format: of the saved codes, "e4m3", "e5m2" or "none".
        group_size: G of the saved codes.

    Returns:
        y [B, S, D], in the dtype residual, gate and result promote to; codes of result' [B, S, D]; their scale
        [B, S, ceil(D/G)].

    Raises:
        ValueError: unknown format or group size.

    Numerics: result' is rounded once, the product before the sum, as eager PyTorch does; without an adapter kernel and
    reference have the same bits.
    Source: FLUX's adaLN-Zero gates, diffusers models/transformers/transformer_flux.py.
    """
    result = with_adapter(result, h, up)
    return (residual + gate[:, None] * result).contiguous(), *saved_codes_of(result, saved_format, group_size)


@gated_sum.register_fake
def _(
    residual: Tensor,
    gate: Tensor,
    result: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    saved_format: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(residual.dtype, torch.promote_types(gate.dtype, result.dtype))
    return residual.new_empty(residual.shape, dtype=dtype), *fake_saved_codes_of(result, saved_format, group_size)


@declares(gated_sum)
def _(
    out: tuple[Tensor, ...],
    residual: Tensor,
    gate: Tensor,
    result: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    saved_format: str,
    group_size: int,
) -> tuple[Cast, ...]:
    return saved_cast_of(with_adapter(result, h, up), out[1:], group_size)


@operator("coat::gated_sum_backward")
def gated_sum_backward(
    grad: Tensor,
    gate: Tensor,
    result: Tensor | None,
    result_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    fmt: str,
    granularity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of result' and gate; that of residual is `grad` itself.

        dy = grad·gate,   dgate = Σ_S grad·result'

    Args:
        grad: of the output [B, S, D].
        gate: [B, D].
        result: result' [B, S, D], as it was, or its FP8 codes; None where dgate is not needed.
        result_scale: of the codes, of the shape of any granularity; None where result is not codes.
        group_size: elements that share a scale where each row has several.
        dtype: of result' when it was made: what dy, and result' from its codes, are rounded to.
        fmt: of the codes of dy, "e4m3" or "e5m2".
        granularity: of the codes of dy, "none", "per_row" or "per_tensor".

    Returns:
        dy [B, S, D] of `dtype`; its codes; the scale of the codes; dgate fp32 [B, D], or of shape [0] without result.

    Raises:
        ValueError: unknown format or granularity.
    """
    dy = (grad * gate[:, None]).to(dtype).contiguous()
    dgate = gate.new_empty(0, dtype=torch.float32)
    if result is not None:
        values = values_of(result, result_scale, group_size, dtype)
        dgate = (grad.to(torch.float32) * values.to(torch.float32)).sum(1)
    return dy, *codes_of(dy, fmt, granularity), dgate


@gated_sum_backward.register_fake
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
    dgate = gate.new_empty(0 if result is None else gate.shape, dtype=torch.float32)
    return dy, *fake_codes_of(dy, fmt, granularity), dgate


@declares(gated_sum_backward)
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


run_by_triton(gated_sum, "gate.gated_sum")
run_by_triton(gated_sum_backward, "gate.gated_sum_backward")
