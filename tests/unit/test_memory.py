"""What watches memory: phases, their report and lines, the Windows driver's spill, what counts as a lack."""

import errno
import json
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from coat_flux.blocks.held import HeldParts
from coat_flux.watch import phases as phases_module
from coat_flux.watch.oom import OutOfMemory, is_oom
from coat_flux.watch.phases import STEP_MOMENTS, PhaseTracker, peak_bytes, tabulated, used_bytes
from coat_flux.watch.step_watch import BASELINE, CPU_NOTE, IN_A_ROW, SLOWER, WARM_UP, SpillWatch
from tests import tolerances
from tests.helpers.step_watch import step_watch

CPU = torch.device("cpu")
GB = 10**9


class FakeDevice:
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


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "memory.json").read_text())


def test_parts_count_each_storage_once_and_adapters_before_the_transformer():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[0].requires_grad_(False)
    model[0].register_buffer("weight_codes", torch.zeros(8, 8, dtype=torch.float8_e4m3fn))
    model[0].register_buffer("weight_scale", torch.zeros(8))
    model[0].register_buffer("again", model[0].weight_codes.view(torch.uint8))
    held = HeldParts(CPU)
    for part in ("transformer", "lora", "gradients"):
        held.add(part, model)
    optimizer = torch.optim.AdamW(model[1].parameters())
    held.add("optimizer", optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    parts = held.count()
    assert parts["lora"] == parts["gradients"] == 32 * 4
    assert parts["optimizer"] == 2 * 32 * 4 + 4  # two moments and the step
    assert parts["transformer"] == 64 * 4 + 64 + 8 * 4
    assert held.count(["gradients"]) == {"gradients": 128}
    assert sum(HeldParts(torch.device("meta")).count().values()) == 0


def test_each_phase_has_its_own_peak_and_goes_on_after_a_sample(monkeypatch, tmp_path):
    gpu = FakeDevice(monkeypatch)
    tracker = PhaseTracker(torch.device("cuda"), tmp_path / "memory.json")
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
    record = record_in(tmp_path)
    peaks = {name: (phase["entered"], *phase["peak"].values()) for name, phase in record["phases"].items()}
    assert peaks == {"load": (1, 100, 200), "sample": (1, 400, 800), "step": (1, 150, 300)}  # allocated, reserved
    assert list(peaks) == ["load", "sample", "step"]
    assert record["peak"] == tracker.peak == 400
    assert record["moments"] == {
        "before_training": {"allocated": 100, "reserved": 200, "peak": 100},
        "before_sampling": {"allocated": 100, "reserved": 200, "peak": 150},
        "after_sampling": {"allocated": 100, "reserved": 200, "peak": 400},
    }
    assert record["baseline"] == 0
    assert gpu.resets == 4


def test_saved_activations_are_what_a_forward_pass_added_but_gradients(monkeypatch, tmp_path):
    gpu = FakeDevice(monkeypatch)
    model = nn.Linear(16, 16, bias=False)
    tracker = PhaseTracker(torch.device("cuda"), tmp_path / "memory.json")
    tracker.held = HeldParts(CPU)  # the tensors are on the CPU, the numbers are the fake's
    tracker.held.add("lora", model)
    tracker.held.add("gradients", model)
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
    step = record_in(tmp_path)["phases"]["step"]
    assert step["parts"] | {"rest": 0} == step["parts"] | {"rest": 0, "saved activations": 700, "lora": 1024}
    assert step["parts"]["rest"] == 2048 - 700 - 1024
    assert step["most"]["saved activations"] == 700


def test_saved_activations_are_counted_on_a_cpu(tmp_path):
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
    record = record_in(tmp_path)
    assert record["phases"]["step"]["most"]["saved activations"] == 32 * 64 * 4
    assert record["method"]["saved activations"].startswith("storages that operators made")


# -- the report -------------------------------------------------------------------------------------------------------
def _phase(peak: int, *, exact: bool = True, **parts: int) -> dict[str, Any]:
    at = {"allocated": peak // 2, "reserved": peak}
    return {
        "entered": 1, "open": False, "start": at, "end": at, "peak": {"allocated": peak, "reserved": peak},
        "exact": exact, "parts": {**parts, "rest": peak - sum(parts.values())}, "most": parts,
    }  # fmt: skip


def _record(**values: Any) -> dict[str, Any]:
    return {
        "device": "cuda",
        "method": {"memory": "torch's CUDA allocator", "saved activations": ""},
        "baseline": 0,
        "peak": 20 * GB,
        "phases": {"load": _phase(15 * GB, transformer=12 * GB), "step": _phase(20 * GB, transformer=12 * GB, lora=GB)},
        "moments": {"before_training": {"allocated": 13 * GB, "reserved": 14 * GB, "peak": 15 * GB}},
        "transformer": {},
        "prediction": {"peak": 19 * GB, "phases": {"step": {"transformer": 12 * GB, "workspace": 7 * GB}}},
    } | values


def test_table_shows_prediction_beside_measurement():
    _, rows, notes = tabulated(_record())
    assert rows[1:] == [
        ["load", "1", "7.50", "7.50", "15.00", "15.00", "-"],
        ["step", "1", "10.00", "10.00", "20.00", "20.00", "19.00"],
    ]
    assert notes[0] == "before training: 13.00, peak until then 15.00"
    assert notes[1].endswith("transformer 12.00, lora 1.00, rest 7.00 GB")  # not the moment of the predicted peak
    assert notes[2] == "predicted at the peak of the largest step: transformer 12.00, workspace 7.00 GB"
    assert "19.00 GB; measured 20.00 GB, +5.3%" in notes[3]
    assert "did not come to its end" in tabulated(_record(prediction=None))[2][-1]


# -- memory lines -----------------------------------------------------------------------------------------------------
def test_lines_come_at_log_every_with_the_note_once():
    watch, log = step_watch("memory: {log_every: 2}")
    for step in (1, 2, 3, 4):
        for moment in STEP_MOMENTS:
            watch.mark(moment, step)
    lines = log.details
    assert lines[0] == CPU_NOTE
    shape = r"\[(\w+)\] Step (\d): Allocated: (\d+\.\d\d)GB, Reserved: (\d+\.\d\d)GB"
    found = [re.fullmatch(shape, line).groups() for line in lines[1:]]
    assert [(phase, step) for phase, step, *_ in found] == [(phase, step) for step in "24" for phase in STEP_MOMENTS]
    assert all(0 < float(allocated) <= float(reserved) for *_, allocated, reserved in found)
    for text in ("memory: {log_every: 1, log_memory_stats: false}", "{enabled: false, memory: {log_every: 1}}"):
        watch, log = step_watch(text)
        watch.mark("after_forward", 1)
        assert log.details == []


def test_cpu_numbers_are_the_process_and_its_peak():
    before = used_bytes(torch.device("cpu"))[0]
    block = mmap.mmap(-1, 64 * 2**20)  # new pages, where an allocator might reuse what earlier tests left
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    during, peak = used_bytes(torch.device("cpu"))
    assert during - before > 48 * 2**20
    assert peak >= during
    del block
    assert peak_bytes(torch.device("cpu")) >= during - tolerances.RESIDENT_SLACK_BYTES


@pytest.mark.gpu
def test_gpu_numbers_are_the_allocators():
    device = torch.device("cuda")
    block = torch.ones(2**20, device=device)
    assert used_bytes(device) == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    assert peak_bytes(device) >= block.nbytes


# -- the driver's spill -----------------------------------------------------------------------------------------------
CARD = 24 * GB
FULL, ROOMY = 23 * GB, 15 * GB


def spills(seconds: list[float], reserved: int = FULL, platform: str = "win32", total: int = CARD) -> list[str]:
    watch = SpillWatch(platform)
    return [line for line in (watch.on_step(s, reserved, total) for s in seconds) if line is not None]


def seconds_of(*later: float, first: float = 30.0) -> list[float]:
    """Slow first steps, those of the baseline at about 2 s, then `later`."""
    return [first] * WARM_UP + [2.0 + 0.1 * (i % 3) for i in range(BASELINE)] + list(later)


def test_a_spill_is_said_once_with_numbers():
    slow = seconds_of(*[8.0] * 40)
    slow[WARM_UP + 2] = 500.0  # of the baseline: a median
    (line,) = spills(slow)
    assert "8.0 s instead of 2.1 s, and torch holds 23.0 GB of a card of 24.0 GB" in line
    (line,) = spills([2.0, 2.0], reserved=CARD + GB)  # from the first step
    assert line.startswith("torch holds 25.0 GB of a card of 24.0 GB")


def test_a_run_on_a_gpu_warns_of_it(monkeypatch):
    watch, log = step_watch()
    watch.phases.device, watch._spill = torch.device("cuda"), SpillWatch("win32")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=CARD))
    for step, reserved in enumerate((ROOMY, CARD + GB, CARD + GB), 1):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _, reserved=reserved: reserved)
        watch.end_step(step, 2.0)
    (line,) = log.said
    assert line.startswith("WARNING: torch holds 25.0 GB")


