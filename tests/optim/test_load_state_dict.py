"""Save, load, continue: bitwise where nothing changed, re-quantized where it did, refused where it does not fit."""

import logging
import re
from typing import Any

import pytest
import torch

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS, read_state, storages
from tests.helpers.asserts import assert_bitwise
from tests.optim import common

SHAPES = [(16, 20), (7,), (129,), (), (0, 4)]


def trained(config: FP8QuantizationConfig, dtype: torch.dtype = torch.float32) -> FP8AdamW:
    params = common.make_params(SHAPES, dtype)
    optimizer = FP8AdamW(params, fp8_config=config, seed=2**40 + 3)  # which is in the file
    common.run(optimizer, params, range(3))
    return optimizer


def resumed(optimizer: torch.optim.Optimizer, config: FP8QuantizationConfig) -> FP8AdamW:
    twin = FP8AdamW(common.copies(common.params_of(optimizer)), fp8_config=config)
    twin.load_state_dict(common.through_file(optimizer.state_dict()))
    return twin


def run_both(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        common.run(optimizer, common.params_of(optimizer), range(3, 6))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in common.CONFIGS), ("drawn", torch.bfloat16), ("drawn", torch.float16)],
)
def test_continuation_is_bitwise_equal(name, dtype, caplog):
    config = common.CONFIGS.get(name, FP8QuantizationConfig(stochastic_rounding=True))
    optimizer = trained(config, dtype)
    twin = resumed(optimizer, config)
    twin.load_state_dict(twin.state_dict())  # as accelerate's prepare does
    twin.load_state_dict(optimizer.state_dict())  # whose memory it does not share
    common.assert_same(optimizer, twin)
    torch.manual_seed(123)  # of no use to draws
    run_both(optimizer, twin)
    common.assert_same(optimizer, twin)
    assert not caplog.records


def test_group_values_come_from_the_file_but_fp8_and_parameters_do_not():
    optimizer = trained(common.CONFIGS["block_16"])
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    twin = FP8AdamW(params := common.copies(common.params_of(optimizer)), fp8_config=common.CONFIGS["default"])
    twin.load_state_dict(common.through_file(optimizer.state_dict()))
    group = twin.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert group["params"][0] is params[0]
    assert twin.state_dict()["param_groups"][0]["fp8"]["block_size"] == 128


