"""The tracker of a run's phases: parts by storage, peaks by phase, a JSON that is always whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from coat_flux.blocks.held import HeldParts, gradients, module_tensors, state_tensors, trained
from coat_flux.watch import phases as phases_module
from coat_flux.watch.phases import PhaseTracker

CPU = torch.device("cpu")
MIB = 2**20


class FakeDevice:
    """Stands in for what `stats` says of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.held = self.peak = self.resets = 0
        monkeypatch.setattr(phases_module, "used_bytes", lambda device: (self.held, 2 * self.held))
        monkeypatch.setattr(phases_module, "peak_bytes", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * self.peak)
        monkeypatch.setattr(phases_module, "reset_peak", lambda device: self._reset())

    def _reset(self) -> None:
        self.resets += 1
        self.peak = self.held

    def take(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)


@pytest.fixture(name="gpu")
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def test_parts_count_each_storage_once_and_adapters_before_the_transformer() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[0].requires_grad_(False)
    model[0].register_buffer("weight_codes", torch.zeros(8, 8, dtype=torch.float8_e4m3fn))
    model[0].register_buffer("weight_scale", torch.zeros(8))
    model[0].register_buffer("again", model[0].weight_codes.view(torch.uint8))
    held = HeldParts(CPU)
    for part, tensors in (("transformer", module_tensors), ("lora", trained), ("gradients", gradients)):
        held.add(part, model, tensors)
    optimizer = torch.optim.AdamW(trained(model))
    held.add("optimizer", optimizer, state_tensors)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    parts = held.count()
    assert parts["lora"] == parts["gradients"] == 32 * 4
    assert parts["optimizer"] == 2 * 32 * 4 + 4  # two moments and the step
    assert parts["transformer"] == 64 * 4 + 64 + 8 * 4
    assert held.transformer_kinds() == {"fp8 codes": 64, "scales": 32, "high precision": 256}
    assert held.gradient_bytes() == 128
    assert sum(HeldParts(torch.device("meta")).count().values()) == 0


def test_parts_do_not_keep_their_owners_alive() -> None:
    held, model = HeldParts(CPU), nn.Linear(4, 4)
    held.add("vae", model, module_tensors)
    assert held.count()["vae"] == 80
    del model
    assert held.count()["vae"] == 0
    with pytest.raises(ValueError, match=r"part='unet': must be one of lora"):
        held.add("unet", nn.Linear(1, 1), module_tensors)


def test_each_phase_has_its_own_peak_and_goes_on_after_a_sample(gpu: FakeDevice, tmp_path: Path) -> None:
    tracker = PhaseTracker(torch.device("cuda"), tmp_path / "coat" / "memory.json")
    tracker.enter("load")
    gpu.take(100)
    tracker.enter("step")
    gpu.take(50)
    gpu.take(-50)
    with tracker.during("sample"):
        gpu.take(300)
        gpu.take(-300)
    gpu.take(20)
    gpu.take(-20)
    tracker.close()
    record = json.loads((tmp_path / "coat" / "memory.json").read_text())
    phases = record["phases"]
    assert list(phases) == ["load", "sample", "step"]
    assert {name: phase["peak"] for name, phase in phases.items()} == {
        "load": {"allocated": 100, "reserved": 200},
        "sample": {"allocated": 400, "reserved": 800},
        "step": {"allocated": 150, "reserved": 300},
    }
    assert (phases["step"]["entered"], phases["sample"]["entered"]) == (1, 1)
    assert record["peak"] == tracker.peak == 400
    assert record["moments"] == {
        "before_training": {"allocated": 100, "reserved": 200, "peak": 100},
        "before_sampling": {"allocated": 100, "reserved": 200, "peak": 150},
        "after_sampling": {"allocated": 100, "reserved": 200, "peak": 400},
    }
    assert record["baseline"] == 0
    assert gpu.resets == 4


