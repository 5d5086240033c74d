"""Optimizers of other packages in the stand-alone trainer: ai-toolkit's arithmetic, resume to the bit, refusals."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coat_flux.config.ai_toolkit_keys import BLOCKS
from coat_flux.config.check import check_job_dict
from coat_flux.config.coat import COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import optimizer_bytes
from coat_flux.saves.errors import ResumeError
from coat_flux.trainers.optimizer import CLASSES, make_optimizer, restore_optimizer
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.engine_job import FEW_LINEARS, engine_job, rows

OTHERS = ("prodigy", "adafactor", "lion")
PARAMS: dict[str, dict[str, Any]] = {
    "prodigy": {"weight_decay": 0.01, "d0": 1e-4, "safeguard_warmup": True},
    "adafactor": {"weight_decay": 0.01, "beta1": 0.9},
    "lion": {"weight_decay": 0.01},
}


def need(optimizer: str) -> None:
    pytest.importorskip(CLASSES[optimizer][0].split(".")[0])


def job(name: str, place: dict[str, Path], optimizer: str, **train: Any) -> dict[str, Any]:
    settings = {"optimizer_params": PARAMS.get(optimizer), "steps": 4, **train}
    return engine_job(name, **place, train={**settings, "optimizer": optimizer}, network=FEW_LINEARS)


def test_prodigy_trains_and_resumes_to_the_bit(place):
    """It is the hard one: what it learns stands among the hyper-parameters, which a resume takes from the YAML."""
    need("prodigy")
    settings = job("prodigy", place, "prodigy", steps=3)
    settings["config"]["process"][0]["save"]["save_every"] = 2
    final = COATTrainer(settings).train()
    expected, seen = load_file(final), []
    found = load_file(COATTrainer(settings, observer=seen.append).train(from_step=2))
    assert_all_bitwise(found, expected)
    assert any(up.any() for name, up in found.items() if ".lora_B." in name)
    group = seen[-1].optimizer.param_groups[0]
    assert (len(seen), group["lr"]) == (2, 1.0)
    assert optimizer_bytes(JobFacts(seen[-1].job)) == state_bytes(seen[-1].optimizer)
    rates = [float(row["lr"]) for row in rows(final.parent)]
    assert rates[0] == 1e-4
    assert group["d"] > rates[-1]


def test_adafactor_trains_and_its_state_is_not_anothers(place):
    seen: list[Any] = []
    final = COATTrainer(job("changed", place, "adafactor", steps=1), observer=seen.append).train()
    assert any(up.any() for name, up in load_file(final).items() if ".lora_B." in name)
    assert optimizer_bytes(JobFacts(seen[-1].job)) == state_bytes(seen[-1].optimizer)
    with pytest.raises(ResumeError, match=r"written by adafactor, which train\.optimizer=adamw cannot read"):
        COATTrainer(job("changed", place, "adamw", optimizer_params={}, steps=2)).train()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.ndim)


def do_steps(made: torch.optim.Optimizer, grads: list[list[torch.Tensor]]) -> None:
    for step in grads:
        for p, grad in zip(made.param_groups[0]["params"], step, strict=True):
            p.grad = grad.clone()
        made.step()


@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_saved_state_goes_on_to_the_bit(tmp_path, optimizer):
    need(optimizer)
    start = [torch.randn(4, 32), torch.zeros(48, 4)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(4)]

    def make(values: list[torch.Tensor]) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        params = [torch.nn.Parameter(value.detach().clone()) for value in values]
        return params, make_optimizer(optimizer, params, 1e-3, COATConfig(), PARAMS[optimizer])

    params, made = make(start)
    do_steps(made, grads[:2])
    torch.save(made.state_dict(), tmp_path / "optimizer.pt")
    again, resumed = make(params)
    assert restore_optimizer(resumed, torch.load(tmp_path / "optimizer.pt", weights_only=True)) == []
    do_steps(made, grads[2:])
    do_steps(resumed, grads[2:])
    for left, right in zip(params, again, strict=True):
        assert_bitwise(right.detach(), left.detach())


@pytest.mark.parametrize("optimizer", OTHERS)
def test_parameters_are_the_classes(place, optimizer):
    need(optimizer)
    module, cls, _ = CLASSES[optimizer]
    taken = set(inspect.signature(getattr(importlib.import_module(module), cls)).parameters)
    known = {key: json.loads(row["default"]) for key, row in BLOCKS[optimizer].items()}
    assert set(known) == taken - {"params", "lr", "fsdp_in_use"}
    default = make_optimizer(optimizer, [torch.nn.Parameter(torch.ones(2, 2))], 1.0, COATConfig(), {})
    group = default.param_groups[0]
    limits = {"growth_rate": float("inf")}  # no limit is no number of YAML's
    for key in known.keys() & group.keys():
        expected = limits.get(key, known[key])
        assert (tuple(expected) if isinstance(expected, list) else expected) == group[key], key


@pytest.mark.parametrize(
    ("optimizer", "params", "said"),
    [
        ("prodigy", {"d_coeff": 2.0}, "optimizer_params.d_coeff: unknown key; did you mean 'd_coef'?"),
        ("prodigy", {"d0": 0.0}, "d0=0.0: must be a number above 0"),
        ("adafactor", {"relative_step": True}, "relative_step=true: must be one of false"),
        ("adafactor", {"eps": 1e-30}, "eps=1e-30: must be a list of two numbers"),
        ("lion", {"eps": 1e-8}, "optimizer_params.eps: unknown key; known here: betas, decoupled_weight_decay"),
        ("prodigy", None, "train.optimizer='prodigy': needs the package prodigyopt; pip install prodigyopt"),
        ("lion", None, "train.optimizer='lion': needs the package lion-pytorch; pip install lion-pytorch"),
    ],
)
def test_wrong_parameters_and_missing_packages_are_told_before_the_model(place, monkeypatch, optimizer, params, said):
    if params is None:
        find, hidden = importlib.util.find_spec, CLASSES[optimizer][0]
        patched = "importlib.util.find_spec"
        monkeypatch.setattr(patched, lambda name, *rest: None if name == hidden else find(name, *rest))
    else:
        need(optimizer)
    wrong = job("wrong", place, optimizer, optimizer_params=params or {}, lr=1e-3)
    assert said in next(item.line() for item in check_job_dict(wrong) if item.severity == "error")
    with pytest.raises(ConfigError, match=re.escape(said)):
        COATTrainer(wrong).train()
    assert not (place["out"] / "wrong").exists()


HOST_STEPS = """
import sys, torch
start, grads, wanted, places = torch.load(sys.argv[1])
sys.path += places  # last: everything else is the host's own
from toolkit.optimizer import get_optimizer
for key in wanted:
    ps = [torch.nn.Parameter(p.clone()) for p in start]
    opt = get_optimizer(ps, key, 1e-3, wanted[key])
    for step in grads:
        for p, g in zip(ps, step):
            p.grad = g.clone()
        opt.step()
    wanted[key] = [p.detach() for p in ps]
torch.save(wanted, sys.argv[2])
"""


@pytest.mark.aitk
def test_same_steps_as_ai_toolkits(tmp_path):
    """The host's `get_optimizer`, its own Adafactor among them, against ours on the same numbers."""
    found = {name: importlib.util.find_spec(CLASSES[name][0].split(".")[0]) for name in OTHERS}
    names = [name for name, spec in found.items() if spec is not None]
    places = [str(Path(found[name].origin).parents[1]) for name in names]
    start = [torch.randn(4, 32), torch.zeros(48, 4)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(5)]
    torch.save((start, grads, {name: PARAMS[name] for name in names}, places), tmp_path / "in.pt")
    python = os.environ.get("AI_TOOLKIT_PYTHON", sys.executable)
    command = [python, "-c", HOST_STEPS, str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, cwd=os.environ["AI_TOOLKIT_ROOT"], check=True, capture_output=True)
    theirs = torch.load(tmp_path / "out.pt")
    for name in names:
        ours = [torch.nn.Parameter(p.clone()) for p in start]
        do_steps(make_optimizer(name, ours, 1e-3, COATConfig(), PARAMS[name]), grads)
        for mine, other in zip(ours, theirs[name], strict=True):
            assert_bitwise(mine.detach(), other)
