"""FP8AdamW against torch.optim.AdamW and a per-tensor reference, exact; small trainings end alike; odd gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS, storages
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import (
    CONFIGS,
    UNQUANTIZED,
    ReferenceAdamW,
    assert_same,
    make_params,
    params_of,
    read_back,
    run,
    set_grads,
)
from tests.tolerances import CONVERGED_FRACTION, CONVERGED_LOSS_RATIO, SPECIAL_UPDATE_REL


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"maximize": True},
        {"lr": torch.tensor(2e-3)},
        {"betas": (0.0, 0.0)},
        {"lr": 0.0},
        {"eps": 0.0},
        {"gaps": True},  # some parameters have no gradient
    ],
    ids=str,
)
def test_unquantized_is_bit_equal_to_adamw(options: dict[str, object]) -> None:
    gaps = options.get("gaps", False)
    options = {key: value for key, value in options.items() if key != "gaps"}
    theirs = torch.optim.AdamW(make_params(), foreach=False, **options)
    ours = FP8AdamW(make_params(), fp8_config=UNQUANTIZED, **options)
    for optimizer in (theirs, ours):
        run(optimizer, params_of(optimizer), range(8), gaps)
    assert_same(theirs, ours)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_per_tensor_reference(name: str, dtype: torch.dtype) -> None:
    """On the CPU; the GPU's kernel against the reference: tests/kernels/test_adamw.py."""
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    optimizer = FP8AdamW(ours, lr=1e-3, weight_decay=0.02, fp8_config=CONFIGS[name])
    reference = ReferenceAdamW(theirs, CONFIGS[name], lr=1e-3, weight_decay=0.02)
    for step in range(4):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert_bitwise(a.detach(), b.detach())
        for moment in MOMENTS:
            found = read_back(moment, optimizer.state[b], storages(CONFIGS[name]))
            assert_bitwise(found, reference.moments[moment][i])


def final_loss(make_optimizer) -> tuple[float, float]:
    """First and last loss of a LoRA-shaped regression (B starts at 0) in 200 steps."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 64, generator=generator), torch.randn(64, 4, generator=generator)
    y = x @ target @ torch.randn(4, 48, generator=generator) / 16
    a, b = Parameter(torch.randn(8, 64, generator=generator) / 8), Parameter(torch.zeros(48, 8))
    optimizer = make_optimizer([a, b])
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = ((x @ a.t() @ b.t() - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.fixture(scope="module")
def adamw_loss() -> float:
    first, reached = final_loss(lambda params: torch.optim.AdamW(params, lr=1e-2))
    assert reached < CONVERGED_FRACTION * first
    return reached


@pytest.mark.parametrize("name", ["default", "integers"])
def test_loss_ends_near_adamw(name: str, adamw_loss: float) -> None:
    _, reached = final_loss(lambda params: FP8AdamW(params, lr=1e-2, fp8_config=CONFIGS[name]))
    assert reached < CONVERGED_LOSS_RATIO * adamw_loss


# -- zero, constant, tiny, huge and non-finite gradients --------------------------------------------------------------


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
