"""FP8AdamW against torch.optim.AdamW and a per-tensor reference, exact; odd gradients."""

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS, read_state, storages
from tests.helpers.asserts import assert_bitwise
from tests.optim import common


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
def test_unquantized_is_bit_equal_to_adamw(options):
    gaps = options.get("gaps", False)
    options = {key: value for key, value in options.items() if key != "gaps"}
    theirs = torch.optim.AdamW(common.make_params(), foreach=False, **options)
    ours = FP8AdamW(common.make_params(), fp8_config=common.UNQUANTIZED, **options)
    for optimizer in (theirs, ours):
        common.run(optimizer, common.params_of(optimizer), range(8), gaps)
    common.assert_same(theirs, ours)


@pytest.mark.parametrize("name", common.CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_per_tensor_reference(name, dtype):
    """On the CPU; the GPU's kernel against the reference: tests/kernels/test_adamw.py."""
    ours, theirs = common.make_params(dtype=dtype), common.make_params(dtype=dtype)
    optimizer = FP8AdamW(ours, lr=1e-3, weight_decay=0.02, fp8_config=common.CONFIGS[name])
    reference = common.ReferenceAdamW(theirs, common.CONFIGS[name], lr=1e-3, weight_decay=0.02)
    for step in range(4):
        common.set_grads(ours, step)
        common.set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert_bitwise(a.detach(), b.detach())
        found = read_state(optimizer.state[b], storages(common.CONFIGS[name]))
        for moment, values in zip(MOMENTS, found, strict=True):
            assert_bitwise(values, reference.moments[moment][i])


# -- zero and non-finite gradients -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", common.CONFIGS)
def test_lora_start_gradient_of_a_is_zero_at_step_one(name):
    """B = 0 makes the first gradient of A exactly zero: A must stay, bit for bit, and go on normally."""
    a, b = Parameter(torch.randn(16, 50)), Parameter(torch.zeros(30, 16))
    start = a.detach().clone()
    optimizer = FP8AdamW([a, b], lr=1e-3, weight_decay=0.0, fp8_config=common.CONFIGS[name])
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


@pytest.mark.parametrize("name", ["default", "plain", "integers", "unquantized"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_show_in_the_parameter(name, bad):
    param, healthy = Parameter(torch.ones(300)), Parameter(torch.ones(300))
    optimizer = FP8AdamW([param, healthy], fp8_config=common.CONFIGS[name])
    for step in range(3):
        param.grad, healthy.grad = torch.full_like(param, 0.1), torch.full_like(healthy, 0.1)
        if step == 1:
            param.grad[5] = bad
        optimizer.step()
    assert param[5].isnan()
    assert healthy.isfinite().all()
