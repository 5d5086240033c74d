"""LayerNorm or RMSNorm with adaLN modulation, forward and backward, as operators.

    LayerNorm(x) = (x - mean)·rstd          without a weight, as in FLUX's blocks
    RMSNorm(x) = x·rstd·weight              with a frozen one, as in Z-Image's; rstd = 1/sqrt(mean(x²) + eps)

The bodies are the reference. The forward pass rounds where diffusers' blocks round, so that both give the same bits;
the backward pass is computed in fp32 from x alone (row statistics are recomputed) and rounded once.

Shapes: x [B, S, D] tokens; scale, shift [B, D], one per image; weight [D]. `fmt`, `granularity`, `saved_format` and
`group_size` as in `ops.codes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import INPUT, Cast, declares
from coat_core.ops.codes import cast_of, codes_of, values_of
from coat_core.ops.dispatch import operator


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x·rstd·weight in the weight's dtype, x·rstd rounded to it: the bits of diffusers' RMSNorm on a CPU."""
    rstd = torch.rsqrt(x.to(torch.float32).square().mean(-1, keepdim=True) + eps)
    return (x * rstd).to(weight.dtype) * weight


def rms_norm_backward(dz: Tensor, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return dx = rstd·(dz - z·mean(dz·z)) and z = x·rstd, of RMSNorm without its weight, for fp32 [..., D]."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    z = x * rstd
    return rstd * (dz - z * (dz * z).mean(-1, keepdim=True)), z


def _modulated(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, weight: Tensor | None) -> Tensor:
    with without_autocast(x.device):
        if weight is None:
            normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), eps=eps)
        else:
            normed = rms_norm(x, weight, eps)
        n = normed * (1 + scale[:, None])
        return (n if shift is None else n + shift[:, None]).contiguous()


@operator("coat::norm_modulate_quantize")
def norm_modulate_quantize(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    fmt: str,
    granularity: str,
    saved_format: str,
    group_size: int,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return n = norm(x)·(1 + scale) + shift, its codes for the next linears, and x's codes saved for backward.

    Without a weight norm is LayerNorm, else RMSNorm. A shift of None is zero. eps is added to the variance or mean
    square. Returns n, in the dtype that scale and x, or scale and weight, promote to; its codes, scale; those of x.

    Numerics: on a CPU bit-equal to diffusers' AdaLayerNormZero, or to its RMSNorm times 1 + scale.
    Source: diffusers models/normalization.py, transformer_z_image.py; saved codes: arXiv 2410.19313, section 5.1.
    """
    n = _modulated(x, scale, shift, eps, weight)
    return n, *codes_of(n, fmt, granularity), *codes_of(x, saved_format, "per_group", group_size)


@declares(norm_modulate_quantize)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    saved = cast_of(None, a.x, out[3:], "per_group", a.group_size)
    return *cast_of(INPUT, out[0], out[1:3], a.granularity), *saved


@operator("coat::norm_modulate")
def norm_modulate(
    x: Tensor,
    x_scale: Tensor | None,
    group_size: int,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    weight: Tensor | None = None,
) -> Tensor:
    """Return n [B, S, D] of `norm_modulate_quantize`, from x or its codes with x_scale, of 1×G groups or of all.

    `dtype` is x's before it was quantized.
    """
    return _modulated(values_of(x, x_scale, group_size, dtype), scale, shift, eps, weight)


@operator("coat::norm_modulate_backward")
def norm_modulate_backward(
    grad: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    group_size: int,
    scale: Tensor,
    eps: float,
    residual: Tensor | None,
    dtype: torch.dtype,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, plus the residual's, and that of the modulation.

        LayerNorm   z = (x - mean)·rstd,   dz = grad·(1 + scale),   dscale = Σ_S grad·z
                    dx = rstd·(dz - mean(dz) - z·mean(dz·z)) + residual
        RMSNorm     z = x·rstd,   dz = grad·(1 + scale)·weight,   dscale = Σ_S grad·z·weight
                    dx = rstd·(dz - z·mean(dz·z)) + residual
        both        dshift = Σ_S grad

    grad is of n [B, S, D]; x as in `norm_modulate`; residual is x's gradient around the norm [B, S, D], None for zeros.
    Returns dx [B, S, D] of `dtype`, added up in fp32 and rounded once; fp32 [B, 2, D]: dshift, dscale.
    """
    values = values_of(x, x_scale, group_size, dtype).to(torch.float32)
    g = grad.to(torch.float32)
    dz = g * (1 + scale.to(torch.float32)[:, None])
    if weight is None:
        centred = values - values.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        normed = centred * rstd
        dx = rstd * (dz - dz.mean(-1, keepdim=True) - normed * (dz * normed).mean(-1, keepdim=True))
    else:
        dx, z = rms_norm_backward(dz * weight.to(torch.float32), values, eps)
        normed = z * weight.to(torch.float32)
    if residual is not None:
        dx = dx + residual.to(torch.float32)
    return dx.to(dtype).contiguous(), torch.stack([g.sum(1), (g * normed).sum(1)], dim=1)
