"""Lower bound of a step's time: the arithmetic of FLUX's token path over the device's rates.

Counted is the unavoidable work of a LoRA training step. Per token and block, d = 128 · heads, L tokens in the sequence
(512 of text), rank r:

    linears     12 d² products in either kind of block (q, k, v 3d², output d², MLP 8d²), 2 operations each
    attention   4 d L operations (q kᵀ and its product with v)
    adapters    r (in + out) products over those linears: 18 d r in a double block, 17 d r in a single one

Linears count twice (forward, dX), attention 3.5 times (its flash backward is 2.5 times its forward), adapters three
times (forward, dX, dA and dB); full recomputation adds one forward. Modulation, norms, casts, embedders and the
optimizer are not counted.

The rates are NVIDIA's dense peaks of the cards in `plan/cards.tsv`. An "H200 NVL" or a "4090 Laptop GPU" is another
card with other rates.

Launches of our Triton kernels are also modelled by their instructions. `instructions.tsv`, written by
`scripts/compile_kernels.py --instructions`, has a row for each launch of a counted step with other machine code: a
program's warps issue `once` instructions, and `each` in every one of `trips` (a quotient of arguments) through its
loops; `source` is `source_digest` of the kernel that was counted. Counted for sm_90, used for every card; good to about
15 %.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..plan.speed import Card

HEAD_DIM = 128
TEXT_TOKENS = 512
PIXELS_PER_TOKEN = 16  # along a side
ATTENTION_STEP = 3.5

# Assumed shares of the peak that large kernels reach, from an H200's 3.95 of 4.8 TB/s and, in TFLOPS, bf16 740, FP8
# 1380, cuDNN attention 609 forward and 499 backward. To be replaced by measurements.
BANDWIDTH_SHARE = 3950.0 / 4800.0
RATE_SHARES = {
    "bf16": 740.0 / 989.4,
    "fp8": 1380.0 / 1978.9,
    "int8": 500.0 / 838.0,  # of Triton kernels on an RTX 5090
    "attention": 609.0 / 989.4,
    "attention_backward": 499.0 / 989.4,
}
LAUNCH_MS = 0.0022  # from the end of a kernel to the start of the next, in one stream
# Tiles of a matrix product that one multiprocessor computes at a time, and their speed. Both are assumptions, as is
# the share of the bandwidth reached by products smaller than a tile: too few multiprocessors have work.
TILES = (((128, 256), 1.0), ((128, 128), 0.9))
NARROW = 128
NARROW_SHARE = 0.55


class Geometry(NamedTuple):
    """Size of the transformer and its adapters; the defaults are FLUX.1-dev's."""

    double: int = 19
    single: int = 38
    heads: int = 24
    rank: int = 16

    def sizes(self) -> dict[str, int]:
        """As arguments of diffusers' transformer."""
        return {"num_layers": self.double, "num_single_layers": self.single, "num_attention_heads": self.heads}


