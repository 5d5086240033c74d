"""Memory of a run by phase, written to `<run folder>/coat/memory.json` during the run; all sizes in bytes.

    {
      "device": such as "cuda:0",
      "method": {"memory": how memory was measured, "saved activations": how those were measured},
      "baseline": before the run, outside the prediction: 0 on a GPU, Python and its libraries on a CPU,
      "peak": the largest of all phases,
      "phases": {load, cache, validate, sample, step, save, if the run had them: {
          "entered": how often (not counting continuations after a sample or save), "open": whether unfinished,
          "start", "end": {"allocated", "reserved"} at its first start and its last end,
          "peak": {"allocated", "reserved"},
          "exact": false if the peak is a lower bound (a CPU's, below that of an earlier phase),
          "parts": at the moment when the known parts together were largest, including "rest",
          "most": the largest of each part at any count; the first step, in which libraries warm up, is left out
      }},
      "moments": {"before_training", "before_sampling", "after_sampling" (the last one): {
          "allocated", "reserved", "peak": since the start of the run}},
      "prediction": null until the end; then {"peak", "phases": {name: {part: bytes}}} or {"missing": the reason}
    }

Parts are the tensors' storages on the run's device, each counted once; "rest" is the peak less baseline and parts, at
least 0: a CPU's weights may not be resident. A resumed run writes a new file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.files import write_file
from ..base.text import GB, MB, columns
from ..blocks.held import SAVED, HeldParts, HeldTensors, peak_bytes, used_bytes
from ..config.job import JobConfig
from ..plan.job import JobFacts
from ..plan.predict import predict

logger = logging.getLogger(__name__)

MEMORY_FILE = Path("coat") / "memory.json"
RUN_PHASES = ("load", "cache", "validate", "sample", "step", "save")
STEP_MOMENTS = {  # moment of a step → the work that follows it
    "before_forward": "forward pass",
    "after_forward": "backward pass",
    "after_backward": "after a backward pass",
    "after_optimizer_step": "after the optimizer's update",
}
MOMENTS = ("before_training", "before_sampling", "after_sampling")
COUNTED = 2  # first steps, whose saved activations are counted on a device without the CUDA allocator
COUNTS = 6  # of parts, unconditional in each phase; later ones need more memory in use
METHODS = {
    "cuda": {
        "memory": "torch's CUDA allocator",
        SAVED: "allocated after the forward pass less before it, gradients left out",
    },
    "cpu": {
        "memory": "resident memory of the process; reserved: its peak so far",
        SAVED: "storages that operators made in the first forward passes, each once, and that live after",
    },
}


def reset_peak(device: torch.device) -> None:
    """Reset a GPU's peak for the next phase; a process's peak only grows."""
    if device.type == "cuda":
        torch.cuda.init()  # else the first phase has no statistics to reset
        torch.cuda.reset_peak_memory_stats(device)


class PhaseTracker:
    """Follows the memory of `device` through a run's phases.

    Without a `path` (in every process but the main one) nothing is written. `counts` is False for compiled models,
    whose operators cannot be counted. `held` counts bytes by part; `moment` is the work under way in a step.
    """

    def __init__(self, device: torch.device, path: Path | None, *, counts: bool = True):
        self.device, self.path = device, path
        self.forecast: dict[str, Any] | None = None
        self.baseline = 0 if device.type == "cuda" else used_bytes(device)[0]
        self.held = HeldParts(device)
        self.moment = ""
        self._phases: dict[str, dict[str, Any]] = {}  # as in the JSON, but for "rest"
        self._counts: dict[str, tuple[int, int]] = {}  # phase → counts of its parts, the most allocated at one
        self._moments: dict[str, dict[str, int]] = {}
        self._now: str | None = None  # the current phase
        self._broken: str | None = None  # a phase that an exception left
        self._peak_before = 0  # of the process, before the phase
        self._before_forward = 0  # allocated, without gradients
        self._counts_operators = counts and device.type != "cuda"
        self._counter: HeldTensors | None = None  # while it counts
        self._counted = 0  # bytes of saved activations
        self._steps = 0  # begun
        self._called: set[tuple[str, int]] = set()  # (phase, model)

    def hold_models(self, vae: nn.Module | None, text_encoders: Iterable[nn.Module]) -> None:
        """Count models that come and go; when one of them first runs in a phase, all parts are counted."""
        watched = list(text_encoders)
        for encoder in watched:
            self.held.add("text encoders", encoder)
        if vae is not None:
            self.held.add("vae", vae)
            halves = (getattr(vae, name, None) for name in ("encoder", "decoder"))
            watched += [half for half in halves if isinstance(half, nn.Module)]

        def count(called: nn.Module, _: Any) -> None:
            if self._now is not None and (self._now, id(called)) not in self._called:
                self._called.add((self._now, id(called)))
                self._count_parts()

        for module in watched:
            module.register_forward_pre_hook(count)

    @property
    def peak(self) -> int:
        """Peak bytes so far."""
        self._update()
        return max((phase["peak"]["allocated"] for phase in self._phases.values()), default=0)

    @property
    def under_way(self) -> str | None:
        """The current phase, or the one inside it that an exception left; None outside phases."""
        return self._broken or self._now

    def enter(self, name: str) -> None:
        """End the current phase and begin or continue another, one of `RUN_PHASES`."""
        self._broken = None
        self._end()
        if name == "step" and name not in self._phases:
            self._record_moment("before_training")
        self._continue(name)
        self._phases[name]["entered"] += 1
        self.write()

    def _continue(self, name: str) -> None:
        reset_peak(self.device)
        peak = {"allocated": 0, "reserved": 0}
        phase = {"entered": 0, "open": True, "start": self._used(), "end": {}, "peak": peak, "exact": True}
        self._phases.setdefault(name, {**phase, "parts": {}, "most": {}})["open"] = True
        self._now, self._peak_before = name, peak_bytes(self.device)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A phase as a `with` block; the previous one continues after it. Records memory around samples."""
        before = self._now
        if name == "sample":
            self._record_moment("before_sampling")
        self.enter(name)
        try:
            yield
        except BaseException:
            self._broken = name
            raise
        finally:
            if name == "sample":
                self._record_moment("after_sampling")
            self._end()
            if before is not None:
                self._continue(before)
            self.write()

    def close(self) -> None:
        """End the current phase and write the JSON; safe after a failure, even while counting."""
        self._stop_counting()
        self._end()
        self.write()

    def mark(self, moment: str) -> None:
        """Measure at one of `STEP_MOMENTS`."""
        self._broken, self.moment = None, STEP_MOMENTS[moment]
        allocated = self._used()["allocated"]
        if moment == "before_forward":
            self._before_forward = allocated - self.held.count(["gradients"])["gradients"]
            self._steps += 1
            self._stop_counting()
            if self._steps == 2:  # forget the first: libraries warm up, weights are joined
                self._counted = 0
                if self._now is not None:
                    self._phases[self._now] |= {"parts": {}, "most": {}}
                    self._counts.pop(self._now, None)
            if self._counts_operators and self._steps <= COUNTED:
                self._counter = HeldTensors()
                self._counter.__enter__()  # until `_stop_counting`
        elif moment == "after_forward":
            self._stop_counting()
            saved = self._counted
            if self.device.type == "cuda":
                growth = allocated - self.held.count(["gradients"])["gradients"] - self._before_forward
                saved = max(0, growth)
            self._count_parts({SAVED: saved})
        elif moment == "after_backward":
            self._count_parts()

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counted = max(self._counter.now, self._counted)
            self._counter = None

    def record(self) -> dict[str, Any]:
        """The content of the JSON described above."""
        peak = self.peak  # first, as it updates the phase's
        phases = {}
        for name in sorted(self._phases, key=RUN_PHASES.index):
            phase = self._phases[name]
            rest = phase["peak"]["allocated"] - self.baseline - sum(phase["parts"].values())
            phases[name] = {**phase, "parts": {**phase["parts"], "rest": max(0, rest)}}
        return {
            "device": str(self.device),
            "method": METHODS["cuda" if self.device.type == "cuda" else "cpu"],
            "baseline": self.baseline,
            "peak": peak,
            "phases": phases,
            "moments": {name: self._moments[name] for name in MOMENTS if name in self._moments},
            "prediction": self.forecast,
        }

    def write(self) -> None:
        """Write the JSON atomically. A run continues if it cannot be written."""
        if self.path is None:
            return
        try:
            write_file(self.path, json.dumps(self.record(), indent=2) + "\n")
        except OSError as error:
            logger.warning("%s: cannot be written (%s); the run goes on without it", self.path, error)
            self.path = None

    def _used(self) -> dict[str, int]:
        allocated, reserved = used_bytes(self.device)
        return {"allocated": allocated, "reserved": reserved}

    def _update(self) -> None:
        """Raise the current phase's peak, on a CPU exact only if the process's peak rose in it."""
        if self._now is None:
            return
        phase, now, peak = self._phases[self._now], self._used(), peak_bytes(self.device)
        on_gpu = self.device.type == "cuda"
        exact = on_gpu or peak > self._peak_before
        highest = max(peak, now["allocated"]) if exact else now["allocated"]
        if highest > phase["peak"]["allocated"]:
            phase["peak"]["allocated"], phase["exact"] = highest, exact
        reserved = torch.cuda.max_memory_reserved(self.device) if on_gpu else now["reserved"]
        phase["peak"]["reserved"] = max(phase["peak"]["reserved"], reserved)

    def _end(self) -> None:
        if self._now is not None:
            self._count_parts(always=True)
            self._phases[self._now] |= {"end": self._used(), "open": False}
            self._now = None

    def _record_moment(self, name: str) -> None:
        used = self._used()
        self._moments[name] = {**used, "peak": max(used["allocated"], self.peak)}

    def _count_parts(self, measured: dict[str, int] | None = None, *, always: bool = False) -> None:
        """Count parts but `measured` ones, `COUNTS` times in a phase, then only if more is allocated."""
        if self._now is None:
            return
        self._update()
        phase, allocated = self._phases[self._now], self._used()["allocated"]
        count, most_allocated = self._counts.get(self._now, (0, 0))
        if not always and count >= COUNTS and allocated <= most_allocated:
            return
        self._counts[self._now] = count + 1, max(allocated, most_allocated)
        parts = self.held.count() | (measured or {})
        phase["most"] = {part: max(size, phase["most"].get(part, 0)) for part, size in parts.items()}
        if sum(parts.values()) >= sum(phase["parts"].values()):
            phase["parts"] = parts
        if not always:
            self.write()


