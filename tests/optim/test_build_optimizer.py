"""`coat_flux.trainers.optimizer.build_optimizer`: from YAML words to stored tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from coat_flux.config.coat import COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.trainers.optimizer import build_optimizer, describe_optimizer
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import make_params, run


def stored_dtypes(block: dict, optimizer_params: dict | None = None) -> tuple[torch.dtype, torch.dtype]:
    param = Parameter(torch.ones(200))
    optimizer = build_optimizer([param], 1e-3, COATConfig.from_dict(block), optimizer_params)
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state[param]
    return state["exp_avg"].dtype, state["exp_avg_sq"].dtype


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("block", "optimizer_params", "expected"),
    [
        ({}, None, (E4M3, E4M3)),
        ({"optimizer": {"m2_format": "e5m2"}}, None, (E4M3, E5M2)),
        ({"optimizer": {"m2_format": "e5m2"}}, {"m2_format": "e4m3", "m1_format": "e5m2"}, (E5M2, E4M3)),
        ({"optimizer": {"use_fp8_m1": False}}, None, (torch.float32, E4M3)),
        ({"optimizer": {"use_fp8": False}}, None, (torch.float32, torch.float32)),
        ({"optimizer": {"m1_format": "int8_ratio", "m2_format": "uint8_log"}}, None, (torch.int8, torch.uint8)),
        ({}, {"m1_format": "int8_ratio"}, (torch.int8, E4M3)),
        ({"enabled": False}, None, (torch.float32, torch.float32)),
    ],
)
def test_options_decide_what_is_stored(block, optimizer_params, expected) -> None:
    assert stored_dtypes(block, optimizer_params) == expected


def test_adamw_arguments_and_defaults() -> None:
    optimizer = build_optimizer(make_params(), 2e-4, COATConfig())
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, FP8AdamW)
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.9, 0.999), 1e-6, 1e-2)
    given = {"betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.0, "block_size": 64}
    group = build_optimizer(make_params(), 2e-4, COATConfig(), given).param_groups[0]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.0)
    assert group["fp8"]["block_size"] == 64


def test_use_fp8_false_is_torch_adamw_to_the_last_bit() -> None:
    ours, theirs = make_params(), make_params()
    config = COATConfig.from_dict({"optimizer": {"use_fp8": False}})
    run(build_optimizer(ours, 1e-3, config), ours, range(5))
    run(torch.optim.AdamW(theirs, 1e-3, eps=1e-6, foreach=False), theirs, range(5))
    for a, b in zip(theirs, ours, strict=True):
        assert_bitwise(a.detach(), b.detach())


def test_the_start_line_says_how_each_moment_is_stored() -> None:
    options = {"m1_format": "int8_ratio", "stochastic_rounding": True, "use_dynamic_range_expansion": False}
    built = build_optimizer([Parameter(torch.ones(200))], 1e-3, COATConfig.from_dict({"optimizer": options}))
    stored = "exp_avg int8_ratio (block 128), exp_avg_sq e4m3 (block 128, plain)"
    line = f"FP8AdamW over 200 parameters, {stored}, exp_avg_sq rounded stochastically, stochastic rounding"
    assert describe_optimizer(built) == line


@pytest.mark.parametrize("where", ["block", "optimizer_params"])
def test_moment_rounding_comes_from_the_config_and_draws_from_the_seed(where: str) -> None:
    given = {"moment_rounding": "stochastic"}
    config = COATConfig.from_dict({"optimizer": given} if where == "block" else {})
    found = []
    for seed in (3, 4):
        params = make_params([(64, 64)])
        optimizer = build_optimizer(params, 1e-3, config, given if where == "optimizer_params" else None, seed=seed)
        run(optimizer, params, range(2))
        found.append(optimizer.state_dict())
    (first, second), groups = [made["state"][0] for made in found], [made["param_groups"][0] for made in found]
    assert [(group["seed"], group["fp8"]["moment_rounding"]) for group in groups] == [
        (3, "stochastic"),
        (4, "stochastic"),
    ]
    assert torch.equal(first["exp_avg"].view(torch.uint8), second["exp_avg"].view(torch.uint8))
    assert not torch.equal(first["exp_avg_sq"].view(torch.uint8), second["exp_avg_sq"].view(torch.uint8))


def test_unknown_optimizer_param_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        build_optimizer(make_params(), 1e-3, COATConfig(), {"blok_size": 64})
