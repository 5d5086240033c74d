"""Quantization error in the field's usual measures."""

from __future__ import annotations

import torch
from torch import Tensor


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
