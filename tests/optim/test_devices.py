"""On every device of this machine: where the state lies, no host sync in a step, exact results, resume."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS, storages
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, ReferenceAdamW, make_params, read_back, set_grads


def on_device(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(param.detach().to(device)) for param in make_params(dtype=dtype)]


def set_device_grads(params: list[Parameter], step: int) -> None:
    twins = [Parameter(param.detach().cpu()) for param in params]
    set_grads(twins, step)
    for param, twin in zip(params, twins, strict=True):
        param.grad = twin.grad.to(param.device)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_per_tensor_reference(name: str, dtype: torch.dtype) -> None:
    """On the CPU; the GPU's kernel against the reference: tests/kernels/test_adamw.py."""
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    optimizer = FP8AdamW(ours, lr=1e-3, weight_decay=0.02, fp8_config=CONFIGS[name])
    reference = ReferenceAdamW(theirs, CONFIGS[name], lr=1e-3, weight_decay=0.02)
    for step in range(8):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert_bitwise(a.detach(), b.detach())
        for moment in MOMENTS:
            found = read_back(moment, optimizer.state[b], storages(CONFIGS[name]))
            assert_bitwise(found, reference.moments[moment][i])


def test_state_lies_with_the_parameter_and_step_on_the_cpu(device: torch.device) -> None:
    params = on_device(device)
    optimizer = FP8AdamW(params)
    set_device_grads(params, 0)
    optimizer.step()
    for param in params:
        for key, tensor in optimizer.state[param].items():
            assert tensor.device.type == ("cpu" if key == "step" else device.type)
    moved = FP8AdamW(on_device(device))
    moved.load_state_dict(
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), optimizer.state_dict())
    )
    twin = moved.param_groups[0]["params"][0]
    assert moved.state[twin]["step"].device.type == "cpu"
    assert_bitwise(moved.state[twin]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


@pytest.mark.gpu
def test_large_parameters_are_split_and_match_the_cpu_codes() -> None:
    start = torch.randn(4200, 4096, generator=torch.Generator().manual_seed(0))  # above one GPU chunk
    param = Parameter(start.cuda())
    optimizer = FP8AdamW([param], fp8_config=CONFIGS["plain"])
    param.grad = start.cuda() * 1e-3
    optimizer.step()
    state = optimizer.state[param]
    v = read_back("exp_avg_sq", state, storages(CONFIGS["plain"]))
    exact = (start.cuda() * 1e-3).square() * (1 - 0.999)
    block_amax = exact.view(-1, 128).amax(-1).repeat_interleave(128).view_as(exact)
    assert ((v - exact).abs() <= exact / 16 + block_amax / 448 * 2.0**-9).all()
