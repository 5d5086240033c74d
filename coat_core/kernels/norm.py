"""LayerNorm with adaLN modulation, and QK-RMSNorm with rotary embedding: forward and backward, as operators.

    layer_norm_modulate            n = LayerNorm(x)·(1 + scale) + shift            one scale and shift per image
    layer_norm_modulate_quantize   n, and its codes                                what the linears after it read
    rms_norm_rope                  y = rotate(RMSNorm(x)·weight)                   per head

The bodies are the reference. The forward passes round where diffusers' FLUX blocks round, so that both give the same
bits; the backward passes are computed in fp32 from x alone (row statistics are recomputed) and rounded once.

Shapes: x [B, S, D] tokens; [B, S, H, d] heads of d; scale, shift [B, D]; weight [d]; cos, sin [S, d], each rotary angle
repeated for its pair of neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import INPUT, Cast, declares
from coat_core.kernels.codes import cast_of, codes_of, fake_codes_of
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.operators import operator


@operator("coat::layer_norm_modulate")
def layer_norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return LayerNorm(x)·(1 + scale) + shift.

    Args:
        x: floating [B, S, D].
        scale: [B, D].
        shift: [B, D].
        eps: added to the variance.

    Returns:
        Tensor like x.

    Numerics: bit-equal to diffusers' AdaLayerNormZero on a CPU.
    Source: FLUX's adaLN-Zero, diffusers models/normalization.py.
    """
    with without_autocast(x.device):
        normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), eps=eps)
        return (normed * (1 + scale[:, None]) + shift[:, None]).contiguous()


@layer_norm_modulate.register_fake
def _(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, scale.dtype))


@operator("coat::layer_norm_modulate_quantize")
def layer_norm_modulate_quantize(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, fmt: str, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `layer_norm_modulate`'s n and its codes.

    Args:
        x: floating [B, S, D].
        scale: [B, D].
        shift: [B, D].
        eps: added to the variance.
        fmt: "e4m3" or "e5m2".
        granularity: "none", "per_row" or "per_tensor"; see `coat_core.kernels.codes`.

    Returns:
        n [B, S, D]; its codes; the scale of the codes.

    Raises:
        ValueError: unknown format or granularity.
    """
    n = layer_norm_modulate(x, scale, shift, eps)
    return n, *codes_of(n, fmt, granularity)


@layer_norm_modulate_quantize.register_fake
def _(x: Tensor, scale: Tensor, shift: Tensor, eps: float, fmt: str, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    n = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, scale.dtype))
    return n, *fake_codes_of(n, fmt, granularity)


@declares(layer_norm_modulate_quantize)
def _(
    out: tuple[Tensor, ...], x: Tensor, scale: Tensor, shift: Tensor, eps: float, fmt: str, granularity: str
) -> Cast | None:
    return cast_of(INPUT, out, granularity)


@operator("coat::layer_norm_modulate_backward")
def layer_norm_modulate_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and shift.

        z = (x - mean)·rstd,   dz = grad·(1 + scale)
        dx = rstd·(dz - mean(dz) - z·mean(dz·z)),   dscale = Σ_S grad·z,   dshift = Σ_S grad

    Args:
        grad: of the output [B, S, D].
        x: what the forward pass read (or its FP8 round trip) [B, S, D].
        scale: [B, D].
        eps: as in the forward pass.

    Returns:
        dx like x; dscale and dshift like scale.
    """
    values, g = x.to(torch.float32), grad.to(torch.float32)
    centred = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    z = centred * rstd
    dz = g * (1 + scale.to(torch.float32)[:, None])
    dx = rstd * (dz - dz.mean(-1, keepdim=True) - z * (dz * z).mean(-1, keepdim=True))
    return dx.to(x.dtype).contiguous(), (g * z).sum(1).to(scale.dtype), g.sum(1).to(scale.dtype)


@layer_norm_modulate_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


def _turned(x: Tensor) -> Tensor:
    """(a, b) → (-b, a) for each pair of neighbours."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(-2)


@operator("coat::rms_norm_rope")
def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x)·weight, each pair of neighbours rotated by its angle.

    Args:
        x: floating [B, S, H, d], d even.
        weight: [d].
        cos: fp32 [S, d].
        sin: fp32 [S, d].
        eps: added to the mean square.

    Returns:
        Tensor like x.

    Numerics: bit-equal to torch.nn.RMSNorm followed by diffusers' apply_rotary_emb on a CPU.
    Source: FLUX's QK norm and rotary embedding, diffusers models/transformers/transformer_flux.py.
    """
    with without_autocast(x.device):
        normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
        cos, sin = cos[None, :, None], sin[None, :, None]
        y = normed.to(torch.float32) * cos + _turned(normed).to(torch.float32) * sin
        return y.to(x.dtype).contiguous()


@rms_norm_rope.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@operator("coat::rms_norm_rope_backward")
def rms_norm_rope_backward(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return the gradient of x.

        g = (gradient rotated back)·weight,   z = x·rstd,   dx = rstd·(g - z·mean(g·z))

    Args:
        grad: of the output [B, S, H, d].
        x: what the forward pass read (or its FP8 round trip) [B, S, H, d].
        weight: [d].
        cos: fp32 [S, d].
        sin: fp32 [S, d].
        eps: as in the forward pass.

    Returns:
        dx like x.
    """
    g, values = grad.to(torch.float32), x.to(torch.float32)
    back = g * cos[None, :, None] - _turned(g * sin[None, :, None])
    weighted = back * weight.to(torch.float32)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    z = values * rstd
    return (rstd * (weighted - z * (weighted * z).mean(-1, keepdim=True))).to(x.dtype).contiguous()


@rms_norm_rope_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


run_by_triton(layer_norm_modulate, "norm.layer_norm_modulate")
run_by_triton(layer_norm_modulate_quantize, "norm.layer_norm_modulate_quantize")
run_by_triton(layer_norm_modulate_backward, "norm.layer_norm_modulate_backward")
run_by_triton(rms_norm_rope, "rope.rms_norm_rope")
run_by_triton(rms_norm_rope_backward, "rope.rms_norm_rope_backward")
