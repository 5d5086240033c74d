"""LayerNorm or RMSNorm with adaLN modulation, forward and backward, as operators.

    norm_modulate_quantize         n = norm(x)·(1 + scale) + shift, its codes, which the linears after it read, and
                                   those of x, saved for backward              one scale and shift per image
    norm_modulate                  n again, from x or its codes
    norm_modulate_backward         the gradients of x, with that of the residual, and of the modulation

The norm is one of

    LayerNorm(x) = (x - mean)·rstd          without a weight, as in FLUX's blocks
    RMSNorm(x) = x·rstd·weight              with one, which is frozen, as in Z-Image's; rstd = 1/sqrt(mean(x²) + eps)

The bodies are the reference. The forward pass rounds where diffusers' blocks round, so that both give the same bits;
the backward pass is computed in fp32 from x alone (row statistics are recomputed) and rounded once.

Shapes: x [B, S, D] tokens; scale, shift [B, D]; weight [D]. `fmt`, `granularity`, `saved_format` and `group_size` as in
`coat_core.ops.codes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import INPUT, Cast, declares
from coat_core.ops.codes import cast_of, codes_of, saved_cast_of, saved_codes_of, values_of
from coat_core.ops.operators import operator


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
    """norm(x)·(1 + scale) + shift, with the bits of diffusers' AdaLayerNormZero, or of its RMSNorm, on a CPU."""
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
    """Return n = norm(x)·(1 + scale) + shift and its codes, and x as it is saved.

    Args:
        x: floating [B, S, D].
        scale: [B, D].
        shift: [B, D]; None for zeros.
        eps: added to the variance, or to the mean square.
        fmt: of the codes of n, "e4m3" or "e5m2".
        granularity: of the codes of n, "none", "per_row" or "per_tensor".
        saved_format: of the saved codes of x, "e4m3", "e5m2" or "none".
        group_size: G of the saved codes.
        weight: of RMSNorm [D]; None for LayerNorm.

    Returns:
        n [B, S, D], in the dtype that scale and x, or scale and weight, promote to; its codes; their scale; codes of x
        [B, S, D]; their scale [B, S, ceil(D/G)].

    Raises:
        ValueError: unknown format, granularity or group size.

    Numerics: on a CPU bit-equal to diffusers' AdaLayerNormZero, or to its RMSNorm times 1 + scale.
    Source: FLUX's adaLN-Zero, diffusers models/normalization.py; Z-Image's, its transformer_z_image.py; saved codes:
    arXiv 2410.19313, section 5.1.
    """
    n = _modulated(x, scale, shift, eps, weight)
    return n, *codes_of(n, fmt, granularity), *saved_codes_of(x, saved_format, group_size)


@declares(norm_modulate_quantize)
def _(out: Any, a: Any) -> tuple[Cast, ...]:
    return *cast_of(INPUT, out, a.granularity), *saved_cast_of(a.x, out[3:], a.group_size)


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
    """Return the n of `norm_modulate_quantize`, from x or its saved codes.

    Args:
        x: of `dtype` or FP8 codes [B, S, D].
        x_scale: fp32 of the codes, of the shape of any granularity; None where x is not codes.
        group_size: elements that share a scale where each row has several.
        scale, shift, eps, weight: as there.
        dtype: of x when it was made: what x from its codes is rounded to.

    Returns:
        n [B, S, D], in its dtype there, `dtype` standing for that of x.
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
    """Return the gradient of x, which the residual's is added to, and that of the modulation.

        LayerNorm   z = (x - mean)·rstd,   dz = grad·(1 + scale),   dscale = Σ_S grad·z
                    dx = rstd·(dz - mean(dz) - z·mean(dz·z)) + residual
        RMSNorm     z = x·rstd,   dz = grad·(1 + scale)·weight,   dscale = Σ_S grad·z·weight
                    dx = rstd·(dz - z·mean(dz·z)) + residual
        both        dshift = Σ_S grad

    Args:
        grad: of n [B, S, D].
        x, x_scale, group_size: as of `norm_modulate`.
        scale: [B, D].
        eps, weight: as in the forward pass.
        residual: gradient of x by the path around the norm [B, S, D]; None for zeros.
        dtype: of x when it was made.

    Returns:
        dx [B, S, D] of `dtype`, added up in fp32 and rounded once; fp32 [B, 2, D]: dshift, dscale.
    """
    values, g = values_of(x, x_scale, group_size, dtype).to(torch.float32), grad.to(torch.float32)
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
