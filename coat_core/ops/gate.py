"""The gate and the residual at the end of a block, forward and backward, as operators.

With a weight, RMSNorm(result) = result·rstd·weight replaces result, as after the linears of Z-Image's blocks.

Shapes: residual, result, grad [B, S, D]; gate [B, D]; weight [D]; h [B, S, r], r ≤ 256; up [D, r]. `fmt`,
`granularity`, `saved_format` and `group_size` as in `ops.codes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.casts import GRADIENT, Cast, declares
from coat_core.ops.codes import cast_of, codes_of, values_of, with_adapter
from coat_core.ops.dispatch import operator
from coat_core.ops.norm import rms_norm, rms_norm_backward


@operator("coat::gated_sum")
def gated_sum(
    residual: Tensor,
    gate: Tensor,
    result: Tensor,
    h: Tensor | None,
    up: Tensor | None,
    saved_format: str,
    group_size: int,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = residual + gate·norm(result'), result' = result + h upᵀ, and the saved codes of result'.

    Without a weight norm(x) = x. Returns y in the dtype residual, gate and result (or weight) promote to; codes, scale.

    Numerics: result' is rounded once, the product before the sum, as eager PyTorch does; without adapter and norm
    kernel and reference have the same bits, and the reference has those of diffusers' RMSNorm on a CPU.
    Source: diffusers' transformer_flux.py (adaLN-Zero gates) and transformer_z_image.py (norms after linears).
    """
    result = with_adapter(result, h, up)
    normed = result if weight is None else rms_norm(result, weight, eps)
    y = (residual + gate[:, None] * normed).contiguous()
    return y, *codes_of(result, saved_format, "per_group", group_size)


@declares(gated_sum)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    return cast_of(None, with_adapter(a.result, a.h, a.up), out[1:], "per_group", a.group_size)


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
    weight: Tensor | None = None,
    eps: float = 0.0,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy, the gradient of result', and its codes for the linear's dgrad; and dgate. The residual's is `grad`.

        no norm   dy = grad·gate,   dgate = Σ_S grad·result'
        RMSNorm   z = result'·rstd,   dz = grad·gate·weight,   dgate = Σ_S grad·z·weight
                  dy = rstd·(dz - z·mean(dz·z))

    result' is values of `dtype`, or FP8 codes with the scale of 1×G groups or of all; None where neither dgate nor a
    norm needs it. Returns dy of `dtype`, with a norm computed in fp32 and rounded once; the codes of dy·factors, fp32
    [D] or None; their scale; dgate fp32 [B, D], or of shape [0] without result.
    """
    if result is None:
        assert weight is None, "the gradient of a norm needs what it normed"
        dy = (grad * gate[:, None]).to(dtype).contiguous()
        dgate = gate.new_empty(0, dtype=torch.float32)
        return dy, *codes_of(dy, fmt, granularity, factors=factors), dgate
    values = values_of(result, result_scale, group_size, dtype).to(torch.float32)
    g = grad.to(torch.float32)
    if weight is None:
        dy = grad * gate[:, None]
    else:
        of_norm = weight.to(torch.float32)
        dy, z = rms_norm_backward(g * (gate.to(torch.float32)[:, None] * of_norm), values, eps)
        values = z * of_norm
    dy = dy.to(dtype).contiguous()
    return dy, *codes_of(dy, fmt, granularity, factors=factors), (g * values).sum(1)


@declares(gated_sum_backward)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    return cast_of(GRADIENT, out[0], out[1:3], a.granularity, factors=a.factors)