PARTS = ("transformer", "lora", "gradients", "optimizer", "ema", "saved activations", "text encoders", "vae", "rest")


def finish(tracker: PhaseTracker, job: Callable[[], JobConfig], log: Callable[[str], None] | None) -> None:
    """End a run's tracking: write the JSON with the prediction, and the table to `log`."""
    if tracker.path is not None:
        tracker.forecast = forecast(job, tracker.device)
    tracker.close()
    if tracker.path is not None and log is not None:
        title, rows, notes = tabulated(tracker.record())
        log("\n".join([title, *columns(rows), *notes]))


def forecast(make_job: Callable[[], JobConfig], device: torch.device) -> dict[str, Any]:
    """The plan's prediction, or why there is none; a device not in this machine has no limit."""
    try:
        total = None  # bytes of the device
        if device.type == "cuda" and torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info(device)
        job = replace(make_job(), device=str(device))  # the run's device, where its config leaves it open
        prediction = predict(JobFacts(job), total)
    except Exception as error:  # a finished run must not fail for its forecast
        reason = " ".join(str(error).split())
        return {"missing": f"{type(error).__name__}: {reason}"}
    return {"peak": prediction.peak, "phases": prediction.phases}


def tabulated(record: Mapping[str, Any]) -> tuple[str, list[list[str]], list[str]]:
    """The table of a `record`: title, rows with the header first, and footnotes."""
    unit, scale, bytes_text = "MB", MB, "10^6 bytes"
    if record["peak"] >= 10 * GB:
        unit, scale, bytes_text = "GB", GB, "10^9 bytes"
    title = f"Memory by phase, {unit} ({bytes_text}), {record['method']['memory']}"
    baseline = record["baseline"]
    predicted = (record["prediction"] or {}).get("phases", {})
    above = ["above start"] if baseline else []

    def size(nbytes: float) -> str:
        return f"{nbytes / scale:.2f}"

    rows = [["phase", "times", "start", "end", "peak", "reserved", *above, "predicted"]]
    for name, phase in record["phases"].items():
        peak = phase["peak"]
        sign = "" if phase["exact"] else ">="
        row = [name, str(phase["entered"])]
        row += [size(phase[side].get("allocated", 0)) for side in ("start", "end")]
        row += [sign + size(peak["allocated"]), size(peak["reserved"])]
        if baseline:
            row.append(sign + size(max(0, peak["allocated"] - baseline)))
        rows.append([*row, size(sum(predicted[name].values())) if name in predicted else "-"])

    notes = []
    for name, used in record["moments"].items():
        notes.append(f"{name.replace('_', ' ')}: {size(used['allocated'])}, peak until then {size(used['peak'])}")
    if "step" in record["phases"]:
        # two lines: of different moments, and of micro-batches of different sizes
        counted = "the first micro-batches" if baseline else "a step"
        lists = {
            f"held at the fullest count of {counted}": record["phases"]["step"]["parts"],
            "predicted at the peak of the largest step": predicted.get("step", {}),
        }
        for label, parts in lists.items():
            held = [f"{part} {size(nbytes)}" for part, nbytes in parts.items() if nbytes]
            if held:
                notes.append(f"{label}: {', '.join(held)} {unit}")
    if record["prediction"] is None:
        line = "prediction: none, the run did not come to its end"
    elif "missing" in record["prediction"]:
        line = f"prediction: none for this run ({record['prediction']['missing']})"
    else:
        expected_peak, measured_peak = record["prediction"]["peak"], record["peak"] - baseline
        line = f"prediction: peak {size(expected_peak)} {unit}; measured {size(measured_peak)} {unit}"
        if baseline:
            line += " of resident memory above the start, libraries included"
        else:
            line += f", {(measured_peak - expected_peak) / expected_peak:+.1%} of the prediction"
    return title, rows, [*notes, line]


def stacked(record: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, float]], dict[str, float]]:
    """Memory of phases at their peak, for a chart: unit, phase → part → size, phase → predicted size."""
    parts = [part for part in PARTS if part != "rest" or not record["baseline"]]
    phases = {name: {part: phase["parts"].get(part, 0) for part in parts} for name, phase in record["phases"].items()}
    predicted = (record["prediction"] or {}).get("phases", {})
    expected = {name: sum(predicted[name].values()) for name in phases if name in predicted}
    most = max([*(sum(held.values()) for held in phases.values()), *expected.values()], default=0)
    unit, scale = ("GB", GB) if most >= GB else ("MB", MB)
    bars = {name: {part: size / scale for part, size in held.items() if size} for name, held in phases.items()}
    return unit, bars, {name: size / scale for name, size in expected.items()}
