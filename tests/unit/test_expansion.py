"""Dynamic range expansion: the paper's constants, blocks worked out by hand, and what it is worth on real shapes."""

import math

import pytest
import torch

from coat_core.config import PAPER_EXPANSION, ExpansionConfig
from coat_core.expansion import dequantize_blocks, expand, expansion_parameters, quantize_blocks
from coat_core.formats import E4M3, FORMATS
from tests.helpers.asserts import assert_bitwise
from tests.tolerances import CONSTANT_BLOCK_REL, EXPONENT_BOUNDARY

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
PAPER = PAPER_EXPANSION
configs = pytest.mark.parametrize("config", [ExpansionConfig(), PAPER], ids=["default", "paper"])


def _lognormal(n: int, sigma: float) -> torch.Tensor:
    """exp_avg_sq-like blocks [n, 128] around 1e-8."""
    return torch.exp(torch.randn(n, 128) * sigma) * 1e-8


@formats
@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_paper_constants_give_the_papers_exponent(fmt, sigma):
    x = _lognormal(500, sigma) * torch.sign(torch.randn(500, 128))
    _, exponent = expansion_parameters(x, fmt, PAPER)
    magnitude = x.abs().double()
    ratio = magnitude.amax(-1, keepdim=True) / magnitude.amin(-1, keepdim=True)
    steps = 16.0 * math.log2(fmt.max**2 / 2.0) / torch.log2(ratio)
    undecided = (steps - steps.round()).abs() <= EXPONENT_BOUNDARY * steps
    expected = torch.floor(steps) / 16.0
    assert undecided.float().mean() < 0.1
    assert torch.equal(exponent.double()[~undecided], expected[~undecided])
    assert ((exponent.double() - expected).abs() <= 1.0 / 16.0).all()


def test_worked_example():
    """[1, 4, 16]: center 4, spread 2^4, bound 2^16.61: k = 4.125 after rounding down; f = 4^-4.125, 1, 4^4.125."""
    x = torch.tensor([[1.0, 4.0, 16.0, 0.0, -16.0]])
    center, exponent = expansion_parameters(x, E4M3, PAPER)
    assert (center.item(), exponent.item()) == (4.0, 4.125)
    expanded = expand(x, center, exponent)
    torch.testing.assert_close(expanded, torch.tensor([[4**-4.125, 1.0, 4**4.125, 0.0, -(4**4.125)]]))
    codes, *_ = quantize_blocks(x, E4M3, PAPER)
    assert codes.to(torch.float32)[0, 2:].tolist() == [448.0, 0.0, -448.0]


@formats
@pytest.mark.parametrize("step", [1.0 / 16.0, 0.0])
def test_expanded_blocks_fill_the_range_that_was_asked_for(fmt, step):
    x = _lognormal(200, 0.5)
    config = ExpansionConfig(range_fraction=0.5, exponent_step=step)
    expanded = expand(x, *expansion_parameters(x, fmt, config))
    filled = torch.log2(expanded.amax(-1) / expanded.amin(-1))
    bound = math.log2(fmt.max**2 / 2)
    spread = torch.log2(x.amax(-1) / x.amin(-1))
    assert (filled <= bound * (1 + EXPONENT_BOUNDARY)).all()
    assert (filled >= bound * (1 - EXPONENT_BOUNDARY) - step * spread).all()


@configs
@formats
@pytest.mark.parametrize("value", [1e-30, 3e-9, 1.0, -7.0, 1e30])
def test_constant_blocks_come_back(fmt, value, config):
    x = torch.full((2, 128), value)
    stored = quantize_blocks(x, fmt, config)
    assert stored[2].tolist() == [[1.0], [1.0]]
    torch.testing.assert_close(dequantize_blocks(*stored), x, rtol=CONSTANT_BLOCK_REL, atol=0.0)


@formats
@pytest.mark.parametrize("expansion", [ExpansionConfig(), PAPER, None], ids=["default", "paper", "plain"])
def test_nonfinite_elements_touch_nothing_else(fmt, expansion):
    clean = torch.randn(4, 64)
    clean[0, 3] = clean[1, 4] = clean[2, 5] = 0.0
    dirty = clean.clone()
    dirty[0, 3], dirty[1, 4], dirty[2, 5] = math.nan, math.inf, -math.inf
    expected = dequantize_blocks(*quantize_blocks(clean, fmt, expansion))
    actual = dequantize_blocks(*quantize_blocks(dirty, fmt, expansion))
    assert actual[0, 3].isnan()
    assert actual[1, 4] == actual[1].max() == expected[1].abs().max()
    assert actual[2, 5] == actual[2].min() == -expected[2].abs().max()
    same = dirty.isfinite()
    assert_bitwise(actual[same], expected[same])


@formats
@pytest.mark.parametrize("sigma", [0.1, 1.0, 5.0])
def test_storing_again_keeps_every_code_with_the_defaults(fmt, sigma):
    """A moment is stored after every step: what does not change must not wander. The paper's constants let it."""
    x = _lognormal(200, sigma) * torch.sign(torch.randn(200, 128))
    for config, drifts in ((ExpansionConfig(), False), (PAPER, True)):
        first = stored = quantize_blocks(x, fmt, config)
        for _ in range(20):
            stored = quantize_blocks(dequantize_blocks(*stored), fmt, config)
        assert (not torch.equal(stored[0].view(torch.uint8), first[0].view(torch.uint8))) == drifts
