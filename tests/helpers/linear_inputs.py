"""What a linear reads: Gaussian, and with the outliers that transformers have."""

from __future__ import annotations

import torch
from torch import Tensor

INPUTS = ("gaussian", "outlier channels", "three huge channels", "outliers in x and W", "after GELU", "student t")


def linear_inputs(kind: str, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Return x [m, k] and W [n, k] with the values of bf16."""
    x, weight = torch.randn(m, k), torch.randn(n, k) / k**0.5
    channels = torch.randperm(k)
    hundredth = channels[: max(k // 100, 1)]
    if kind in ("outlier channels", "outliers in x and W"):
        x[:, hundredth] *= 30
    if kind == "outliers in x and W":
        weight[:, torch.randperm(k)[: len(hundredth)]] *= 8
    if kind == "three huge channels":
        x[:, channels[:3]] *= 100
    if kind == "after GELU":
        x[:, hundredth] += 10
        x = torch.nn.functional.gelu(1.5 * x)
    if kind == "student t":
        x = torch.distributions.StudentT(3.0).sample((m, k))
    return x.to(torch.bfloat16).to(torch.float32), weight.to(torch.bfloat16).to(torch.float32)
