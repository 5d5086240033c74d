"""Zero, constant, tiny, huge and non-finite gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS
from tests.tolerances import SPECIAL_UPDATE_REL


@pytest.mark.parametrize("name", CONFIGS)
def test_lora_start_gradient_of_a_is_zero_at_step_one(name: str) -> None:
    """B = 0 makes the first gradient of A exactly zero: A must stay, bit for bit, and go on normally."""
    a, b = Parameter(torch.randn(16, 50)), Parameter(torch.zeros(30, 16))
    start = a.detach().clone()
    optimizer = FP8AdamW([a, b], lr=1e-3, weight_decay=0.0, fp8_config=CONFIGS[name])
    for step in range(1, 4):
        loss = ((torch.randn(20, 50) @ a.t() @ b.t() - 1.0) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            assert_bitwise(a.detach(), start)
    assert not torch.equal(a, start)
    assert a.isfinite().all()
    assert b.isfinite().all()
    assert (a - start).abs().max() < 5e-3  # two steps of at most lr each, times the error of the quantization


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [1e-12, 1e8])
def test_constant_gradient_moves_every_element_by_lr(name: str, value: float) -> None:
    param = Parameter(torch.zeros(300))
    optimizer = FP8AdamW([param], lr=1e-3, eps=0.0, weight_decay=0.0, fp8_config=CONFIGS[name])
    for _ in range(10):
        param.grad = torch.full_like(param, value)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -1e-2), rtol=SPECIAL_UPDATE_REL, atol=0.0)


@pytest.mark.parametrize("name", ["default", "plain", "integers", "unquantized"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_show_in_the_parameter(name: str, bad: float) -> None:
    param, healthy = Parameter(torch.ones(300)), Parameter(torch.ones(300))
    optimizer = FP8AdamW([param, healthy], fp8_config=CONFIGS[name])
    for step in range(3):
        param.grad, healthy.grad = torch.full_like(param, 0.1), torch.full_like(healthy, 0.1)
        if step == 1:
            param.grad[5] = bad
        optimizer.step()
    assert param[5].isnan()
    assert healthy.isfinite().all()