CHANGES = [
    ("default", "e5m2_e4m3"), ("default", "block_16"), ("plain", "default"), ("unquantized", "default"),
    ("default", "unquantized"), ("default", "integers"), ("integers", "default"), ("integers", "integers_block_48"),
    ("ratio_fp32", "block_16"), ("unquantized", "integers"), ("integers", "unquantized"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_change_of_storage_requantizes_and_says_so_once(old, new, caplog):
    optimizer = trained(common.CONFIGS[old])
    twin = resumed(optimizer, common.CONFIGS[new])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    before, after = storages(common.CONFIGS[old]), storages(common.CONFIGS[new])
    for name in MOMENTS:
        change = f"{name}: {before[name].describe()} -> {after[name].describe()}, "
        assert (change in caplog.text) == (before[name] != after[name])
    for a, b in zip(common.params_of(optimizer), common.params_of(twin), strict=True):
        values = dict(zip(MOMENTS, read_state(optimizer.state[a], before), strict=True))
        for name in MOMENTS:
            if before[name] == after[name]:
                expected = common.stored(name, optimizer.state[a])
            elif after[name].format is None or not a.numel():
                expected = values[name].to(after[name].dtype)
            else:
                codes, *_ = common.quantize_like(name, *values.values(), after[name])
                expected = codes.reshape(-1)[: a.numel()].reshape(a.shape)
            assert_bitwise(common.stored(name, twin.state[b]), expected)
        assert twin.state[b]["step"].item() == 3.0
    run_both(twin)
    assert all(param.isfinite().all() for param in common.params_of(twin))
    caplog.clear()
    resumed(twin, common.CONFIGS[new])
    assert not caplog.records


def test_other_expansion_constants_keep_the_codes(caplog):
    optimizer = trained(common.CONFIGS["default"])
    other = FP8QuantizationConfig(expansion=ExpansionConfig(range_fraction=1.0, exponent_step=0.0))
    common.assert_same(optimizer, resumed(optimizer, other))
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["default", "unquantized"])
def test_adamw_file_is_taken_over(dtype, name, caplog):
    adamw = torch.optim.AdamW(common.make_params(SHAPES, dtype), lr=3e-4, foreach=False)
    common.run(adamw, common.params_of(adamw), range(3))
    twin = resumed(adamw, common.CONFIGS[name])
    assert ("exp_avg: fp32 -> e4m3 (block 128, expanded), re-quantized" in caplog.text) == (name == "default")
    assert set(twin.param_groups[0]) == set(FP8AdamW(common.make_params()).param_groups[0])
    assert twin.param_groups[0]["lr"] == 3e-4
    if name == "unquantized":
        for a, b in zip(common.params_of(adamw), common.params_of(twin), strict=True):
            assert_bitwise(twin.state[b]["exp_avg"], adamw.state[a]["exp_avg"].float())
    run_both(adamw, twin)
    assert twin.state[common.params_of(twin)[0]]["step"].item() == 6.0
    if name == "unquantized":
        assert not caplog.records
        if dtype == torch.float32:
            common.assert_same(adamw, twin)


def test_state_of_parameters_that_had_no_gradient_may_be_missing():
    params = common.make_params(SHAPES)
    optimizer = FP8AdamW(params)
    common.run(optimizer, params[:2], range(3))
    twin = resumed(optimizer, common.CONFIGS["default"])
    run_both(twin)
    assert [twin.state[param]["step"].item() for param in common.params_of(twin)] == [6.0, 6.0, 3.0, 3.0, 3.0]


CODES, RATIOS = (torch.zeros(16, 20, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.int8))


def _drop(key: str):
    return lambda file: file["state"][0].pop(key)


def _put(**tensors: torch.Tensor):
    return lambda file: file["state"][0].update(tensors)


def _say(**fp8: Any):
    return lambda file: file["param_groups"][0]["fp8"].update(fp8)


def _rename(old: str, new: str):
    return lambda file: file["state"][0].update({new: file["state"][0].pop(old)})


def _cast_all(file: dict[str, Any]) -> None:
    for state in file["state"].values():
        state.update({key: tensor.to(torch.bfloat16) for key, tensor in state.items() if key != "step"})


DAMAGE = {  # what the message must name
    "no exp_avg": (_drop("exp_avg_codes"), "state[0]['exp_avg'] is missing"),
    "codes under the name of values": (_rename("exp_avg_sq_codes", "exp_avg_sq"), "state[0]['exp_avg_sq']"),
    "no scale": (_drop("exp_avg_sq_scale"), "state[0]['exp_avg_sq_scale'] is missing"),
    "alien key": (_put(max_exp_avg_sq=torch.ones(16, 20)), "['max_exp_avg_sq']"),
    "codes of another shape": (_put(exp_avg_codes=CODES[:8]), "(8, 20)"),
    "scales of another shape": (_put(exp_avg_scale=torch.ones(7)), "['exp_avg_scale']"),
    "scale was cast": (_put(exp_avg_scale=torch.ones(3).bfloat16()), "['exp_avg_scale']"),
    "everything was cast": (_cast_all, "['exp_avg_codes'] is torch.bfloat16"),
    "no fp8 entry": (lambda file: file["param_groups"][0].pop("fp8"), "'fp8'=None"),
    "block size 0": (_say(block_size=0), "block_size=0"),
    "ratios with the numbers of e4m3": (_put(exp_avg_codes=RATIOS), "['exp_avg_center']"),
    "ratios as exp_avg_sq": (_put(exp_avg_sq_codes=RATIOS), "['exp_avg_sq_codes'] is torch.int8"),
    "expansion denied": (_say(use_dynamic_range_expansion=False), "['exp_avg_center']"),
    "fewer parameters": (lambda file: file["param_groups"][0]["params"].pop(), "[4]"),
    "not a state file": (lambda file: file.pop("state"), "'state' and 'param_groups'"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_does_not_fit_is_refused_and_nothing_changes(case, caplog):
    damage, message = DAMAGE[case]
    optimizer, before = trained(common.CONFIGS["default"]), trained(common.CONFIGS["default"])
    file = common.through_file(optimizer.state_dict())
    damage(file)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(file)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    common.assert_same(optimizer, before)
    assert optimizer.state_dict()["param_groups"] == before.state_dict()["param_groups"]
