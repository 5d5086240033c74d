"""How far a quantized tensor is from the original, in the field's usual measures."""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.formats import format_of

ROUNDED_SCALE = 2.0**-20  # a scale is rounded to fp32: its format.max falls short of amax by up to 2^-23 (relative)


def sqnr_db(x: Tensor, x_hat: Tensor) -> float:
    """Signal to quantization noise ratio, 20·log10(‖x‖ / ‖x − x̂‖), in dB.

    Args:
        x: the original, any floating dtype and shape.
        x_hat: the approximation, same shape.

    Returns:
        dB as a float; inf where both are equal, nan where x is zero and x̂ is not.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != x_hat.shape:
        raise ValueError(f"x_hat of shape {tuple(x_hat.shape)}: must have the shape of x, {tuple(x.shape)}")
    x64, noise = x.detach().double(), (x.detach().double() - x_hat.detach().double())
    noise_norm, signal_norm = noise.norm().item(), x64.norm().item()
    if noise_norm == 0.0:
        return float("inf")
    if signal_norm == 0.0:
        return float("nan")
    return float(20.0 * torch.log10(torch.tensor(signal_norm / noise_norm, dtype=torch.float64)))


def cosine(x: Tensor, y: Tensor) -> float:
    """Cosine of the angle between two tensors taken as vectors, −1 to 1."""
    return torch.nn.functional.cosine_similarity(x.detach().double().flatten(), y.detach().double().flatten(), 0).item()


def cast_losses(x: Tensor, codes: Tensor, x_hat: Tensor) -> Tensor:
    """What a cast to FP8 lost, without reading it back from the device.

    saturated: elements at ±format.max whose value lay beyond what they stand for, x > x̂ by more than `ROUNDED_SCALE`:
    those a scale did not cover, ±inf among them. The largest element of a group, which scales made just in time put
    there, is none. Lost: nonzero elements with a zero code.

    Returns:
        fp32 [2] on the device of x: share of all elements that are saturated, share of nonzero ones that are lost.
    """
    magnitude, code = x.detach().abs().to(torch.float32), codes.to(torch.float32).abs()
    saturated = (code >= format_of(codes.dtype).max) & (magnitude > x_hat.abs() * (1 + ROUNDED_SCALE))
    nonzero = magnitude != 0
    lost = nonzero & (code == 0)
    return torch.stack([saturated.sum() / max(x.numel(), 1), lost.sum() / nonzero.sum().clamp(min=1)])
