"""What `torch.optim` asks of an optimizer, as a table: torch's AdamW does each case, then FP8AdamW.

A case returns what must be equal to the bit with moments in fp32; with 8-bit moments its own assertions count.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from coat_core.optim import FP8AdamW
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import CONFIGS, UNQUANTIZED, copies, make_params, params_of, run, through_file

Make = Callable[..., torch.optim.Optimizer]
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),  # of the betas, too
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.LinearLR(o)]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def _trained(make: Make, steps: int = 3, **options: Any) -> torch.optim.Optimizer:
    optimizer = make(make_params(), **options)
    run(optimizer, params_of(optimizer), range(steps))
    return optimizer


def _same_from_here(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> list[Tensor]:
    for optimizer in (one, other):
        run(optimizer, params_of(optimizer), range(3, 5))
    for a, b in zip(params_of(one), params_of(other), strict=True):
        assert_bitwise(a.detach().contiguous(), b.detach().contiguous())
    return params_of(one)


def closure(make: Make, tmp_path: Path) -> list[Any]:
    param = Parameter(torch.tensor([3.0, -1.0]))
    optimizer = make([param], lr=0.1)

    def loss() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = (param**2).sum()
        value.backward()
        return value

    with torch.no_grad():
        values = [optimizer.step(loss).item() for _ in range(3)]
    assert values == sorted(values, reverse=True)
    return [values, param]


def grad_scaler(make: Make, tmp_path: Path) -> list[Any]:
    (param,) = params = make_params([(5, 20)])
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale((param**2).sum()).backward()
        if step == 2:
            param.grad[0] = torch.inf
        before = param.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(before, param) == (step == 2)
        scaler.update()
    return [param, optimizer.state[param]["step"], scaler.get_scale()]


def distributed_checkpoint(make: Make, tmp_path: Path) -> list[Any]:
    models = [nn.Sequential(nn.Linear(20, 7), nn.Linear(7, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model.parameters()) for model in models]
    run(optimizers[0], params_of(optimizers[0]), range(3))
    models[1].load_state_dict(models[0].state_dict())
    dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=tmp_path, no_dist=True)
    state = get_optimizer_state_dict(models[1], optimizers[1])  # does a step at lr 0 to make the states
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(models[1], optimizers[1], state)
    _same_from_here(*optimizers)
    return [list(state["state"])]


def step_hooks(make: Make, tmp_path: Path) -> list[Any]:
    optimizer, order = _trained(make), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("every pre")),
        register_optimizer_step_post_hook(lambda *_: order.append("every post")),
        optimizer.register_step_pre_hook(lambda *_: order.append("pre")),
        optimizer.register_step_post_hook(lambda *_: order.append("post")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert order == ["every pre", "pre", "post", "every post"]
    return params_of(optimizer)


def state_hooks(make: Make, tmp_path: Path) -> list[Any]:
    """Also what a hook keeps in the state under a key of its own."""
    optimizer, twin = _trained(make), make(make_params())
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(mine={"n": 1}))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "saved": True})
    twin.register_load_state_dict_pre_hook(lambda _, state: state["param_groups"][0].update(lr=5.0))
    twin.register_load_state_dict_post_hook(lambda o: o.param_groups[0].update(lr=2 * o.param_groups[0]["lr"]))
    state = optimizer.state_dict()
    twin.load_state_dict(copy.deepcopy(state))  # torch's would share the moments
    for each in (optimizer, twin):
        run(each, params_of(each), range(3, 5))
    return [state["saved"], twin.state["mine"], twin.param_groups[0]["lr"], *params_of(twin)]


def copied(make: Make, tmp_path: Path) -> list[Any]:
    optimizer = _trained(make)
    assert vars(copy.deepcopy(optimizer)).keys() >= {key for key in vars(optimizer) if not key.startswith("_")}
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)  # pickle.loads fails for any FP8 tensor of torch
    buffer.seek(0)
    return _same_from_here(copy.deepcopy(optimizer), torch.load(buffer, weights_only=False))


def loaded_before_and_after_a_step(make: Make, tmp_path: Path) -> list[Any]:
    fresh = make(make_params())
    assert fresh.state_dict()["state"] == {}
    fresh.load_state_dict(through_file(fresh.state_dict()))
    assert "exp_avg" not in str(fresh.state_dict())
    optimizer = _trained(make)
    state = through_file(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = entry["step"].item()  # as torch saved it before 1.12
    for flag in ("maximize", "capturable"):  # nor were they in files then
        del state["param_groups"][0][flag]
    twin = make(copies(params_of(optimizer)))
    twin.load_state_dict(state)
    return _same_from_here(optimizer, twin)


def loaded_by_position_in_another_dtype(make: Make, tmp_path: Path) -> list[Any]:
    params = make_params([(6, 40), (6, 40)])
    optimizer = make(params)
    run(optimizer, params, range(3))
    halves = [Parameter(param.detach().bfloat16()) for param in reversed(params)]
    twin = make(halves)
    twin.load_state_dict(optimizer.state_dict())
    run(twin, halves, range(3, 5))
    assert all(param.isfinite().all() and param.dtype == torch.bfloat16 for param in halves)
    return [twin.state[halves[0]]["step"]]


def named_parameters(make: Make, tmp_path: Path) -> list[Any]:
    layer = nn.Linear(20, 7)
    with torch.no_grad():
        layer.weight.copy_(make_params([(7, 20)])[0])
        layer.bias.zero_()
    optimizer = make(layer.named_parameters())
    run(optimizer, params_of(optimizer), range(3))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    make(copies(params_of(optimizer))).load_state_dict(state)
    return params_of(optimizer)


def groups_with_options(make: Make, tmp_path: Path) -> list[Any]:
    params = make_params()
    groups = [
        {"params": params[0], "lr": torch.tensor(1e-2), "weight_decay": 0.3, "foreach": False, "fused": None},
        {"params": params[1:4], "betas": (0.5, 0.9), "maximize": True, "eps": 1e-4, "note": "mine"},
    ]
    optimizer = make(groups, lr=1e-4)
    run(optimizer, params[:4], range(2))
    optimizer.add_param_group({"params": params[4:], "lr": 5e-3})
    run(optimizer, params, range(2, 4))
    assert optimizer.state_dict()["param_groups"][1]["note"] == "mine"
    assert "lr: " in repr(optimizer)
    return params


def zero_grad(make: Make, tmp_path: Path) -> list[Any]:
    optimizer = _trained(make, 1)
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in params_of(optimizer))
    optimizer.step()  # counts, and decays
    optimizer.zero_grad()
    assert all(param.grad is None for param in params_of(optimizer))
    optimizer.step()  # does nothing
    return [optimizer.state[params_of(optimizer)[0]]["step"], *params_of(optimizer)]


def tensors_for_numbers(make: Make, tmp_path: Path) -> list[Any]:
    lr = torch.tensor(1e-2)
    optimizer = _trained(make, lr=lr)
    lr.mul_(0.5)  # the group has the tensor itself, as schedulers expect
    run(optimizer, params_of(optimizer), range(3, 4))
    numbers = _trained(make, betas=(0.5, 0.75))
    tensors = _trained(make, betas=(torch.tensor(0.5), torch.tensor(0.75)))  # torch rounds them otherwise
    for a, b in zip(params_of(numbers), params_of(tensors), strict=True):
        torch.testing.assert_close(a, b)
    return params_of(optimizer)


def no_cycle_keeps_it(make: Make, tmp_path: Path) -> list[Any]:
    optimizer = _trained(make)
    lr_scheduler.StepLR(optimizer, 2)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    return []


def scheduled(name: str, make: Make, tmp_path: Path) -> list[Any]:
    optimizer, seen = _trained(make, 1), []
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(4):
        run(optimizer, params_of(optimizer), range(step, step + 1))
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        seen.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
    again = SCHEDULERS[name](optimizer)
    again.load_state_dict(scheduler.state_dict())
    return [seen, *params_of(optimizer)]


CASES: dict[str, Callable[[Make, Path], list[Any]]] = {
    case.__name__: case
    for case in (
        *(closure, grad_scaler, distributed_checkpoint, step_hooks, state_hooks, copied, named_parameters),
        *(loaded_before_and_after_a_step, loaded_by_position_in_another_dtype, groups_with_options),
        *(zero_grad, tensors_for_numbers, no_cycle_keeps_it),
    )
} | {name: partial(scheduled, name) for name in SCHEDULERS}


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_adamw_does(case: str, tmp_path: Path) -> None:
    torch_adamw = partial(torch.optim.AdamW, foreach=False)
    results = []
    for name, make in {
        "torch": torch_adamw,
        "unquantized": FP8AdamW,
        "default": FP8AdamW,
        "integers": FP8AdamW,
    }.items():
        torch.manual_seed(1)
        options = {} if name == "torch" else {"fp8_config": CONFIGS[name]}
        results.append(CASES[case](partial(make, **options), tmp_path / name))
    for theirs, ours in zip(results[0], results[1], strict=True):
        if isinstance(theirs, Tensor):
            assert_bitwise(theirs.detach(), ours.detach())
        else:
            assert theirs == ours


def test_the_table_has_every_scheduler() -> None:
    classes = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
    schedulers = {kind.__name__ for kind in classes if hasattr(kind, "get_last_lr")} - {"LRScheduler", "_LRScheduler"}
    assert schedulers <= SCHEDULERS.keys()


p, q = (Parameter(torch.zeros(3)) for _ in range(2))
ERRORS: dict[str, Callable[[Make], Any]] = {
    "None": lambda make: make(None),
    "None, and a value out of range": lambda make: make(None, weight_decay=-1),
    "no parameter": lambda make: make([]),
    "a tensor": lambda make: make(p),
    "numbers": lambda make: make([1.0]),
    "a set": lambda make: make([{"params": {p}}]),
    "not a leaf": lambda make: make([p * 2]),
    "in two groups": lambda make: make([{"params": p}, {"params": p}]),
    "in another group": lambda make: make([p]).add_param_group({"params": [p, q]}),
    "not a group": lambda make: make([p]).add_param_group([q]),
    "a name missing": lambda make: make([("p", p), q]),
    "a group without names": lambda make: make([{"params": [p]}, {"params": [("q", q)]}]),
    "lr below 0": lambda make: make([p], lr=-1.0),
    "lr of two": lambda make: make([p], lr=torch.tensor([1.0, 2.0])),
    "eps": lambda make: make([p], eps=-1e-8),
    "beta 0": lambda make: make([p], betas=(1.0, 0.0)),
    "beta 1": lambda make: make([p], betas=(0.9, -0.1)),
    "mixed betas": lambda make: make([p], betas=(0.9, torch.tensor(0.99))),
    "fewer parameters": lambda make: make([p]).load_state_dict(make([p, q]).state_dict()),
}


@pytest.mark.parametrize("case", ERRORS)
def test_its_errors_are_adamws(case: str) -> None:
    with pytest.raises((TypeError, ValueError)) as theirs:
        ERRORS[case](torch.optim.AdamW)
    with pytest.raises(type(theirs.value)) as ours:
        ERRORS[case](partial(FP8AdamW, fp8_config=UNQUANTIZED))
    if case != "fewer parameters":  # ours names the file and the remedy
        assert str(ours.value).startswith(str(theirs.value))


def test_a_duplicate_is_warned_of_and_updated_once() -> None:
    (once,), (twice,) = make_params([(7,)]), make_params([(7,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FP8AdamW([("a", twice), ("a", twice)])
    with warnings.catch_warnings(action="error"):
        run(optimizer, params_of(optimizer), range(2))
        run(FP8AdamW([once]), [once], range(2))
    assert_bitwise(once.detach(), twice.detach())
    assert optimizer.param_groups[0]["param_names"] == ["a"]


@pytest.mark.parametrize(("default", "groups", "result"), [(False, [True, True], True), (True, [False], False)])
def test_groups_that_agree_say_what_is_capturable(default: bool, groups: list[bool], result: bool) -> None:
    params = make_params()
    said = [{"params": params[i :: len(groups)], "capturable": value} for i, value in enumerate(groups)]
    optimizer = FP8AdamW(said, capturable=default)
    assert {group["capturable"] for group in optimizer.param_groups} == {optimizer.defaults["capturable"]} == {result}
    with pytest.raises(ValueError, match="'capturable'"):
        optimizer.add_param_group({"params": make_params(), "capturable": default})
    assert len(optimizer.param_groups) == len(groups)
    with pytest.raises(ValueError, match="'capturable'"):
        FP8AdamW([{"params": params[:1], "capturable": result}, {"params": params[1:]}], capturable=default)
