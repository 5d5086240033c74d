"""What `gpu_check.py` finds out in processes of its own: `python scripts/_gpu_kernels.py SPEC RESULT`, both JSON files.

    blocks      LoRA gradients of one double and one single block, against bf16's
    rates       attention by every kernel, or a copy and launches
    trace       a step of a row of the benchmark, by kernel
    kernels     each launcher against its reference, its time and bandwidth
    tests       the gpu tests of a file

RESULT is replaced before each item, so that what ends the process is named: {"status", "reason", "items": {name:
figures}}, figures with "error" where an item failed, "note" where it has not run; `worker`'s for a trace. Items in
the specification have been tried by a process before this one; after an error that leaves CUDA unusable this one ends.

Launchers come as calls on tensors without memory (tests/helpers/kernel_cases.py); here they get memory. Every argument
and result counts once: what a kernel reads twice, or writes for another of the same launcher, lowers the share of the
bandwidth. On the meta device the launchers run and their kernels do not.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from coat_core.ops.attention import attention_backward, attention_forward, chosen_kernel, kernel_obstacles, use_kernel
from coat_core.ops.dispatch import first_line, launchers
from coat_core.ops.launch import recorded_launches
from coat_core.ops.proof import SAMPLED_ROWS, Sample, fault
from coat_core.ops.proof import Call as RecordedCall
from coat_core.quantize import sqnr_db
from coat_flux.base.files import write_file
from coat_flux.bench import worker
from coat_flux.bench.limits import ATTENTION_STEP, HEAD_DIM, Geometry, token_count
from coat_flux.bench.runner import CPU_CALLS, FAILED, OK, STEP, named
from coat_flux.bench.worker import SEED, make_model, measure_steps, model_inputs, time_calls, wait
from coat_flux.plan.speed import DEVICES, Card

Case = functools.partial[Any]
Call = Callable[[], object]
Items = Iterable[tuple[str, Callable[[], dict[str, Any]]]]

RUNNING = "running"  # the status of a result that is not whole
KERNELS = ("chosen", "cudnn", "flash", "efficient", "fa3", "fa4")  # of attention; the first is torch's choice
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
SMALL_KERNELS = 500
ITEM_SECONDS = 40.0  # one that takes longer hangs
LEFT_SECONDS = 12.0  # no item is begun with less
RATE_CALLS, LAUNCHER_CALLS = (10, 50), (5, 20)  # for warm-up, and timed
SMALL_CALL = 1 << 10  # elements of its largest tensor
# LoRA gradients at FLUX.1's width have 18.4 dB and more, 12 where the model is small (RESULTS.md, tests/tolerances.py).
GRADIENT_FLOOR_DB = 10.0


# --- launchers ---


def cases_in_turn() -> list[tuple[str, Case]]:
    """Calls of launchers by name: the first of each, then each one's second, and so on."""
    from tests.helpers.kernel_cases import CASES

    turns: dict[str, list[tuple[str, Case]]] = {}
    for name, case in CASES.items():
        turns.setdefault(case.func.__name__, []).append((name, case))
    return [named for turn in zip_longest(*turns.values()) for named in turn if named is not None]


