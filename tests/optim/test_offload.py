"""`FP8AdamW(offload="cpu")`: the bits of the optimizer without it, through slots of bounded size."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.ops.packing import CHUNK_ELEMENTS_CPU
from coat_core.optim import FP8AdamW
from coat_core.optim.offload import SLOTS, Staging, pin, staging_bytes
from coat_core.optim.sharded import ShardedFP8AdamW
from coat_core.optim.state import empty_moment, storages
from coat_flux.blocks.held import HeldParts, HeldTensors, state_tensors
from coat_flux.watch.casts import CastProbe
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, make_params, set_grads

SHAPES = [(16, 64), (1,), (), (129,), (0, 4), (3, 5, 11), (700, 400), (7,)]  # 280,000 elements do not fit a slot
DRAWN = FP8QuantizationConfig(moment_rounding="stochastic", stochastic_rounding=True)
KINDS = {name: CONFIGS[name] for name in ("default", "unquantized", "only_m1", "integers_block_48")} | {
    "drawn": DRAWN,
    "integers, drawn": replace(CONFIGS["integers"], moment_rounding="stochastic", stochastic_rounding=True),
}
CPU = torch.device("cpu")


def train(optimizer: FP8AdamW, params: list[Parameter], steps: range, fused: bool) -> None:
    """Steps of all parameters at once, or of each by itself in the order of a backward pass."""
    for step in steps:
        set_grads(params, step)
        if not fused:
            optimizer.step()
        for param in reversed(params) if fused else ():
            optimizer.step_parameter(param)


def assert_same(left: FP8AdamW, right: FP8AdamW) -> None:
    one, other = left.state_dict()["state"], right.state_dict()["state"]
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert state.keys() == other[index].keys()
        for key, value in state.items():
            assert_bitwise(value, other[index][key])
    for a, b in zip(params_of(left), params_of(right), strict=True):
        assert_bitwise(a.detach(), b.detach())


def params_of(optimizer: FP8AdamW) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def through_file(optimizer: FP8AdamW) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_every_bit_is_that_of_moments_on_the_device(name: str, dtype: torch.dtype, fused: bool) -> None:
    made = []
    for offload in ("none", "cpu"):
        params = make_params(SHAPES, dtype)
        groups = [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "weight_decay": 0.3}]
        optimizer = FP8AdamW(groups, fp8_config=KINDS[name], seed=5, offload=offload)
        train(optimizer, params, range(3), fused and offload == "cpu")
        made.append(optimizer)
    assert_same(*made)
    assert made[1].staging[0].shape[0] * KINDS[name].block_size <= CHUNK_ELEMENTS_CPU < 700 * 400


def test_parameters_of_two_dtypes_some_without_gradient_some_not_contiguous() -> None:
    made = []
    for offload in ("none", "cpu"):
        params = [*make_params(SHAPES), *make_params(SHAPES, torch.bfloat16, seed=2)]
        params[6] = Parameter(params[6].detach().t().contiguous().t())
        assert not params[6].is_contiguous()
        optimizer = FP8AdamW(params, fp8_config=DRAWN, offload=offload)
        for step in range(4):
            set_grads(params, step)
            params[6].grad = params[6].grad.t().contiguous().t()
            for param in params[step % 3 :: 3]:
                param.grad = None
            optimizer.step()
        made.append(optimizer)
    assert_same(*made)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_a_step_that_is_skipped_leaves_everything(fused: bool) -> None:
    made = []
    for offload in ("none", "cpu"):
        params = make_params(SHAPES)
        optimizer = FP8AdamW(params, fp8_config=DRAWN, capturable=True, offload=offload)
        for step, skipped in enumerate([0.0, 1.0, 0.0]):
            optimizer.found_inf = torch.tensor(skipped)
            set_grads(params, step)
            if skipped:
                params[6].grad[500].fill_(torch.nan)
            for param in params if fused else ():
                optimizer.step_parameter(param)
            if not fused:
                optimizer.step()
        made.append(optimizer)
        assert optimizer.state[params[6]]["step"].item() == 2.0
    assert_same(*made)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("name", ["drawn", "integers, drawn"])
def test_a_run_goes_on_with_and_without_offload(name: str, fused: bool) -> None:
    params = make_params(SHAPES, torch.bfloat16)
    whole = FP8AdamW(params, fp8_config=KINDS[name])
    start = copy.deepcopy(whole)
    train(whole, params, range(6), False)
    last: FP8AdamW = start
    for number, offload in enumerate(("cpu", "none", "cpu")):
        params = [Parameter(param.detach().clone()) for param in params_of(last)]
        resumed = FP8AdamW(params, fp8_config=KINDS[name], offload=offload)
        if number:
            resumed.load_state_dict(through_file(last))
            assert {state["exp_avg"].device for state in resumed.state.values()} == {CPU}
        train(resumed, params, range(2 * number, 2 * number + 2), fused)
        last = resumed
    assert_same(whole, last)


def test_a_copy_of_the_optimizer_is_offloaded_too() -> None:
    params = make_params(SHAPES)
    optimizer = FP8AdamW(params, offload="cpu")
    train(optimizer, params, range(2), False)
    twin = copy.deepcopy(optimizer)
    train(twin, params_of(twin), range(2, 4), True)
    train(optimizer, params, range(2, 4), False)
    assert_same(optimizer, twin)
    assert len(twin.staging) == 4 * SLOTS


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [1000, 3 * CHUNK_ELEMENTS_CPU])
def test_what_the_slots_take_is_known(name: str, size: int) -> None:
    params = [Parameter(torch.zeros(size)), Parameter(torch.zeros(5))]
    optimizer = FP8AdamW(params, fp8_config=KINDS[name], offload="cpu")
    assert optimizer.staging == []
    optimizer.make_states()
    assert sum(x.nbytes for x in optimizer.staging) == staging_bytes(KINDS[name], [size, 5], CPU)
    assert FP8AdamW(params, fp8_config=KINDS[name]).staging == []
    parts = HeldParts(CPU)  # as a run's ledger of memory counts
    parts.add("optimizer", optimizer, state_tensors)
    moments = sum(
        x.nbytes for codes, numbers in optimizer._packed.devices[CPU].moments.values() for x in (codes, numbers)
    )
    assert parts.count()["optimizer"] == moments + staging_bytes(KINDS[name], [size, 5], CPU) + 2 * 4  # and steps


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "another format"])
def test_a_load_holds_the_moments_once(offload: str, changed: bool) -> None:
    """The packed buffers, what one parameter's conversion takes, and nothing else; codes of 1.3 million elements."""
    shapes = [(16, 512)] * 160
    old = make_params(shapes)
    saved = FP8AdamW(old, fp8_config=CONFIGS["integers"] if changed else DRAWN)
    train(saved, old, range(1), False)
    file = through_file(saved)
    params = make_params(shapes)
    optimizer = FP8AdamW(params, fp8_config=DRAWN, offload=offload)
    with HeldTensors() as held:
        optimizer.load_state_dict(file)
        assert held.peak <= optimizer.state_bytes() * 1.01 + sum(x.nbytes for x in optimizer.staging) + (
            16 * 4 * 16 * 512 if changed else 0
        )
        after = held.now
        optimizer.make_states()
        assert held.peak < 2 * optimizer.state_bytes()
        assert held.now - after <= 160 * 2 * 8  # streams of the draws
    if not changed:
        assert_same(saved, _with_params(optimizer, old))