NO_SPILLS: dict[str, tuple[Any, ...]] = {  # seconds of the steps, bytes held, platform, bytes of the card
    "first steps": (seconds_of(*[2.0] * 50, first=600.0),),  # compilation and measurement at the start
    "interruptions": (seconds_of(*([2.0] * 9 + [90.0]) * 5),),  # a sample or a save between steps
    "larger pictures": (seconds_of(*([2.0] * 5 + [9.0] * (IN_A_ROW - 1)) * 6),),  # a few in a row
    "twofold": (seconds_of(*[2.1 * SLOWER * 0.95] * 50),),  # slower, but not threefold
    "slow throughout": ([9.0] * 60,),
    "room": (seconds_of(*[20.0] * 30), ROOMY),
    "Linux": (seconds_of(*[20.0] * 30), FULL, "linux"),
    "an unknown card": (seconds_of(*[20.0] * 30), FULL, "win32", 0),
}


@pytest.mark.parametrize("name", NO_SPILLS)
def test_other_slow_steps_are_none(name):
    assert spills(*NO_SPILLS[name]) == []


# -- out of memory ----------------------------------------------------------------------------------------------------
LACKS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError("The paging file is too small for this operation to complete. (os error 1455)"),
]
OTHERS = [
    None,
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("this text says out of memory, but its class is another"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
    OutOfMemory("Out of memory in the phase step: explained already"),
]


@pytest.mark.parametrize("error", [*LACKS, *OTHERS], ids=lambda error: f"{type(error).__name__}: {error}"[:40])
def test_a_lack_of_memory_and_something_else(error):
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = error
    assert is_oom(error) == is_oom(wrapped) == (error in LACKS)
