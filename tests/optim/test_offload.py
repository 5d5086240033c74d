"""`FP8AdamW(offload="cpu")`: the bits of the optimizer without it, through slots of bounded size."""

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from coat_core.config import FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from coat_core.optim.offload import SLOTS, Staging, pin, staging_bytes
from coat_core.optim.sharded import ShardedFP8AdamW
from coat_core.optim.state import empty_moment, storages
from coat_flux.blocks.held import HeldParts, HeldTensors
from coat_flux.watch.casts import CastProbe
from tests.optim.common import CONFIGS, assert_same, copies, make_params, params_of, set_grads, through_file

LIMIT = 4096  # elements of a slot
# 7,000 elements do not fit a slot, and with its padding the last one does not fit beside the rest of them
SHAPES = [(16, 64), (1,), (), (129,), (0, 4), (3, 5, 11), (70, 100), (1100,), (7,)]
DRAWN = FP8QuantizationConfig(moment_rounding="stochastic", stochastic_rounding=True)
KINDS = {name: CONFIGS[name] for name in ("default", "unquantized", "only_m1")} | {
    "integers_block_96": replace(CONFIGS["integers"], block_size=96),  # torch's vector loops take 32 elements at once
    "drawn": DRAWN,
    "integers, drawn": replace(CONFIGS["integers"], moment_rounding="stochastic", stochastic_rounding=True),
}
CPU = torch.device("cpu")
each_way = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coat_core.optim.offload.chunk_elements", lambda _: LIMIT)


def step_all(optimizer: FP8AdamW, fused: bool) -> None:
    """A step of all parameters at once, or of each by itself in the order of a backward pass."""
    if not fused:
        optimizer.step()
        return
    for param in reversed(params_of(optimizer)):
        if param.grad is not None:
            optimizer.step_parameter(param)


def train(optimizer: FP8AdamW, steps: range, fused: bool) -> FP8AdamW:
    for step in steps:
        set_grads(params_of(optimizer), step)
        step_all(optimizer, fused)
    return optimizer


@pytest.mark.parametrize(("offload", "fused"), [("none", True), ("cpu", False), ("cpu", True)])
@pytest.mark.parametrize("name", KINDS)
def test_every_bit_is_that_of_one_step_with_moments_on_the_device(name, offload, fused):
    made = []
    for way in (("none", False), (offload, fused)):
        params = make_params(SHAPES, torch.bfloat16 if "drawn" in name else torch.float32)
        groups = [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "weight_decay": 0.3}]
        made.append(train(FP8AdamW(groups, fp8_config=KINDS[name], seed=5, offload=way[0]), range(3), way[1]))
    assert_same(*made)
    if offload == "cpu":
        assert made[1].staging[0].shape[0] * KINDS[name].block_size <= LIMIT


@each_way
def test_two_dtypes_a_skipped_step_parameters_without_gradient_and_one_not_contiguous(fused):
    made = []
    for offload in ("none", "cpu"):
        params = [*make_params(SHAPES), *make_params(SHAPES, torch.bfloat16, seed=2)]
        params[6] = Parameter(params[6].detach().t().contiguous().t())
        assert not params[6].is_contiguous()
        optimizer = FP8AdamW(params, fp8_config=DRAWN, capturable=True, offload=offload)
        for step, skipped in enumerate([0.0, 0.0, 1.0, 0.0]):
            optimizer.found_inf = torch.tensor(skipped)
            set_grads(params, step)
            params[6].grad = params[6].grad.t().contiguous().t()
            if skipped:
                params[6].grad[50].fill_(torch.nan)
            for param in params[step % 3 :: 3]:
                param.grad = None
            step_all(optimizer, fused)
        made.append(optimizer)
        assert [optimizer.state[param]["step"].item() for param in params[:3]] == [1.0, 2.0, 3.0]
    assert_same(*made)


@each_way
def test_a_run_goes_on_with_and_without_offload(fused):
    name = "integers, drawn"
    whole = FP8AdamW(make_params(SHAPES, torch.bfloat16), fp8_config=KINDS[name])
    last = copy.deepcopy(whole)
    train(whole, range(6), False)
    for number, offload in enumerate(("cpu", "none", "cpu")):
        resumed = FP8AdamW(copies(params_of(last)), fp8_config=KINDS[name], offload=offload)
        if number:
            resumed.load_state_dict(through_file(last.state_dict()))
        last = train(resumed, range(2 * number, 2 * number + 2), fused)
    assert_same(whole, last)


