"""Lower bound of a step's time: the arithmetic of FLUX's token path over the device's rates.

Counted is the unavoidable work of a LoRA training step. Per token and block, d = 128 · heads, L tokens in the sequence
(512 of text), rank r:

    linears     12 d² products in either kind of block (q, k, v 3d², output d², MLP 8d²), 2 operations each
    attention   4 d L operations (q kᵀ and its product with v)
    adapters    r (in + out) products over those linears: 18 d r in a double block, 17 d r in a single one

Linears count twice (forward, dX), attention 3.5 times (its flash backward is 2.5 times its forward), adapters three
times (forward, dX, dA and dB); full recomputation adds one forward. Modulation, norms, casts, embedders and the
optimizer are not counted.

The rates are NVIDIA's dense peaks of the cards in `plan.speed.CARDS`. An "H200 NVL" or a "4090 Laptop GPU" is another
card with other rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

HEAD_DIM = 128
TEXT_TOKENS = 512
PIXELS_PER_TOKEN = 16  # along a side
ATTENTION_STEP = 3.5
DEVICE_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
}

# What large kernels are assumed to reach of the peak: on an H200 3.95 of 4.8 TB/s and, in TFLOPS, bf16 740, FP8 1380,
# cuDNN attention 609 forward and 499 backward; the same shares on other cards. To be replaced by measurements.
BANDWIDTH_SHARE = 3950.0 / 4800.0
RATE_SHARES = {
    "bf16": 740.0 / 989.4,
    "fp8": 1380.0 / 1978.9,
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

    @property
    def hidden(self) -> int:
        """Hidden size d."""
        return self.heads * HEAD_DIM


class Work(NamedTuple):
    """Operations (a product and its sum are two), by kind."""

    linear: float
    attention: float
    adapters: float


class Limit(NamedTuple):
    """Rates of a device: dense matrix products and memory traffic."""

    bf16_tflops: float
    fp8_tflops: float
    gb_per_second: float

    def milliseconds(self, work: Work, *, fp8_linears: bool) -> float:
        """The least time for `work`: linears in FP8 if asked, attention and adapters in bf16."""
        linear = self.fp8_tflops if fp8_linears else self.bf16_tflops
        return (work.linear / linear + (work.attention + work.adapters) / self.bf16_tflops) / 1e9


def token_count(resolution: int) -> int:
    """Tokens of one square image of `resolution` pixels a side, and of its text."""
    return (resolution // PIXELS_PER_TOKEN) ** 2 + TEXT_TOKENS


def step_work(geometry: Geometry, resolution: int, batch: int, *, recomputed: bool, full: bool = False) -> Work:
    """Forward and backward pass of all blocks; `full` trains the linears' weights."""
    d, length, more = geometry.hidden, token_count(resolution), int(recomputed)
    rows, blocks = batch * length, geometry.double + geometry.single
    ranked = 0 if full else geometry.rank * d * (18 * geometry.double + 17 * geometry.single)
    return Work(
        linear=(2 + full + more) * 2.0 * rows * blocks * 12 * d * d,
        attention=(ATTENTION_STEP + more) * 4.0 * rows * blocks * d * length,
        adapters=(3 + more) * 2.0 * rows * ranked,
    )


def known_limit(device_name: str) -> Limit | None:
    """The published rates of the card of this name, or None."""
    from ..plan.speed import CARDS

    for card in CARDS:
        if card.name == DEVICE_NAMES.get(device_name):
            return Limit(card.bf16_tflops, card.fp8_tflops, card.gb_per_second)
    return None


class CostModel(NamedTuple):
    """Estimated kernel times: ms = max(bytes / bandwidth, operations / (rate · efficiency)) + launch.

    The efficiency of a matrix product is the used share of its tiles and of their last wave on the multiprocessors.
    `gb_per_second` and `tflops` (by kind "bf16", "fp8", "attention", "attention_backward") are the rates reached.
    """

    gb_per_second: float
    tflops: Mapping[str, float]
    multiprocessors: int

    def milliseconds(
        self, moved: float, flops: float, kind: str, shape: tuple[int, int, int] | None, kernels: int = 1
    ) -> float:
        """Time of an operator that moves `moved` bytes; `shape`: (M, N, K) of a product."""
        bandwidth, efficiency = self.gb_per_second, 1.0
        if shape is not None and min(shape[:2]) >= NARROW:
            efficiency = 0.0
            for (rows, columns), speed in TILES:
                tiles = math.ceil(shape[0] / rows) * math.ceil(shape[1] / columns)
                waves = math.ceil(tiles / self.multiprocessors)
                used = shape[0] * shape[1] / (waves * self.multiprocessors * rows * columns)
                efficiency = max(efficiency, speed * used)
        elif shape is not None and max(shape[:2]) >= NARROW:
            bandwidth *= NARROW_SHARE
        compute = flops / (self.tflops[kind] * efficiency) / 1e9 if flops else 0.0
        return max(moved / bandwidth / 1e6, compute) + kernels * LAUNCH_MS


def cost_models() -> dict[str, CostModel]:
    """Short name of each card ("h200", "rtx4090") → its model."""
    from ..plan.speed import CARDS

    models = {}
    for card in CARDS:
        if card.multiprocessors:
            peaks = {"fp8": card.fp8_tflops}
            rates = {kind: share * peaks.get(kind, card.bf16_tflops) for kind, share in RATE_SHARES.items()}
            bandwidth = card.gb_per_second * BANDWIDTH_SHARE
            models[card.name.lower().replace(" ", "")] = CostModel(bandwidth, rates, card.multiprocessors)
    return models
