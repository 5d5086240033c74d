"""Zero, constant, tiny, huge, denormal and non-finite gradients; what a moment goes through at every step."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import Parameter

from coat_core.config import PAPER_EXPANSION, ExpansionConfig, FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from coat_core.optim.state import storages
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, read_back
from tests.tolerances import SPECIAL_UPDATE_REL

EXPANDED = [name for name, config in CONFIGS.items() if config.use_dynamic_range_expansion]


def moment(optimizer: FP8AdamW, param: Tensor, name: str) -> Tensor:
    return read_back(name, optimizer.state[param], storages(optimizer.fp8_config))


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


magnitudes = st.floats(min_value=0.0, max_value=2.0**127, width=32, allow_subnormal=True)
FIXED_POINT = ExpansionConfig()
constants = st.sampled_from([FIXED_POINT, PAPER_EXPANSION, ExpansionConfig(1.0, 0.0, 1.0)])


@settings(max_examples=40)
@given(
    values=st.lists(magnitudes, min_size=1, max_size=40),
    fmt=st.sampled_from(["e4m3", "e5m2", "uint8_log"]),
    block_size=st.sampled_from([16, 32]),
    expansion=constants,
)
def test_nonzero_exp_avg_sq_never_becomes_zero(
    values: list[float], fmt: str, block_size: int, expansion: ExpansionConfig
) -> None:
    config = FP8QuantizationConfig(m2_format=fmt, block_size=block_size, expansion=expansion)
    exact = torch.tensor(values, dtype=torch.float32)
    param = Parameter(torch.zeros_like(exact))
    optimizer = FP8AdamW([param], fp8_config=config)
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(exact), "exp_avg_sq": exact}
    groups = torch.optim.AdamW([param]).state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": groups})  # fp32 -> FP8
    back = read_back("exp_avg_sq", optimizer.state[param], storages(config))
    assert torch.equal(back != 0, exact != 0)
    assert (back >= 0).all()
    assert back.isfinite().all()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.isfinite().all()
