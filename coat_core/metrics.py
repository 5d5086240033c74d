"""Quantization error in the field's usual measures."""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.formats import format_of

ROUNDED_SCALE = 2.0**-20  # a scale is rounded to fp32: its format.max falls short of amax by up to 2^-23 (relative)


def sqnr_db(x: Tensor, x_hat: Tensor) -> float:
    """Return 20·log10(‖x‖ / ‖x − x̂‖) in dB, inf if equal, nan if only x is zero; ValueError if the shapes differ."""
    if x.shape != x_hat.shape:
        raise ValueError(f"x_hat of shape {tuple(x_hat.shape)}: must have the shape of x, {tuple(x.shape)}")
    signal = x.detach().double()
    noise_norm = (signal - x_hat.detach().double()).norm().item()
    signal_norm = signal.norm().item()
    if noise_norm == 0.0:
        return float("inf")
    if signal_norm == 0.0:
        return float("nan")
    return float(20.0 * torch.log10(torch.tensor(signal_norm / noise_norm, dtype=torch.float64)))


def cast_losses(x: Tensor, codes: Tensor, x_hat: Tensor) -> Tensor:
    """Return fp32 [2] on x's device: share of all elements that are saturated, share of nonzero ones that are lost.

    Saturated: at ±format.max with x > x̂ by more than `ROUNDED_SCALE`, ±inf among them, so not the element that defines
    a just-in-time scale. Lost: nonzero with a zero code.
    """
    magnitude = x.detach().abs().to(torch.float32)
    code = codes.to(torch.float32).abs()
    saturated = (code >= format_of(codes.dtype).max) & (magnitude > x_hat.abs() * (1 + ROUNDED_SCALE))
    nonzero = magnitude != 0
    lost = nonzero & (code == 0)
    return torch.stack([saturated.sum() / max(x.numel(), 1), lost.sum() / nonzero.sum().clamp(min=1)])