def _with_params(optimizer: FP8AdamW, params: list[Parameter]) -> FP8AdamW:
    for own, other in zip(params_of(optimizer), params, strict=True):
        own.data.copy_(other)
    return optimizer


def test_a_seed_that_changes_after_a_load_is_drawn_from() -> None:
    """The stand-alone trainer puts the config's values back into the groups that came from a file."""
    params, ends = make_params([(64, 64)]), []
    saved = FP8AdamW(params, fp8_config=DRAWN, seed=1)
    train(saved, params, range(1), False)
    file = through_file(saved)
    for seed, given in ((2, None), (1, 2)):  # as built; of the file, then put back
        twins = [Parameter(param.detach().clone()) for param in params]
        optimizer = FP8AdamW(twins, fp8_config=DRAWN, seed=seed)
        file["param_groups"][0]["seed"] = seed
        optimizer.load_state_dict(file)
        optimizer.param_groups[0]["seed"] = given or seed
        train(optimizer, twins, range(1, 3), True)
        ends.append(optimizer)
    assert_same(*ends)


def test_blocks_on_their_way_out_of_a_slot_come_back_to_it() -> None:
    """On a GPU the copy of the same blocks into another slot would not wait for it."""
    stored = storages(FP8QuantizationConfig())
    staging = Staging({name: empty_moment(9, storage, CPU) for name, storage in stored.items()}, stored, CPU)
    rows = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 9)]
    slots = [slot["exp_avg"].codes.data_ptr() for slot in staging._slots]
    used = []
    for number in (0, 0, 1, 0, 2, 3, 0):
        with staging.blocks(rows[number]) as moments:
            used.append(slots.index(moments["exp_avg"].codes.data_ptr()))
    assert used == [0, 0, 1, 0, 2, 0, 1]


def test_memory_that_cannot_be_pinned_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []
    fails = SimpleNamespace(cudaHostRegister=lambda *args: given.append(args) or 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fails)
    memory: Tensor = torch.zeros(300, dtype=torch.float32)
    launches: list[str] = []

    def launch(_: int, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")  # which the failed call left behind

    monkeypatch.setattr(torch, "ones", launch)
    with caplog.at_level(logging.WARNING):
        pin(memory, "optimizer.offload", "use less")
        pin(torch.zeros(0), "optimizer.offload", "use less")
    assert given == [(memory.data_ptr(), 1200, 0)]
    (line,) = caplog.messages
    assert line.startswith("optimizer.offload: 0.00 GB of host memory cannot be pinned (CUDA error 2): copies are slow")
    assert line.endswith("free some memory, or use less")
    assert launches == ["cuda"]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params([(4, 4)])
    with pytest.raises(ValueError, match="offload='gpu': must be one of none, cpu"):
        FP8AdamW(params, offload="gpu")
    with pytest.raises(ValueError, match="offload='cpu': not for sharded parameters"):
        ShardedFP8AdamW({"weight": params[0]}, offload="cpu")


def test_a_probe_takes_the_parts_of_a_parameter_for_one() -> None:
    params = make_params([(700, 400), (64,)], torch.bfloat16)
    optimizer, found = FP8AdamW(params, offload="cpu"), CastProbe(None, {"b.weight": params[0], "b.bias": params[1]})
    set_grads(params, 0)
    with found as probe:
        optimizer.step()
    rows = {(row.layer, row.kind): row.elements for row in probe.rows(1)}
    moments = ("exp_avg", "exp_avg_sq")
    assert rows == {(f"b.{name}", kind): n for name, n in (("weight", 280_000), ("bias", 64)) for kind in moments}
