"""Small trainings end where AdamW's end."""

from __future__ import annotations

import pytest
import torch

from coat_core.optim import FP8AdamW
from tests.optim.common import CONFIGS
from tests.tolerances import CONVERGED_FRACTION, CONVERGED_LOSS_RATIO


def final_loss(make_optimizer, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """First and last loss of a LoRA-shaped regression (B starts at 0) in 200 steps."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 64, generator=generator), torch.randn(64, 4, generator=generator)
    y = x @ target @ torch.randn(4, 48, generator=generator) / 16
    a = torch.nn.Parameter((torch.randn(8, 64, generator=generator) / 8).to(dtype))
    b = torch.nn.Parameter(torch.zeros(48, 8, dtype=dtype))
    optimizer = make_optimizer([a, b])
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = ((x @ a.float().t() @ b.float().t() - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.use_dynamic_range_expansion])
def test_loss_ends_near_adamw(name: str) -> None:
    first, expected = final_loss(lambda params: torch.optim.AdamW(params, lr=1e-2))
    _, reached = final_loss(lambda params: FP8AdamW(params, lr=1e-2, fp8_config=CONFIGS[name]))
    assert expected < CONVERGED_FRACTION * first
    assert reached < CONVERGED_LOSS_RATIO * expected


def test_bf16_parameters_converge() -> None:
    first, reached = final_loss(lambda params: FP8AdamW(params, lr=1e-2), torch.bfloat16)
    assert reached < CONVERGED_FRACTION * first
