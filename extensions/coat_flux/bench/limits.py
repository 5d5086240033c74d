"""How fast a device could be: NVIDIA's dense peak rates for the cards they are known of, else measured here.

Names are matched whole, as `torch.cuda.get_device_name` gives them: an "H200 NVL" or a "4090 Laptop GPU" is another
card with other rates.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..plan.facts import CARDS
from .flops import Work

GB_PER_SECOND = {"H100": 3350.0, "H200": 4800.0, "L40S": 864.0, "RTX 4090": 1008.0, "RTX 5090": 1792.0}  # datasheets
DEVICE_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
}
GEMM_SIDE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
REPEATS = 5


@dataclass(frozen=True)
class Limit:
    """Rates of a device.

    Attributes:
        bf16_tflops: dense bf16 matrix products, 1e12 operations a second.
        fp8_tflops: the same in FP8; equal to bf16's where the card has no FP8, or none is known.
        gb_per_second: memory traffic, 1e9 bytes a second.
        source: where the rates come from, in words.
    """

    bf16_tflops: float
    fp8_tflops: float
    gb_per_second: float
    source: str

    def milliseconds(self, work: Work, *, fp8_linears: bool) -> float:
        """The least time for `work`: linears in FP8 where asked, attention and adapters in bf16."""
        linear = self.fp8_tflops if fp8_linears else self.bf16_tflops
        return (work.linear / linear + (work.attention + work.adapters) / self.bf16_tflops) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def known_limit(device_name: str) -> Limit | None:
    """The published rates of the card of this name; None where they are not known."""
    short = DEVICE_NAMES.get(device_name)
    card = next((card for card in CARDS if card.name == short), None)
    if short is None or card is None:
        return None
    return Limit(card.bf16_tflops, card.fp8_tflops, GB_PER_SECOND[short], f"published dense peak of {device_name}")


def measured_limit(device: torch.device) -> Limit:
    """The rate of a large bf16 matrix product, and of a large copy, on this device: the best of a few."""
    side = GEMM_SIDE[device.type]
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=draw).to(torch.bfloat16) for _ in range(2))
    product = 2.0 * side**3 / _best_seconds(lambda: a @ b, device) / 1e12
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device, generator=draw)
    target = torch.empty_like(source)
    copy = 2.0 * COPY_BYTES[device.type] / _best_seconds(lambda: target.copy_(source), device) / 1e9
    return Limit(product, product, copy, f"measured: a {side}³ bf16 matrix product and a copy; its peak is not known")


def _best_seconds(call: Any, device: torch.device) -> float:
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first warms up, and is never the best by chance alone
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
