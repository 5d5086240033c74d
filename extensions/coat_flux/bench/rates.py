"""Single kernels at FLUX's shapes: matrix products, attention, a copy, a launch.

What they reach replaces the assumptions in `limits`: share of the peak, of the bandwidth, time between two kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from coat_core.formats import E4M3
from coat_core.ops.attention import attention_backward, attention_forward, use_kernel
from coat_core.ops.scaled_mm import scaled_mm

from .configurations import RATES, Configuration
from .limits import ATTENTION_STEP, HEAD_DIM, token_count
from .timing import SEED, Measurement, Setting

# in and out features over d: output; q k v in one; MLP in, out; single block: q k v and MLP in, output
SHAPES = ((1, 1), (1, 3), (1, 4), (4, 1), (1, 7), (5, 1))
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
SMALL_KERNELS = 500


def measure_rates(row: Configuration, setting: Setting) -> Iterator[Measurement]:
    """Time the kernels of one row; `flops` or `bytes` of a call are among the figures."""
    if row.name == "copy":
        yield _copy(setting)
    elif row.name == "launches":
        yield _launches(setting)
    elif row.name.startswith("gemm"):
        yield from _products(row.name, setting)
    else:
        try:
            yield from _attention(row.name, setting)
        finally:
            use_kernel(None)


def _normal(setting: Setting, *shape: int) -> Tensor:
    draw = torch.Generator(setting.device).manual_seed(SEED)
    return torch.randn(*shape, device=setting.device, generator=draw).to(torch.bfloat16)


def _products(name: str, setting: Setting) -> Iterator[Measurement]:
    """Products y = x Wᵀ; in FP8 with the accumulation of the forward pass, and that of gradients."""
    d = setting.geometry.hidden
    for resolution, batch in setting.sizes:
        m = batch * token_count(resolution)
        for wide_in, wide_out in SHAPES:
            k, n = wide_in * d, wide_out * d
            x, w = _normal(setting, m, k), _normal(setting, n, k)
            figures = {"m": m, "k": k, "n": n, "flops": 2.0 * m * k * n}
            calls: dict[str, Callable[[], Tensor]] = {"": lambda x=x, w=w: x @ w.t()}
            if name != "gemm_bf16":
                rows = (m, n) if name.endswith("per_row") else (None, None)
                scales = [torch.ones(() if size is None else (size, 1), device=setting.device) for size in rows]
                pair = [value.to(E4M3.dtype) for value in (x, w)]

                def multiply(
                    forward: bool, pair: list[Tensor] = pair, scales: list[Tensor] = scales
                ) -> Callable[[], Tensor]:
                    return lambda: scaled_mm(pair[0], scales[0], pair[1], scales[1], None, torch.bfloat16, forward)

                calls = {" forward": multiply(True), " gradient": multiply(False)}
            for label, call in calls.items():
                timing = setting.timed(RATES, call, cold=True)
                yield Measurement(f"{k} -> {n}{label}", resolution, batch, timing, figures)


@torch.no_grad()
def _attention(name: str, setting: Setting) -> Iterator[Measurement]:
    """Attention as the blocks call it: by the kernel that the row's name ends with, else by torch's choice."""
    heads = setting.geometry.heads
    for resolution, batch in setting.sizes:
        length = token_count(resolution)
        shape = batch, length, heads, HEAD_DIM  # in memory; the kernels see heads before tokens
        q, k, v, grad = (_normal(setting, *shape).transpose(1, 2) for _ in range(4))
        flops = 4.0 * batch * heads * length**2 * HEAD_DIM
        use_kernel(name.partition("_")[2] or None, q)
        out, context = attention_forward(q, k, v)
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "forward": (1.0, partial(attention_forward, q, k, v)),
            "backward": (ATTENTION_STEP - 1, partial(attention_backward, grad, q, k, v, out, context)),
        }
        for label, (share, call) in calls.items():
            yield Measurement(label, resolution, batch, setting.timed(RATES, call), {"flops": share * flops})


def _copy(setting: Setting) -> Measurement:
    size = COPIED_BYTES[setting.device.type]
    source = torch.ones(size // 4, device=setting.device)
    target = torch.empty_like(source)
    timing = setting.timed(RATES, lambda: target.copy_(source))
    return Measurement("copy", 0, 0, timing, {"bytes": 2.0 * size})


def _launches(setting: Setting) -> Measurement:
    """Kernels that do next to nothing, one after the other in a CUDA graph: no host is in the way."""
    x = torch.zeros(32, device=setting.device)
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            x.add_(1.0)
    timing = setting.timed(RATES, graph.replay)
    return Measurement(f"{SMALL_KERNELS} kernels", 0, 0, timing, {"kernels": SMALL_KERNELS})
