"""What `gpu_check.py` measures of single kernels: products, attention, a copy, and each launcher of ours.

What the first of them reach replaces the assumptions in `bench/limits.py`: share of the peak, of the bandwidth, time
between two kernels. Launchers come as calls on tensors without memory (tests/helpers/kernel_cases.py); here
they get memory. Every argument and result counts once: what a kernel reads twice, or writes for another of the same
launcher, lowers the share of the bandwidth. On the meta device the launchers run and their kernels do not.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from coat_core import ops
from coat_core.formats import E4M3, FORMATS
from coat_core.ops.attention import attention_backward, attention_forward, chosen_kernel, kernel_obstacles, use_kernel
from coat_core.ops.dispatch import launchers, triton_obstacle
from coat_core.ops.launch import recorded_launches
from coat_core.ops.scaled_mm import scaled_mm, unsupported_reason
from coat_flux.base.files import write_file
from coat_flux.bench import worker
from coat_flux.bench.configurations import CPU_CALLS, OK
from coat_flux.bench.limits import ATTENTION_STEP, HEAD_DIM, Geometry, token_count
from coat_flux.bench.measure import SEED, time_calls
from coat_flux.plan.speed import DEVICES, Card

Case = functools.partial[Any]
Call = Callable[[], object]

# in and out features over d: output; q k v in one; MLP in, out; single block: q k v and MLP in, output
SHAPES = ((1, 1), (1, 3), (1, 4), (4, 1), (1, 7), (5, 1))
KERNELS = ("chosen", "cudnn", "flash", "efficient", "fa3", "fa4")  # of attention; the first is torch's choice
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
SMALL_KERNELS = 500
RATE_CALLS, LAUNCHER_CALLS = (10, 50), (5, 20)  # for warm-up, and timed


def measure_rates(
    geometry: Geometry, resolution: int, device: torch.device, calls: tuple[int, int], card: Card | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time products, attention by every kernel, a copy and launches; one that cannot run here has "note".

    Yields:
        (name, {"us": median, "host_us": shortest call, "tflops" or "percent_of_bandwidth" or "us_per_launch"}).
    """
    for name, flops, call in _products(geometry, resolution, device):
        yield name, _figures(time_calls(call, device, *calls, cold=True), flops=flops)
    for kernel in KERNELS if device.type == "cuda" else KERNELS[:1]:
        try:
            for name, flops, call in _attention(kernel, geometry, resolution, device):
                yield name, _figures(time_calls(call, device, *calls), flops=flops)
        except Exception as error:  # of a library that is not installed, or that this GPU cannot use
            yield f"attention, {kernel}", {"note": _first_line(error)}
        finally:
            use_kernel(None)
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, *calls)
    yield "copy", _figures(timing, moved=2 * source.nbytes, card=card)
    if device.type == "cuda":
        timing = time_calls(_many_small_kernels(device), device, *calls)
        yield "launch", {**_figures(timing), "us_per_launch": 1e3 * median(timing["samples_ms"]) / SMALL_KERNELS}


def _normal(device: torch.device, *shape: int) -> Tensor:
    draw = torch.Generator(device).manual_seed(SEED)
    return torch.randn(*shape, device=device, generator=draw).to(torch.bfloat16)


def _products(geometry: Geometry, resolution: int, device: torch.device) -> Iterator[tuple[str, float, Call]]:
    """Products y = x Wᵀ in bf16 and FP8, there with the accumulation of the forward pass and with that of gradients."""
    m, hidden = token_count(resolution), geometry.heads * HEAD_DIM
    for wide_in, wide_out in SHAPES:
        k, n = wide_in * hidden, wide_out * hidden
        flops, shape = 2.0 * m * k * n, f"{k} -> {n}"
        x, w = _normal(device, m, k), _normal(device, n, k)
        yield f"bf16 product {shape}", flops, lambda x=x, w=w: x @ w.t()
        a, b = x.to(E4M3.dtype), w.to(E4M3.dtype)
        for scaled in ("per tensor", "per row"):
            sizes = [(m, 1), (n, 1)] if scaled == "per row" else [(), ()]
            scale_a, scale_b = (torch.ones(size, device=device) for size in sizes)
            for forward in (True, False):
                call = functools.partial(scaled_mm, a, scale_a, b, scale_b, None, torch.bfloat16, forward)
                yield f"fp8 product {shape} {scaled}{'' if forward else ', of gradients'}", flops, call


