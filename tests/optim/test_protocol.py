"""What torch.optim asks of an optimizer, as a table: with fp32 moments, what AdamW does; options of FP8AdamW."""

import copy
import io
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.optim import lr_scheduler

from coat_core.optim import FP8AdamW
from coat_core.optim.state import MOMENTS
from coat_flux.config.coat import COATConfig
from coat_flux.trainers.optimizer import build_optimizer
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, copies, make_params, params_of, run, stored, through_file

Make = Callable[..., torch.optim.Optimizer]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _trained(make: Make, **options: Any) -> torch.optim.Optimizer:
    optimizer = make(make_params(), **options)
    run(optimizer, params_of(optimizer), range(3))
    return optimizer


def _same_from_here(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> list[Tensor]:
    for optimizer in (one, other):
        run(optimizer, params_of(optimizer), range(3, 5))
    for a, b in zip(params_of(one), params_of(other), strict=True):
        assert_bitwise(a.detach().contiguous(), b.detach().contiguous())
    return params_of(one)


def closure_and_zero_grad(make: Make) -> list[Any]:
    param = Parameter(torch.tensor([3.0, -1.0]))
    optimizer = make([param], lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (param**2).sum()
        value.backward()
        return value

    with torch.no_grad():
        values = [optimizer.step(loss).item() for _ in range(3)]
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # counts, and decays
    optimizer.zero_grad()
    optimizer.step()  # does nothing
    return [values, param, optimizer.state[param]["step"]]


def grad_scaler(make: Make) -> list[Any]:
    (param,) = params = make_params([(5, 20)])
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale((param**2).sum()).backward()
        param.grad[0] += torch.inf if step == 2 else 0.0
        before = param.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(before, param) == (step == 2)
        scaler.update()
    return [param, optimizer.state[param]["step"], scaler.get_scale()]


def distributed_checkpoint(make: Make) -> list[Any]:
    models = [nn.Sequential(nn.Linear(20, 7), nn.Linear(7, 3)) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]
    run(optimizers[0], params_of(optimizers[0]), range(3))
    models[1].load_state_dict(models[0].state_dict())
    state = get_optimizer_state_dict(models[1], optimizers[1])  # does a step at lr 0 to make the states
    with TemporaryDirectory() as folder:
        dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=folder, no_dist=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(models[1], optimizers[1], state)
    _same_from_here(*optimizers)
    return [list(state["state"])]


def hooks(make: Make) -> list[Any]:
    """Also what a hook keeps in the state under a key of its own."""
    optimizer, twin, order = _trained(make), make(make_params()), []
    optimizer.register_step_pre_hook(lambda *_: order.append("pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("post"))
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(mine={"n": 1}))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "saved": True})
    twin.register_load_state_dict_pre_hook(lambda _, state: state["param_groups"][0].update(lr=5.0))
    twin.register_load_state_dict_post_hook(lambda o: o.param_groups[0].update(lr=2 * o.param_groups[0]["lr"]))
    state = optimizer.state_dict()
    twin.load_state_dict(copy.deepcopy(state))  # torch's would share the moments
    for each in (optimizer, twin):
        run(each, params_of(each), range(3, 5))
    assert order == 2 * ["pre", "post"]
    return [state["saved"], twin.state["mine"], twin.param_groups[0]["lr"], *params_of(twin)]


def copied(make: Make) -> list[Any]:
    optimizer, buffer = _trained(make), io.BytesIO()
    torch.save(optimizer, buffer)  # pickle.loads fails for any FP8 tensor of torch
    buffer.seek(0)
    return _same_from_here(copy.deepcopy(optimizer), torch.load(buffer, weights_only=False))


def loaded(make: Make) -> list[Any]:
    """Before the first step; a file of torch 1.11; by position, into bf16."""
    fresh, optimizer = make(make_params()), _trained(make)
    assert fresh.state_dict()["state"] == {}
    fresh.load_state_dict(through_file(fresh.state_dict()))
    state = through_file(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = entry["step"].item()
    del state["param_groups"][0]["maximize"]
    twin = make(copies(params_of(optimizer)))
    twin.load_state_dict(state)
    halves = [Parameter(param.detach().bfloat16()) for param in params_of(fresh)]
    half = make(halves)
    half.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(half, halves, range(3, 5))
    assert all(param.isfinite().all() for param in halves)
    return [half.state[halves[0]]["step"], *_same_from_here(optimizer, twin)]


def groups(make: Make) -> list[Any]:
    names, params = "abcdefgh", make_params()
    named = list(zip(names, params, strict=True))
    first = {"params": named[:1], "lr": torch.tensor(1e-2), "weight_decay": 0.3, "foreach": False, "fused": None}
    second = {"params": named[1:4], "betas": (0.5, 0.9), "maximize": True, "eps": 1e-4, "note": "mine"}
    optimizer = make([first, second], lr=1e-4)
    run(optimizer, params[:4], range(2))
    optimizer.add_param_group({"params": named[4:], "lr": 5e-3})
    optimizer.param_groups[0]["lr"].mul_(0.5)  # the tensor itself, as schedulers expect
    run(optimizer, params, range(2, 4))
    saved = optimizer.state_dict()["param_groups"]
    return [saved[1]["note"], "".join(name for group in saved for name in group["param_names"]), *params]


def scheduled(make: Make) -> list[Any]:
    """Both lr and betas."""
    optimizer, seen = _trained(make), []
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1e-2, 6)
    for step in range(4):
        run(optimizer, params_of(optimizer), range(step, step + 1))
        scheduler.step()
        seen.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
    return [seen, *params_of(optimizer)]


TABLE = (closure_and_zero_grad, grad_scaler, distributed_checkpoint, hooks, copied, loaded, groups, scheduled)
CASES = {case.__name__: case for case in TABLE}


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_adamw_does(case):
    results = []
    for name in ("torch", "unquantized", "default", "integers"):
        torch.manual_seed(1)
        ours = partial(FP8AdamW, fp8_config=CONFIGS.get(name))
        results.append(CASES[case](partial(torch.optim.AdamW, foreach=False) if name == "torch" else ours))
    for theirs, ours in zip(results[0], results[1], strict=True):
        if isinstance(theirs, Tensor):
            assert_bitwise(theirs.detach(), ours.detach())
        else:
            assert theirs == ours


def test_a_duplicate_is_warned_of_and_updated_once():
    (once,), (twice,) = make_params([(7,)]), make_params([(7,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FP8AdamW([("a", twice), ("a", twice)])
    run(optimizer, [twice], range(2))
    run(FP8AdamW([once]), [once], range(2))
    assert_bitwise(once.detach(), twice.detach())
    assert optimizer.param_groups[0]["param_names"] == ["a"]


# -- options ----------------------------------------------------------------------------------------------------------
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


REFUSED: list[tuple[str, Any]] = [
    ("lr", -1.0),
    ("lr", float("nan")),
    ("lr", torch.tensor([1.0, 2.0])),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("betas", (1.0, 0.0)),
    ("betas", (0.9, -0.1)),
    ("betas", (0.9, torch.tensor(0.99))),
    ("betas", (0.9,)),
    ("seed", -1),
    ("seed", 1.5),
    ("seed", True),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_is_out_of_range_is_refused_of_all_and_of_a_group(key, value):
    with pytest.raises(ValueError, match=key.removesuffix("s")):
        FP8AdamW(make_params(), **{key: value})
    optimizer = FP8AdamW(make_params()[:1])
    with pytest.raises(ValueError, match=key.removesuffix("s")):
        optimizer.add_param_group({"params": make_params(), key: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("key", "value"), [("fp8", {"block_size": 16}), ("seed", 3), ("amsgrad", True)])
def test_a_group_has_nothing_of_its_own_that_is_the_same_for_all(key, value):
    with pytest.raises(ValueError, match=key):
        FP8AdamW([{"params": make_params(), key: value}])


@pytest.mark.parametrize("said", [True, False])
def test_groups_that_agree_say_what_is_capturable(said):
    params = make_params()
    groups = [{"params": part, "capturable": said} for part in (params[:2], params[2:])]
    optimizer = FP8AdamW(groups, capturable=not said)
    assert {group["capturable"] for group in (*optimizer.param_groups, optimizer.defaults)} == {said}
    with pytest.raises(ValueError, match="'capturable'"):
        FP8AdamW([{"params": params[:2], "capturable": said}, {"params": params[2:]}], capturable=not said)


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