def check_launcher(case: Case, device: torch.device) -> None:
    """Raise ValueError where a launcher is not as its reference; on a CPU, in Triton's interpreter, if it is small."""
    operator, size = f"coat::{case.func.__name__}", max(x.numel() for x in _tensors(case.args))
    if operator not in launchers or (device.type == "cpu" and size > SMALL_CALL):  # a part of a launcher has none
        return

    def sample(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        rows = x.narrow(-2, 0, min(x.shape[-2], SAMPLED_ROWS)) if x.ndim > 1 else x
        rows = _filled(rows, torch.device("cpu")).contiguous()
        if x.dtype == torch.float32 and x.shape[-1:] == (HEAD_DIM,):  # rotary cosines and sines come in pairs
            rows[..., 1::2] = rows[..., ::2]
        return Sample(tuple(x.shape), x.stride(), 0, rows)

    if why := fault(RecordedCall(operator, tree_map(sample, case.args), {}), device):
        raise ValueError(why)


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _filled(x: Tensor, device: torch.device) -> Tensor:
    """A tensor like `x` on the device: numbers from 0.5 to 1.5, or small integers."""
    filled = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if x.dtype.is_floating_point:
        return filled.copy_(torch.rand(x.shape, device=device) + 0.5)
    return filled.copy_(torch.randint(0, 100, x.shape, device=device))


def time_launcher(case: Case, device: torch.device, calls: tuple[int, int], card: Card | None) -> dict[str, Any]:
    """Time a launcher: {"us": median, "host_us": shortest call, "launches", "bytes", "percent_of_bandwidth"}."""
    launched: list[Any] = []
    with recorded_launches(lambda kernel, *_: launched.append(kernel)):
        results = case()
    moved = sum(x.nbytes for x in {id(x): x for x in _tensors((case.args, results))}.values())
    if device.type == "meta":
        with recorded_launches(lambda *_: None):
            timing = time_calls(case, device, *calls)
    else:
        args = tree_map(lambda x: _filled(x, device) if isinstance(x, Tensor) else x, case.args)
        timing = time_calls(functools.partial(case.func, *args), device, *calls, cold=True)
    return {**_figures(timing, moved=moved, card=card), "launches": len(launched), "bytes": moved}


# --- blocks ---


def compare_gradients(name: str, geometry: Geometry, resolution: int, device: torch.device) -> dict[str, Any]:
    """SQNR of the LoRA gradients of a row of the benchmark against bf16's: {"lowest", "median", "of"}, in dB."""
    geometry = geometry._replace(double=1, single=1)
    found = []
    for row in (named(STEP)["bf16"], named(STEP)[name]):
        model, _ = make_model(row, geometry, device)
        inputs, target = model_inputs(resolution, 1, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=row.autocast):
            output = model(**inputs, return_dict=False)[0]
        torch.nn.functional.mse_loss(output.float(), target).backward()
        found.append({key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None})
    exact, own = found
    decibels = {key: sqnr_db(grad, own[key]) for key, grad in exact.items()}
    lowest = min(decibels, key=lambda key: decibels[key])
    if not decibels[lowest] >= GRADIENT_FLOOR_DB:
        raise ValueError(f"{lowest}: {decibels[lowest]:.1f} dB, must be {GRADIENT_FLOOR_DB:g} or more")
    return {"lowest": decibels[lowest], "median": median(decibels.values()), "of": lowest}


# --- rates ---


def attention_items(geometry: Geometry, resolution: int, device: torch.device, calls: tuple[int, int]) -> Items:
    """Attention as the blocks call it, by every kernel: {"us", "host_us", "tflops"}."""
    shape = (1, token_count(resolution), geometry.heads, HEAD_DIM)
    q, k, v, grad = (_normal(device, *shape).transpose(1, 2) for _ in range(4))
    flops = 4.0 * geometry.heads * shape[1] ** 2 * HEAD_DIM
    obstacles = kernel_obstacles(q) if device.type == "cuda" else {}

    def run(kernel: str, backward: bool) -> dict[str, Any]:
        if obstacles.get(kernel) is not None:
            return {"note": obstacles[kernel]}
        use_kernel(None if kernel == "chosen" else kernel, q)
        try:
            with torch.no_grad():
                out, context = attention_forward(q, k, v)
                if not backward:
                    timing = time_calls(functools.partial(attention_forward, q, k, v), device, *calls)
                    return {**_figures(timing, flops=flops), "kernel": chosen_kernel(q, q, q)}
                call = functools.partial(attention_backward, grad, q, k, v, out, context)
                return _figures(time_calls(call, device, *calls), flops=(ATTENTION_STEP - 1) * flops)
        finally:
            use_kernel(None)

    for kernel in KERNELS if device.type == "cuda" else KERNELS[:1]:
        yield f"attention, {kernel}", functools.partial(run, kernel, False)
        yield f"attention backward, {kernel}", functools.partial(run, kernel, True)


def memory_items(device: torch.device, calls: tuple[int, int], card: Card | None) -> Items:
    """A copy, {"us", "host_us", "percent_of_bandwidth"}, and a launch, with "us_per_launch"."""

    def copy() -> dict[str, Any]:
        source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
        target = torch.empty_like(source)
        timing = time_calls(lambda: target.copy_(source), device, *calls)
        return _figures(timing, moved=2 * source.nbytes, card=card)

    def launch() -> dict[str, Any]:
        timing = time_calls(_many_small_kernels(device), device, *calls)
        return {**_figures(timing), "us_per_launch": 1e3 * median(timing["samples_ms"]) / SMALL_KERNELS}

    yield "copy", copy
    if device.type == "cuda":
        yield "launch", launch


def _normal(device: torch.device, *shape: int) -> Tensor:
    draw = torch.Generator(device).manual_seed(SEED)
    return torch.randn(*shape, device=device, generator=draw).to(torch.bfloat16)


def _many_small_kernels(device: torch.device) -> Call:
    """Kernels that do next to nothing, one after the other in a CUDA graph: no host is in the way."""
    x = torch.zeros(32, device=device)
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            x.add_(1.0)
    return graph.replay


def constants(products: Mapping[str, Any], rates: Mapping[str, Any], card: Card) -> list[str]:
    """What replaces the assumptions in `bench/limits.py`: the best share of all shapes, bandwidth, a launch.

    Both are the items of their stage, `products` by kind.
    """

    def best(kinds: Iterable[str], peak: float) -> float:
        rows = [row for kind in kinds for row in products.get(kind, {}).values()]
        return max((row.get("tflops", 0.0) / peak for row in rows), default=0.0)

    shares = {"bf16": best(["bf16"], card.bf16_tflops), "fp8": best(["per_tensor", "per_row"], card.fp8_tflops)}
    for name, item in (("attention", "attention, chosen"), ("attention_backward", "attention backward, chosen")):
        shares[name] = rates.get(item, {}).get("tflops", 0.0) / card.bf16_tflops
    lines = [f"RATE_SHARES {name}: {share:.3f}" for name, share in shares.items() if share]
    if "percent_of_bandwidth" in rates.get("copy", {}):
        lines.append(f"BANDWIDTH_SHARE: {rates['copy']['percent_of_bandwidth'] / 100:.3f}")
    if "us_per_launch" in rates.get("launch", {}):
        lines.append(f"LAUNCH_MS: {rates['launch']['us_per_launch'] / 1e3:.5f}")
    return lines


def _figures(timing: dict[str, Any], *, flops: float = 0.0, moved: int = 0, card: Card | None = None) -> dict[str, Any]:
    ms = median(timing["samples_ms"])
    figures = {"us": 1e3 * ms, "host_us": 1e3 * timing["host_ms"]}
    if flops:
        figures["tflops"] = flops / ms / 1e9
    if moved and card is not None:
        figures["percent_of_bandwidth"] = 100 * moved / card.gb_per_second / 1e6 / ms
    return figures


# --- a step by kernel ---


def measure_trace(*how: Any) -> Iterator[dict[str, Any]]:
    """`measure_steps` with one more step under torch's profiler: "kernels", name → [calls, us], the longest first."""

    def traced(call: Call, device: torch.device, warmup: int, repeats: int) -> dict[str, Any]:
        timing = time_calls(call, device, warmup, repeats)
        with torch.profiler.profile() as trace:
            call()
            wait(device)
        spent = {}
        for event in trace.key_averages():
            if device.type == "cpu" or event.device_type != torch.autograd.DeviceType.CPU:
                us = event.self_cpu_time_total if device.type == "cpu" else event.self_device_time_total
                spent[event.key] = [event.count, us]
        kernels = dict(sorted(spent.items(), key=lambda item: -item[1][1]))
        return {**timing, "kernels": kernels}

    with mock.patch.object(worker, "time_calls", traced):
        yield from measure_steps(*how)


# --- tests ---


class Shard:
    """A plugin of pytest: failures are printed when they happen, and the running test is known."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Of one test."""
        self.write(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of its setup, call and teardown."""
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
            last = (report.longreprtext.strip().splitlines() or ["no message"])[-1]
            self.write(report.nodeid, error=last)
        elif report.when == "call" or report.skipped:
            self.write(report.nodeid, outcome=report.outcome)


# --- the process ---


class Record:
    """The result file of a stage's row."""

    def __init__(self, file: Path, items: dict[str, dict[str, Any]], seconds: float) -> None:
        self.file, self.items, self.until = file, items, time.monotonic() + seconds

    def write(self, running: str, **figures: Any) -> None:
        """Put down what an item has given, and that it runs."""
        if figures:
            self.items[running] = figures
        write_file(self.file, json.dumps({"status": RUNNING, "reason": running, "items": self.items}))

    def run(self, items: Items) -> None:
        """Try one after the other."""
        for name, item in items:
            if name in self.items:
                continue
            if self.until - time.monotonic() < LEFT_SECONDS:
                self.write(name, note="not run: no time was left")
                continue
            self.write(name)
            faulthandler.dump_traceback_later(ITEM_SECONDS, exit=True, file=sys.__stderr__)
            try:
                figures = item()
            except Exception as error:  # of a kernel, its compiler or a library; the others are still worth their time
                figures = {"error": first_line(error)}
                self.write(name, **figures)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # raises where CUDA is unusable from here on
            faulthandler.cancel_dump_traceback_later()
            self.write(name, **figures)

    def finish(self) -> None:
        """All items have been tried."""
        wrong = {name: figures["error"] for name, figures in self.items.items() if "error" in figures}
        reason = "; ".join(f"{name}: {error}" for name, error in [*wrong.items()][:3])
        reason += f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        result = {"status": FAILED if wrong else OK, "reason": reason, "items": self.items}
        write_file(self.file, json.dumps(result))


def main() -> None:
    """Run a row of a stage."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    level, row, device = spec["level"], spec["configuration"], torch.device(spec["device"])
    if level == "trace":
        spec_of_step = {**spec, "level": STEP}
        write_file(Path(sys.argv[2]), json.dumps(worker.run(spec_of_step, measure_trace)))
        return
    record = Record(Path(sys.argv[2]), spec["items"], spec["seconds"])
    geometry, resolution = Geometry(**spec["geometry"]), spec["sizes"][0][0]
    card = DEVICES.get(spec["device_name"])
    calls = RATE_CALLS if device.type == "cuda" else CPU_CALLS
    if level == "blocks":
        record.run([(row, functools.partial(compare_gradients, row, geometry, resolution, device))])
    elif level == "rates":
        record.run(
            attention_items(geometry, resolution, device, calls)
            if row == "attention"
            else memory_items(device, calls, card)
        )
    elif level == "kernels":

        def run(case: Case) -> dict[str, Any]:
            check_launcher(case, device)
            place, repeats = (torch.device("meta"), CPU_CALLS) if device.type == "cpu" else (device, LAUNCHER_CALLS)
            return time_launcher(case, place, repeats, card)

        record.run((name, functools.partial(run, case)) for name, case in cases_in_turn())
    else:
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "--capture=no", "--tb=no", "-m", "gpu", row]
        options += [f"--deselect={name}" for name in record.items]
        if pytest.main(options, plugins=[Shard(record.write)]) not in (0, 1, 5):  # passed, failed, no tests
            record.write(row, error="pytest could not run them")
    record.finish()


if __name__ == "__main__":
    main()
