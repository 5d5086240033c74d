"""FP8AdamW with `moment_rounding: stochastic`: exp_avg_sq does not drift, and the draws depend on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from coat_core.optim.state import read_state, storages
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import bits
from tests.optim.common import (
    SHAPES,
    UNQUANTIZED,
    assert_same,
    make_params,
    params_of,
    run,
    set_grads,
)

STORED: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "plain": {"use_dynamic_range_expansion": False},
    "integers": {"m1_format": "int8_ratio", "m2_format": "uint8_log"},
}


def config(name: str, rounding: str = "stochastic") -> FP8QuantizationConfig:
    return FP8QuantizationConfig(**STORED[name], moment_rounding=rounding)


@pytest.mark.parametrize("name", ["e4m3", "integers"])
def test_mean_of_exp_avg_sq_stays_where_nearest_drifts(name: str) -> None:
    """60 steps of gradients that are each as large as ever: v is far from its end, and falls and rises."""
    spread = torch.logspace(-3, 0, 16 * 128)[torch.randperm(16 * 128, generator=torch.Generator().manual_seed(0))]
    params = [Parameter(torch.zeros(16, 128)) for _ in range(3)]
    kinds = [config(name), config(name, "nearest"), UNQUANTIZED]
    optimizers = [FP8AdamW([param], fp8_config=kind) for param, kind in zip(params, kinds, strict=True)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        grad = torch.randn(16, 128, generator=generator) * spread.view(16, 128)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad
            optimizer.step()
    stochastic, nearest, exact = (
        read_state(optimizer.state[param], storages(kind))[1].double()
        for param, optimizer, kind in zip(params, optimizers, kinds, strict=True)
    )
    assert (stochastic / exact).mean().item() == pytest.approx(1.0, abs=0.01)
    assert (nearest / exact).mean().item() > 1.02


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_each_step_has_draws_of_its_own(rounding: str) -> None:
    """With beta2 0 and the same gradient v is the same at every step, and only its draws differ."""
    param = Parameter(torch.zeros(8, 128))
    optimizer = FP8AdamW([param], betas=(0.9, 0.0), fp8_config=config("e4m3", rounding))
    grad = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    codes = []
    for _ in range(2):
        param.grad = grad.clone()
        optimizer.step()
        codes.append(bits(optimizer.state[param]["exp_avg_sq"]).clone())
    assert torch.equal(*codes) == (rounding == "nearest")


@pytest.mark.parametrize("name", ["e4m3", "integers"])
def test_a_parameter_draws_the_same_whoever_else_has_a_gradient(name: str) -> None:
    """Neither where its blocks are packed, nor how many parameters step with it, nor their order of arrival."""
    together, apart = make_params(), make_params()
    optimizer, other = (FP8AdamW(params, fp8_config=config(name)) for params in (together, apart))
    run(optimizer, together, range(4))
    for index in reversed(range(len(SHAPES))):
        for step in range(4):
            set_grads(apart, step)
            for number, param in enumerate(apart):
                if number != index:
                    param.grad = None
            other.step()
    assert_same(optimizer, other)


def test_counters_on_the_device_draw_the_same(device: torch.device) -> None:
    made = []
    for capturable in (False, True):
        params = [Parameter(param.detach().to(device)) for param in make_params()]
        made.append(FP8AdamW(params, capturable=capturable, fp8_config=config("plain")))
        for step in range(3):
            twins = make_params()
            set_grads(twins, step)
            for param, twin in zip(params, twins, strict=True):
                param.grad = twin.grad.to(device)
            made[-1].step()
    for a, b in zip(*map(params_of, made), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "exp_avg_sq_scale"):
            assert_bitwise(made[0].state[a][key], made[1].state[b][key])