def test_saved_activations_are_what_a_forward_pass_added_but_gradients(gpu: FakeDevice, tmp_path: Path) -> None:
    model = nn.Linear(16, 16, bias=False)
    tracker = PhaseTracker(torch.device("cuda"), tmp_path / "memory.json")
    tracker.held = HeldParts(CPU)  # the tensors are on the CPU, the numbers are the fake's
    tracker.hold("lora", model, trained)
    tracker.hold("gradients", model, gradients)
    tracker.enter("step")
    model.weight.grad = torch.zeros_like(model.weight)
    gpu.take(2 * 1024)
    tracker.mark("before_forward")
    model.weight.grad = None  # as a host that clears gradients inside its step
    gpu.take(-1024)
    gpu.take(700)
    tracker.mark("after_forward")
    gpu.take(-700)
    tracker.mark("after_backward")
    tracker.close()
    step = json.loads((tmp_path / "memory.json").read_text())["phases"]["step"]
    assert step["parts"] | {"rest": 0} == step["parts"] | {"rest": 0, "saved activations": 700, "lora": 1024}
    assert step["parts"]["rest"] == 2048 - 700 - 1024
    assert step["most"]["saved activations"] == 700


def test_saved_activations_are_counted_on_a_cpu(tmp_path: Path) -> None:
    linear = nn.Linear(64, 64, bias=False)
    tracker = PhaseTracker(CPU, tmp_path / "memory.json")
    tracker.enter("step")
    for rows in (8, 32, 128):  # counted in the first two steps
        x = torch.ones(rows, 64)
        tracker.mark("before_forward")
        y = torch.sigmoid(linear(x) * 2)  # keeps its result; the product and its double are gone
        tracker.mark("after_forward")
        y.sum().backward()
        tracker.mark("after_backward")
    tracker.close()
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["phases"]["step"]["most"]["saved activations"] == 32 * 64 * 4
    assert record["method"]["saved activations"].startswith("storages that operators made")


def test_a_compiled_model_is_not_counted_and_unknown_phases_are_refused(tmp_path: Path) -> None:
    tracker = PhaseTracker(CPU, None, counts=False)
    tracker.enter("step")
    tracker.mark("before_forward")
    assert _get_current_dispatch_mode() is None
    tracker.mark("after_forward")
    assert tracker.record()["method"]["saved activations"].startswith("growth of resident memory")
    tracker.close()
    assert tracker.peak > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="phase='train'"):
        tracker.enter("train")


def test_a_forward_pass_that_fails_is_no_longer_counted(tmp_path: Path) -> None:
    tracker = PhaseTracker(CPU, tmp_path / "memory.json")
    tracker.enter("step")
    tracker.mark("before_forward")
    assert _get_current_dispatch_mode() is not None
    tracker.close()
    assert _get_current_dispatch_mode() is None


def test_cpu_peak_is_exact_only_where_the_process_peak_rose(tmp_path: Path) -> None:
    tracker = PhaseTracker(CPU, tmp_path / "memory.json")
    tracker.enter("load")
    block = torch.ones(256 * MIB // 4)
    del block
    tracker.enter("step")
    small = torch.ones(8 * MIB // 4)
    tracker.close()
    phases = json.loads((tmp_path / "memory.json").read_text())["phases"]
    assert phases["load"]["exact"] is True or phases["load"]["peak"]["allocated"] >= phases["load"]["end"]["allocated"]
    assert phases["step"]["peak"]["allocated"] >= phases["step"]["end"]["allocated"] >= small.nbytes
    assert phases["step"]["exact"] is False


def test_models_are_looked_at_when_they_run(tmp_path: Path) -> None:
    encoder = nn.Linear(32, 32, bias=False)
    tracker = PhaseTracker(CPU, tmp_path / "memory.json")
    tracker.hold_models(None, [encoder])
    tracker.enter("cache")
    encoder(torch.ones(1, 32))
    del encoder
    tracker.close()
    parts = json.loads((tmp_path / "memory.json").read_text())["phases"]["cache"]["parts"]
    assert parts["text encoders"] == 32 * 32 * 4


def test_a_killed_run_leaves_the_phases_so_far(tmp_path: Path) -> None:
    tracker = PhaseTracker(CPU, tmp_path / "coat" / "memory.json")
    tracker.enter("cache")
    tracker.enter("load")
    record = json.loads((tmp_path / "coat" / "memory.json").read_text())
    assert [(name, phase["open"]) for name, phase in record["phases"].items()] == [("load", True), ("cache", False)]
    assert record["prediction"] is None
    assert [path.name for path in (tmp_path / "coat").iterdir()] == ["memory.json"]
