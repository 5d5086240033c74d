"""Arithmetic of FLUX's token path: what a forward pass and a LoRA training step cannot do without.

Per token and block, d = 128 · heads, L tokens in the sequence (512 of text), rank r:

    linears     12 d² products in either kind of block (q, k, v 3d², output d², MLP 8d²), 2 operations each
    attention   4 d L operations (q kᵀ and its product with v)
    adapters    r (in + out) products over those linears: 18 d r in a double block, 17 d r in a single one

A LoRA step computes no gradient for frozen weights: linears twice (forward, dX), attention 3.5 times (its flash
backward is 2.5 times its forward), adapters three times (forward, dX, dA and dB); full recomputation adds one forward.
Modulation linears see one row per image and are bound by reading their weights; with norms, casts, embedders and the
optimizer they are not counted, so the time this gives is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 128
TEXT_TOKENS = 512
PIXELS_PER_TOKEN = 16  # along a side
ATTENTION_STEP = 3.5


@dataclass(frozen=True)
class Geometry:
    """Size of the transformer and its adapters; the defaults are FLUX.1-dev's."""

    double: int = 19
    single: int = 38
    heads: int = 24
    rank: int = 16

    @property
    def hidden(self) -> int:
        """d, the width of a token."""
        return self.heads * HEAD_DIM

    @property
    def one_double(self) -> Geometry:
        """One double block."""
        return Geometry(1, 0, self.heads, self.rank)

    @property
    def one_single(self) -> Geometry:
        """One single block."""
        return Geometry(0, 1, self.heads, self.rank)


@dataclass(frozen=True)
class Work:
    """Operations (a product and its sum are two), by what does them."""

    linear: float = 0.0
    attention: float = 0.0
    adapters: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.linear + other.linear, self.attention + other.attention, self.adapters + other.adapters)

    @property
    def total(self) -> float:
        """All operations."""
        return self.linear + self.attention + self.adapters


def token_count(resolution: int) -> int:
    """Tokens of one square image of `resolution` pixels a side, and of its text."""
    return (resolution // PIXELS_PER_TOKEN) ** 2 + TEXT_TOKENS


def forward_work(geometry: Geometry, resolution: int, batch: int) -> Work:
    """One forward pass of all blocks on `batch` images."""
    d, length = geometry.hidden, token_count(resolution)
    rows, blocks = batch * length, geometry.double + geometry.single
    return Work(
        linear=2.0 * rows * blocks * 12 * d * d,
        attention=4.0 * rows * blocks * d * length,
        adapters=2.0 * rows * geometry.rank * d * (18 * geometry.double + 17 * geometry.single),
    )


def step_work(geometry: Geometry, resolution: int, batch: int, *, recomputed: bool) -> Work:
    """Forward and backward pass of all blocks on `batch` images, with every block recomputed or none."""
    forward = forward_work(geometry, resolution, batch)
    step = Work(2 * forward.linear, ATTENTION_STEP * forward.attention, 3 * forward.adapters)
    return step + forward if recomputed else step


def product_work(m: int, k: int, n: int) -> Work:
    """[m, k] times [k, n]."""
    return Work(linear=2.0 * m * k * n)