def token_count(resolution: int) -> int:
    """Tokens of one square image of `resolution` pixels a side, and of its text."""
    return (resolution // PIXELS_PER_TOKEN) ** 2 + TEXT_TOKENS


def step_work(
    geometry: Geometry, resolution: int, batch: int, *, recomputed: bool, full: bool = False
) -> tuple[float, float, float]:
    """Operations of linears, attention and adapters, a product and its sum being two; `full` trains the linears."""
    d = geometry.heads * HEAD_DIM
    length, more = token_count(resolution), int(recomputed)
    rows, blocks = batch * length, geometry.double + geometry.single
    ranked = 0 if full else geometry.rank * d * (18 * geometry.double + 17 * geometry.single)
    linear = (2 + full + more) * 2.0 * rows * blocks * 12 * d * d
    attention = (ATTENTION_STEP + more) * 4.0 * rows * blocks * d * length
    return linear, attention, (3 + more) * 2.0 * rows * ranked


def least_ms(card: Card, work: tuple[float, float, float], *, fp8_linears: bool) -> float:
    """The least time for `step_work`'s operations: linears in FP8 if asked, the others in bf16."""
    linear, attention, adapters = work
    rate = card.fp8_tflops if fp8_linears else card.bf16_tflops
    return (linear / rate + (attention + adapters) / card.bf16_tflops) / 1e9


def kernel_ms(
    card: Card, moved: float, flops: float, kind: str, shape: tuple[int, int, int] | None, kernels: int = 1
) -> float:
    """Estimated time of an operator: max(bytes / bandwidth, operations / (rate · efficiency)) + launches.

    `kind` is of `RATE_SHARES`, `shape` (M, N, K) of a matrix product, whose efficiency is the used share of its tiles,
    and of their last wave on the multiprocessors.
    """
    bandwidth, efficiency = card.gb_per_second * BANDWIDTH_SHARE, 1.0
    if shape is not None and min(shape[:2]) >= NARROW:
        efficiency = 0.0
        for (rows, columns), speed in TILES:
            tiles = math.ceil(shape[0] / rows) * math.ceil(shape[1] / columns)
            waves = math.ceil(tiles / card.multiprocessors)
            used = shape[0] * shape[1] / (waves * card.multiprocessors * rows * columns)
            efficiency = max(efficiency, speed * used)
    elif shape is not None and max(shape[:2]) >= NARROW:
        bandwidth *= NARROW_SHARE
    compute = 0.0
    if flops:
        peak = {"fp8": card.fp8_tflops, "int8": card.int8_tflops}.get(kind, card.bf16_tflops)
        compute = flops / (RATE_SHARES[kind] * peak * efficiency) / 1e9
    return max(moved / bandwidth / 1e6, compute) + kernels * LAUNCH_MS


Launched = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, options

ISSUED = 4  # warp instructions a clock and multiprocessor, at best
ISSUE_SHARE = 0.6  # of it, assumed
ENOUGH_WARPS = 16  # on a multiprocessor to hide latency; a kernel with fewer is slower than modelled

with Path(__file__).with_name("instructions.tsv").open(encoding="utf-8", newline="") as table:
    ROWS = {(row["kernel"], row["variant"]): row for row in csv.DictReader(table, delimiter="\t")}


def key_of(launched: Launched) -> tuple[str, str]:
    """The kernel's name, and a digest of the types and constants that decide its machine code."""
    kernel, _, args, options = launched
    types = ["1" if type(x) is int and x == 1 else str(getattr(x, "dtype", type(x).__name__)) for x in args]
    text = f"{types} {sorted((name, str(value)) for name, value in options.items())}"
    return kernel.__name__, hashlib.sha256(text.encode()).hexdigest()[:8]


def source_digest(kernel: Any) -> str:
    """Of a kernel's code without comments, and of the functions and constants that it names."""
    (function,) = ast.parse(inspect.getsource(kernel.fn)).body
    if ast.get_docstring(function) is not None:
        del function.body[0]
    parts = [re.sub(r"\w+=\[\]|, ", "", ast.dump(function))]  # Python 3.13 leaves empty fields out
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    for name in sorted(named & kernel.fn.__globals__.keys()):
        used = kernel.fn.__globals__[name]
        if hasattr(used, "fn"):
            parts.append(source_digest(used))
        elif hasattr(used, "value"):  # tl.constexpr
            parts.append(repr(used.value))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def issue(card: Card, launched: Launched) -> tuple[float, int]:
    """Milliseconds to issue the instructions, and the launch; and the warps that a multiprocessor holds.

    Without a row the launch's alone, and 0.
    """
    kernel, grid, args, options = launched
    row = ROWS.get(key_of(launched))
    if row is None:
        return LAUNCH_MS, 0
    arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **options, "1": 1}
    length, block = row["trips"].split("/")
    trips = math.ceil(arguments[length] / arguments[block])
    instructions = (int(row["once"]) + int(row["each"]) * trips) * int(row["warps"]) * math.prod(grid)
    issued = ISSUE_SHARE * ISSUED * card.clock_ghz * card.multiprocessors
    return instructions / issued / 1e6 + LAUNCH_MS, int(row["resident"])