def test_a_copy_of_the_optimizer_is_offloaded_too():
    optimizer = train(FP8AdamW(make_params(SHAPES), offload="cpu"), range(2), False)
    twin = copy.deepcopy(optimizer)
    assert_same(train(optimizer, range(2, 4), False), train(twin, range(2, 4), True))
    assert len(twin.staging) == 4 * SLOTS


@pytest.mark.parametrize(("name", "size"), [("default", 1000), ("integers, drawn", 3 * LIMIT)])
def test_what_the_slots_take_is_known(name, size):
    params = [Parameter(torch.zeros(size)), Parameter(torch.zeros(5))]
    optimizer = FP8AdamW(params, fp8_config=KINDS[name], offload="cpu")
    assert optimizer.staging == []
    optimizer.make_states()
    slots = staging_bytes(KINDS[name], [size, 5], CPU)
    assert sum(x.nbytes for x in optimizer.staging) == slots
    assert FP8AdamW(params, fp8_config=KINDS[name]).staging == []
    parts = HeldParts(CPU)  # as a run's ledger of memory counts
    parts.add("optimizer", optimizer)
    moments = sum(part.nbytes for moment in optimizer._packed.devices[0].moments.values() for part in moment)
    assert parts.count()["optimizer"] == moments + slots + 2 * 4  # and steps


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "another format"])
def test_a_load_holds_the_moments_once(offload, changed):
    """The packed buffers, what one parameter's conversion takes, and nothing else."""
    saved = FP8AdamW(make_params([(8, 64)] * 80), fp8_config=CONFIGS["integers"] if changed else DRAWN)
    file = through_file(train(saved, range(1), False).state_dict())
    optimizer = FP8AdamW(copies(params_of(saved)), fp8_config=DRAWN, offload=offload)
    with HeldTensors() as held:
        optimizer.load_state_dict(file)
        conversion = 16 * 4 * 8 * 64 if changed else 0
        assert held.peak <= optimizer.state_bytes() * 1.01 + sum(x.nbytes for x in optimizer.staging) + conversion
        after = held.now
        optimizer.make_states()
        assert held.peak < 2 * optimizer.state_bytes()
        assert held.now - after <= 80 * 2 * 8  # streams of the draws
    if not changed:
        assert_same(saved, optimizer)


def test_a_seed_that_changes_after_a_load_is_drawn_from():
    """The stand-alone trainer puts the config's values back into the groups that came from a file."""
    saved, ends = train(FP8AdamW(make_params([(64, 64)]), fp8_config=DRAWN, seed=1), range(1), False), []
    file = through_file(saved.state_dict())
    for in_file, put_back in ((2, 2), (1, 2)):
        optimizer = FP8AdamW(copies(params_of(saved)), fp8_config=DRAWN, seed=in_file)
        file["param_groups"][0]["seed"] = in_file
        optimizer.load_state_dict(file)
        optimizer.param_groups[0]["seed"] = put_back
        ends.append(train(optimizer, range(1, 3), True))
    assert_same(*ends)


def test_blocks_on_their_way_out_of_a_slot_come_back_to_it():
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


def test_memory_that_cannot_be_pinned_is_said(monkeypatch, caplog):
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
    assert all(part in line for part in ("optimizer.offload", "CUDA error 2", "use less"))
    assert launches == ["cuda"]


def test_what_cannot_be_is_refused():
    params = make_params([(4, 4)])
    with pytest.raises(ValueError, match="offload='gpu': must be one of none, cpu"):
        FP8AdamW(params, offload="gpu")
    with pytest.raises(ValueError, match="offload='cpu': not for sharded parameters"):
        ShardedFP8AdamW({"weight": params[0]}, offload="cpu")


def test_a_probe_takes_the_parts_of_a_parameter_for_one():
    params = make_params([(64,), (70, 100)], torch.bfloat16)
    set_grads(params, 0)
    with CastProbe(None, {"b.bias": params[0], "b.weight": params[1]}) as probe:
        FP8AdamW(params, offload="cpu").step()
    rows = {(row.layer, row.kind): row.elements for row in probe.rows(1)}
    moments = ("exp_avg", "exp_avg_sq")
    assert rows == {(f"b.{name}", kind): n for name, n in (("weight", 7000), ("bias", 64)) for kind in moments}
