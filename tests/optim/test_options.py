"""Options of FP8AdamW: from YAML words to stored tensors (`build_optimizer`), and what is refused by name."""

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import make_params, run, stored

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("block", "optimizer_params", "expected"),
    [
        ({}, None, (E4M3, E4M3)),
        ({"optimizer": {"m2_format": "e5m2"}}, None, (E4M3, E5M2)),
        ({"optimizer": {"m2_format": "e5m2"}}, {"m2_format": "e4m3", "m1_format": "e5m2"}, (E5M2, E4M3)),
        ({"optimizer": {"use_fp8_m1": False}}, None, (torch.float32, E4M3)),
        ({"optimizer": {"use_fp8": False, "use_fp8_m1": True}}, None, (torch.float32, torch.float32)),
        ({"optimizer": {"use_fp8": False}}, {"use_fp8": True, "use_fp8_m2": False}, (E4M3, torch.float32)),
        ({"optimizer": {"m1_format": "int8_ratio", "m2_format": "uint8_log"}}, None, (torch.int8, torch.uint8)),
        ({}, {"m1_format": "int8_ratio"}, (torch.int8, E4M3)),
        ({"enabled": False}, None, (torch.float32, torch.float32)),
    ],
)
def test_options_decide_what_is_stored(block, optimizer_params, expected):
    param = Parameter(torch.ones(200))
    optimizer = build_optimizer([param], 1e-3, COATConfig.from_dict(block), optimizer_params)
    run(optimizer, [param], range(1))
    assert tuple(stored(name, optimizer.state[param]).dtype for name in MOMENTS) == expected


@pytest.mark.parametrize("where", ["block", "optimizer_params"])
def test_moment_rounding_comes_from_the_config_and_draws_from_the_seed(where):
    rounding = {"moment_rounding": "stochastic"}
    config = COATConfig.from_dict({"optimizer": rounding} if where == "block" else {})
    codes = []
    for seed in (3, 4):
        params = make_params([(64, 64)])
        optimizer = build_optimizer(params, 1e-3, config, rounding if where == "optimizer_params" else None, seed=seed)
        run(optimizer, params, range(2))
        group = optimizer.param_groups[0]
        assert (group["seed"], group["fp8"]["moment_rounding"]) == (seed, "stochastic")
        codes.append([stored(name, optimizer.state[params[0]]).view(torch.uint8) for name in MOMENTS])
    assert torch.equal(codes[0][0], codes[1][0])
    assert not torch.equal(codes[0][1], codes[1][1])


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["amsgrad", "foreach", "differentiable", "fused"])
def test_torch_options_are_refused_by_name_when_on(name):
    with pytest.raises(ValueError, match=rf"{name}=True: not supported by FP8AdamW"):
        FP8AdamW(make_params(), **{name: True})
    FP8AdamW(make_params(), **{name: False})
    with pytest.raises(TypeError, match=r"block_size=64: FP8AdamW has no such option"):
        FP8AdamW(make_params(), block_size=64)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_dtypes_are_refused_by_position(dtype):
    bad = Parameter(torch.zeros(3, 2, dtype=dtype))
    with pytest.raises(ValueError, match=rf"param_groups\[0\]\['params'\]\[1\] of shape \(3, 2\) has dtype {dtype}"):
        FP8AdamW([Parameter(torch.zeros(2)), bad])


def test_sparse_gradient_is_refused_by_position_before_anything_moves():
    dense = Parameter(torch.ones(4))
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = FP8AdamW([{"params": [dense]}, {"params": embedding.parameters()}])
    dense.grad = torch.ones(4)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"param_groups\[1\]\['params'\]\[0\] of shape \(5, 3\) has a sparse"):
        optimizer.step()
    assert_bitwise(dense.detach(), torch.ones(4))
    assert not optimizer.state
