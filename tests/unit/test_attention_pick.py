"""The attention kernel of a run: tried, timed, the fastest taken; forced, kept, remembered; the kernels are made up."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.ops import attention
from coat_flux.blocks import measure
from coat_flux.blocks.measure import AttentionPick, Picked
from coat_flux.config.coat import COATConfig
from coat_flux.saves.state import execution_of, keep_execution
from tests.helpers.flux import coat_flux_model, predict

OWN = "flash_cpu"  # what torch chooses here
NAMES = ("quick", "slow", "wrong", "refused")
TORCHS_FORWARD = attention.attention_forward
MS = {OWN: 2.0, "quick": 1.0, "slow": 4.0, "wrong": 0.1}


class Kernels:
    """Kernels that are torch's in turn under made-up names, with a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms, self.timed, self.tried = dict(MS), [], []
        for module in (measure, attention):
            monkeypatch.setattr(module, "use_kernel", self.use)
        monkeypatch.setattr(attention, "attention_forward", self.forward)
        monkeypatch.setattr(measure, "GPU_KERNELS", NAMES)
        monkeypatch.setattr(measure, "DEVICE", "cpu")
        monkeypatch.setattr(measure, "timed", self.clock)
        self.in_use: str | None = None

    def use(self, kernel: str | None, like: Tensor | None = None) -> None:
        if kernel == "refused":
            raise RuntimeError("CUDA error:\n not on this card")
        self.in_use = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        self.tried.append(self.in_use)
        out, context = TORCHS_FORWARD(q, k, v)
        return (-out if self.in_use == "wrong" else out), context

    def clock(self, once: Callable[[], Any], device: torch.device) -> float:
        once()
        self.timed.append(self.in_use)
        return self.ms[self.in_use or ""]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    attention.use_kernel(None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def like(tokens: int = 40) -> Tensor:
    return torch.empty(1, tokens, 2, 16, dtype=torch.bfloat16).transpose(1, 2)


def pick(kept: str | None = None, tokens: int = 40, **speed: str) -> tuple[AttentionPick, Picked]:
    chooses = AttentionPick(COATConfig.from_dict({"speed": {**speed}}))
    chooses.resumed = kept
    return chooses, chooses.choose(like(tokens))


def forced(kernel: str) -> AttentionPick:
    """A pick whose config names a made-up kernel."""
    chooses = AttentionPick(COATConfig())
    chooses._forced = kernel
    return chooses


def test_the_fastest_that_is_right_is_taken(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chooses, picked = pick()
    assert (picked.name, kernels.in_use, chooses.kernel) == ("quick", "quick", "quick")
    assert picked.milliseconds == {OWN: 2.0, "quick": 1.0, "slow": 4.0}
    assert picked.refused["refused"] == "RuntimeError: CUDA error: not on this card"
    assert picked.refused["wrong"].startswith("differs from plain matrix products by")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention: quick 1.00 ms (fastest at 40 tokens; flash_cpu 2.00 ms; slow 4.00 ms; wrong: ")


@pytest.mark.parametrize(("ms", "taken"), [(1.96, OWN), (1.90, "quick"), (2.5, OWN)])
def test_torchs_choice_stays_where_another_is_hardly_faster(kernels: Kernels, ms: float, taken: str) -> None:
    kernels.ms["quick"] = ms
    assert pick()[1].name == taken
    assert kernels.in_use == taken


def test_each_shape_is_measured_once_for_all_runs(kernels: Kernels) -> None:
    first = pick()[1]
    kernels.timed.clear()
    kernels.ms = dict.fromkeys(MS, 1.0)
    second = pick()[1]
    assert (second.name, second.milliseconds, kernels.timed) == (first.name, first.milliseconds, [])
    assert pick(tokens=48)[1].name == OWN
    assert kernels.timed


def test_a_remembered_kernel_that_no_longer_runs_costs_a_measurement(kernels: Kernels) -> None:
    pick()
    file = measure.cache_file()
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: {"refused": 0.5, "quick": 1.0}}))
    assert pick()[1].name == "quick"
    assert json.loads(file.read_text())[key] == {OWN: 2.0, "quick": 1.0, "slow": 4.0}


