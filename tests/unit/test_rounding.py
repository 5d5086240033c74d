"""Rounding at random between neighbouring codes: what is drawn, how often each code comes, and what the mean is."""

import pytest
import torch
from torch import Tensor

from coat_core.config import ExpansionConfig
from coat_core.expansion import dequantize_blocks, quantize_blocks
from coat_core.formats import get_format
from coat_core.moments import dequantize_log, quantize_log
from coat_core.rounding import streams, uniform
from tests.tolerances import STOCHASTIC_SIGMAS

BLOCK = 128
STEPS = 300
FORMATS = ["e4m3", "e4m3 expanded", "e5m2", "e5m2 expanded", "uint8_log"]


def draws_of(stream: int, steps: range) -> Tensor:
    """What the elements of a parameter of one block draw, fp32 [steps, BLOCK]."""
    number = streams(5, stream + 1)[stream].item()
    return uniform(torch.tensor([[number, step, 0] for step in steps], dtype=torch.int32), BLOCK)


def scalar_mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def scalar_uniform(seed: int, number: int, step: int, element: int) -> float:
    stream = scalar_mix((scalar_mix(seed % 2**32 ^ scalar_mix(seed >> 32)) + number) % 2**32)
    bits = scalar_mix((scalar_mix(element ^ stream) + scalar_mix(step ^ scalar_mix(stream))) % 2**32)
    return (bits >> 8) / 2**24


@pytest.mark.parametrize("seed", [0, 42, 2**31 + 7, 2**63 - 1])
def test_draws_are_those_of_whole_numbers(seed, device):
    """So they are the same bits wherever they are computed."""
    places = [(number, step, first) for number in (0, 1, 977) for step in (1, 2000) for first in (0, 128, 3 * 2**20)]
    every = streams(seed, 978).tolist()
    table = torch.tensor([[every[number], step, first] for number, step, first in places], dtype=torch.int32)
    found = uniform(table.to(device), 16)
    expected = [[scalar_uniform(seed, number, step, first + i) for i in range(16)] for number, step, first in places]
    assert streams(seed, 978, device).tolist() == every
    assert found.tolist() == expected


def round_trip(fmt: str, blocks: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and what they are read back as."""
    if fmt == "uint8_log":
        stored = quantize_log(blocks, drawn)
        return stored[0], dequantize_log(*stored)
    name, _, expanded = fmt.partition(" ")
    codes, *numbers = quantize_blocks(blocks, get_format(name), ExpansionConfig() if expanded else None, drawn)
    return codes, dequantize_blocks(codes, *numbers)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_code_comes_as_often_as_the_value_is_near_it(fmt):
    """One value between the two ends of its block: only its two neighbours come, the upper in proportion."""
    drawn = draws_of(1, range(1, STEPS + 1))
    for x in (0.7231, 0.0123, 3.1e-4, 1.7e-6):
        block = torch.full((BLOCK,), x)
        block[0], block[-1] = 1.0, 1e-6
        codes, back = round_trip(fmt, block.expand(STEPS, -1).contiguous(), drawn)
        middle, places = back[:, 1:-1].double(), codes.view(torch.uint8).to(torch.int32)[:, 1:-1]
        lower, upper = middle.min().item(), middle.max().item()
        assert middle.unique().numel() == 2
        assert (places.max() - places.min()).item() == 1
        share = (block[1].item() - lower) / (upper - lower)
        assert 0 < share < 1
        sigma = (share * (1 - share) / middle.numel()) ** 0.5
        assert (middle == upper).double().mean().item() == pytest.approx(share, abs=STOCHASTIC_SIGMAS * sigma)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_was_stored_stays_and_what_is_special_is_as_to_nearest(fmt):
    generator = torch.Generator().manual_seed(2)
    blocks = torch.rand(40, BLOCK, generator=generator) * 10.0 ** -torch.randint(0, 5, (40, 1), generator=generator)
    blocks[3], blocks[4], blocks[5] = 0.0, 1.0, 1e-30
    blocks[6, ::3], blocks[7, 5], blocks[8, 9] = 0.0, float("inf"), float("nan")
    blocks[9] = torch.logspace(-37, 37, BLOCK)
    drawn = draws_of(0, range(40))
    _, once = round_trip(fmt, blocks, drawn)
    nearest = round_trip(fmt, blocks, None)[1]
    assert torch.equal(once.isnan(), nearest.isnan())
    assert once.nan_to_num().isfinite().all()
    if "expanded" in fmt or fmt == "uint8_log":  # else the smallest become 0, as to nearest
        assert torch.equal(once == 0, blocks == 0)
    assert (once >= 0)[~once.isnan()].all()
    torch.testing.assert_close(once[3:6], blocks[3:6], rtol=1e-5, atol=0.0)
    if fmt in ("e4m3", "e5m2"):
        assert torch.equal(round_trip(fmt, once.nan_to_num(), 1 - drawn)[1], once.nan_to_num())