@torch.no_grad()
def _attention(
    kernel: str, geometry: Geometry, resolution: int, device: torch.device
) -> Iterator[tuple[str, float, Call]]:
    """Attention as the blocks call it."""
    length, heads = token_count(resolution), geometry.heads
    q, k, v, grad = (_normal(device, 1, length, heads, HEAD_DIM).transpose(1, 2) for _ in range(4))
    flops = 4.0 * heads * length**2 * HEAD_DIM
    use_kernel(None if kernel == "chosen" else kernel, q)
    out, context = attention_forward(q, k, v)
    yield f"attention, {kernel}", flops, functools.partial(attention_forward, q, k, v)
    backward = functools.partial(attention_backward, grad, q, k, v, out, context)
    yield f"attention backward, {kernel}", (ATTENTION_STEP - 1) * flops, backward


def _many_small_kernels(device: torch.device) -> Call:
    """Kernels that do next to nothing, one after the other in a CUDA graph: no host is in the way."""
    x = torch.zeros(32, device=device)
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            x.add_(1.0)
    return graph.replay


def constants(rates: Mapping[str, Mapping[str, Any]], card: Card) -> list[str]:
    """What replaces the assumptions in `bench/limits.py`: the best share of all shapes, bandwidth, a launch."""

    def best(start: str, peak: float) -> float:
        return max((row["tflops"] / peak for name, row in rates.items() if name.startswith(start)), default=0.0)

    shares = {
        "bf16": best("bf16 product", card.bf16_tflops),
        "fp8": best("fp8 product", card.fp8_tflops),
        "attention": best("attention, chosen", card.bf16_tflops),
        "attention_backward": best("attention backward, chosen", card.bf16_tflops),
    }
    lines = [f"RATE_SHARES {name}: {share:.3f}" for name, share in shares.items() if share]
    if "copy" in rates:
        lines.append(f"BANDWIDTH_SHARE: {rates['copy']['percent_of_bandwidth'] / 100:.3f}")
    if "launch" in rates:
        lines.append(f"LAUNCH_MS: {rates['launch']['us_per_launch'] / 1e3:.5f}")
    return lines


def uncovered(cases: Mapping[str, Case]) -> list[str]:
    """Operators with a launcher that none of these cases calls."""
    for found in pkgutil.iter_modules(ops.__path__):  # operators register themselves when they are imported
        importlib.import_module(f"{ops.__name__}.{found.name}")
    called = {f"coat::{case.func.__name__}" for case in cases.values()}
    return sorted(set(launchers) - called)