def test_nothing_is_tried_where_nothing_is_to_be_measured(kernels: Kernels) -> None:
    chooses, picked = pick(measure="never")
    assert (picked.name, picked.why, kernels.tried, kernels.in_use) == (OWN, "torch's choice", [], None)
    assert chooses.kernel == OWN


def test_a_run_that_no_kernel_suits_goes_on_with_torchs_choice(kernels: Kernels) -> None:
    kernels.forward = lambda *_: 1 / 0  # type: ignore[method-assign]
    attention.attention_forward = kernels.forward
    picked = pick()[1]
    assert (picked.name, picked.why) == (OWN, "torch's choice: no kernel passed the trial")
    assert set(picked.refused) == {OWN, *NAMES}
    assert (kernels.in_use, measure.cache_file().exists()) == (None, False)


def test_a_kernel_named_by_the_config_is_taken(kernels: Kernels) -> None:
    chooses = forced("slow")
    chooses.resumed = "quick"
    picked = chooses.choose(like())
    assert (picked.name, picked.why) == ("slow", "as configured: speed.attention")
    assert (kernels.in_use, kernels.tried, kernels.timed) == ("slow", ["slow"], [])


@pytest.mark.parametrize(("kernel", "reason"), [("refused", "RuntimeError: CUDA error"), ("wrong", "differs from")])
def test_a_kernel_named_by_the_config_must_run(kernels: Kernels, kernel: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^coat\.speed\.attention='{kernel}': {reason}.*; set it to auto"):
        forced(kernel).choose(like())


def test_a_resumed_run_keeps_its_kernel(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    for speed in ({}, {"measure": "never"}):
        chooses, picked = pick(kept="slow", **speed)
        assert (picked.name, picked.why) == ("slow", "that of the resumed run")
        assert (kernels.in_use, chooses.kernel, kernels.timed) == ("slow", "slow", [])
    assert not caplog.records


@pytest.mark.parametrize(("measures", "now"), [("auto", "quick"), ("never", OWN)])
def test_a_resumed_run_that_cannot_keep_it_says_so(
    kernels: Kernels, caplog: pytest.LogCaptureFixture, measures: str, now: str
) -> None:
    chooses, picked = pick(kept="refused", measure=measures)
    assert (picked.name, chooses.kernel) == (now, now)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    reason = "RuntimeError: CUDA error: not on this card"
    assert line == f"resume: attention kernel refused -> {now} ({reason}); results differ from here on by rounding"


def test_the_first_of_several_processes_chooses_for_all(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    sent = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: sent.append(box[0]))
    assert pick()[1].name == "quick"
    kernels.tried.clear()
    kernels.ms = {}
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: box.__setitem__(0, sent[0]))
    chooses, picked = pick()
    assert (picked, kernels.tried, kernels.in_use, chooses.kernel) == (sent[0], [], "quick", "quick")


def test_on_a_cpu_torch_chooses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chooses, picked = pick(kept="cudnn", measure="always")
    assert (picked.name, picked.why, chooses.kernel) == (OWN, "torch's choice", None)
    assert [record.getMessage() for record in caplog.records] == ["attention: flash_cpu (torch's choice)"]
    assert attention._in_use is None


def test_a_kernel_for_gpus_is_refused_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match=r"speed\.attention='cudnn': needs a GPU, this is a cpu; set it to auto"):
        pick(attention="cudnn")


# --- in a model ---


def test_blocks_run_the_kernel_that_was_chosen_and_a_save_names_it(kernels: Kernels) -> None:
    models = [coat_flux_model({"memory": {"checkpointing": "none"}})[0] for _ in range(2)]
    assert "attention" not in execution_of(models[0])
    predict(models[0])
    saved = execution_of(models[0])
    assert saved["attention"] == "quick" == kernels.in_use
    kernels.timed.clear()
    keep_execution(models[1], {**saved, "attention": "slow"})
    predict(models[1])
    assert (execution_of(models[1])["attention"], kernels.in_use, kernels.timed) == ("slow", "slow", [])