def measure_launchers(
    cases: Mapping[str, Case], device: torch.device, calls: tuple[int, int], card: Card | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time each launcher; one that fails has "error" and no figures.

    Args:
        cases: name → launcher with its arguments on the meta device.
        device: where it runs.
        calls: for warm-up, and timed.
        card: the device, if its rates are known.

    Yields:
        (name, {"us": median, "host_us": shortest call, "launches", "bytes", "percent_of_bandwidth"}).
    """
    for name, case in cases.items():
        try:
            yield name, _launched(case, device, calls, card)
        except Exception as error:  # of a kernel or its compiler; the others are still worth their time
            yield name, {"error": _first_line(error)}


def _launched(case: Case, device: torch.device, calls: tuple[int, int], card: Card | None) -> dict[str, Any]:
    launched: list[Any] = []
    arguments = (case.args, case.keywords)
    with recorded_launches(lambda kernel, *_: launched.append(kernel)):
        results = case()
    number = len(launched)
    tensors = {id(x): x for x in tree_leaves((arguments, results)) if isinstance(x, Tensor)}
    moved = sum(x.nbytes for x in tensors.values())
    if device.type == "meta":
        with recorded_launches(lambda *_: None):
            timing = time_calls(case, device, *calls)
    else:
        args, keywords = tree_map(lambda x: _filled(x, device) if isinstance(x, Tensor) else x, arguments)
        timing = time_calls(functools.partial(case.func, *args, **keywords), device, *calls, cold=True)
    return {**_figures(timing, moved=moved, card=card), "launches": number, "bytes": moved}


def _filled(x: Tensor, device: torch.device) -> Tensor:
    """A tensor like `x` on the device: numbers from 0.5 to 1.5, or small integers."""
    filled = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if x.dtype.is_floating_point:
        return filled.copy_(torch.rand(x.shape, device=device) + 0.5)
    return filled.copy_(torch.randint(0, 100, x.shape, device=device))


def _figures(timing: dict[str, Any], *, flops: float = 0.0, moved: int = 0, card: Card | None = None) -> dict[str, Any]:
    ms = median(timing["samples_ms"])
    figures = {"us": 1e3 * ms, "host_us": 1e3 * timing["host_ms"]}
    if flops:
        figures["tflops"] = flops / ms / 1e9
    if moved and card is not None:
        figures["percent_of_bandwidth"] = 100 * moved / card.gb_per_second / 1e6 / ms
    return figures


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def choices(device: torch.device) -> dict[str, Any]:
    """What is decided on this GPU: whether our kernels and FP8 products run, which kernel attention takes."""
    shapes = {str(resolution): (1, token_count(resolution), Geometry().heads, HEAD_DIM) for resolution in (512, 1024)}
    heads = {
        name: torch.empty(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for name, shape in shapes.items()
    }
    products = {}
    for name in ("e4m3", "e5m2"):
        for scaled in ("per_tensor", "per_row"):
            reason = unsupported_reason(device, FORMATS[name].dtype, E4M3.dtype, scaled == "per_row")
            products[f"{name} x e4m3, {scaled}"] = reason or "ok"
    refused = triton_obstacle(device)
    self_test = ""
    if refused is not None:  # the whole error, of which `triton_obstacle` keeps a line
        try:
            from coat_core.ops.quantize_kernel import agrees_with_reference

            self_test = f"agrees with the reference: {agrees_with_reference(device)}"
        except Exception:
            self_test = traceback.format_exc()
    return {
        "attention": {name: chosen_kernel(x, x, x) for name, x in heads.items()},
        "attention_kernels": kernel_obstacles(heads["1024"]),
        "fp8_products": products,
        "kernels_refused": refused,
        "self_test": self_test,
    }


def main() -> None:
    """The process of the stages "versions" and "kernels": SPEC RESULT, both JSON files."""
    from tests.helpers.kernel_cases import CASES

    spec_file, result_file = map(Path, sys.argv[1:3])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    device = torch.device(spec["device"])
    if spec["level"] == "machine":
        result = worker.run(spec)
        if result["status"] == OK and device.type == "cuda":
            result["machine"] |= choices(torch.device("cuda", 0))
        write_file(result_file, json.dumps(result))
        return
    card = DEVICES.get(spec["device_name"])
    calls = RATE_CALLS if device.type == "cuda" else CPU_CALLS
    results: dict[str, Any] = {}
    for name, figures in measure_rates(Geometry(**spec["geometry"]), spec["sizes"][0][0], device, calls, card):
        results[name] = figures
        write_file(result_file, json.dumps(results))
    meta = torch.device("meta") if device.type == "cpu" else device
    results |= {name: {"note": "no case in tests/helpers/kernel_cases.py"} for name in uncovered(CASES)}
    for name, figures in measure_launchers(CASES, meta, LAUNCHER_CALLS, card):
        results[name] = figures
        write_file(result_file, json.dumps(results))


if __name__ == "__main__":
    main()
