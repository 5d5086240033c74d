"""What must hold of dynamic range expansion for every fp32 block."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from coat_core.config import ExpansionConfig
from coat_core.expansion import dequantize_blocks, expand, expansion_parameters, quantize_blocks
from coat_core.formats import FORMATS

# any finite fp32 bit pattern but the sign: zero, subnormals, 1e-38 to 3.4e38
magnitudes = st.integers(0, 0x7F7FFFFF)
formats = st.sampled_from(list(FORMATS.values()))
configs = st.builds(
    ExpansionConfig,
    range_fraction=st.sampled_from([4.0 / 7.0, 0.5, 1.0, 0.01]),
    exponent_step=st.sampled_from([1.0 / 16.0, 0.0, 0.25]),
    exponent_max=st.sampled_from([256.0, 1.0, 4096.0]),
)


@st.composite
def blocks(draw: st.DrawFn) -> torch.Tensor:
    """fp32 [n, B]: every element anywhere in fp32, or a few magnitudes repeated, zeros and signs mixed in."""
    shape = draw(st.integers(1, 2)), draw(st.sampled_from([1, 16, 32, 128]))
    pool = torch.tensor(draw(st.lists(magnitudes, min_size=1, max_size=24)), dtype=torch.int32).view(torch.float32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = pool[torch.randint(0, len(pool), shape, generator=generator)]
    sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    keep = torch.rand(x.shape, generator=generator) >= draw(st.sampled_from([0.0, 0.3]))
    return x * sign * keep


@given(blocks(), formats, configs)
def test_nothing_nonzero_comes_back_zero(x, fmt, config):
    codes, scale, *numbers = quantize_blocks(x, fmt, config)
    back = dequantize_blocks(codes, scale, *numbers)
    assert back.isfinite().all()
    assert torch.equal(torch.sign(back), torch.sign(x))
    assert ((codes.to(torch.float32) != 0) == (x != 0)).all()
    center, exponent = expansion_parameters(x, fmt, config)
    assert center.shape == exponent.shape == (x.shape[0], 1)
    assert (center.isfinite() & (center > 0)).all()
    assert ((exponent >= 1.0 / 16.0) & (exponent <= max(config.exponent_max, 1.0))).all()
    assert (scale.isfinite() & (scale > 0)).all()
    plain = dequantize_blocks(*quantize_blocks(x, fmt, None))
    assert plain.isfinite().all()
    assert (plain[x == 0] == 0).all()


@given(blocks(), formats)
def test_expansion_keeps_order(x, fmt):
    center, exponent = expansion_parameters(x, fmt, ExpansionConfig())
    ordered = x.sort(dim=-1).values
    expanded = expand(ordered, center, exponent)
    assert (expanded[:, 1:] >= expanded[:, :-1]).all()
    back = dequantize_blocks(*quantize_blocks(ordered, fmt, ExpansionConfig()))
    assert (back[:, 1:] >= back[:, :-1]).all()


@given(blocks(), formats, st.booleans(), st.sampled_from([0.0, 1e-30, 1e30, float("nan"), float("inf")]))
def test_a_block_does_not_see_its_neighbours(x, fmt, expansion, value):
    config = ExpansionConfig() if expansion else None
    pairs = (torch.cat([x[:1], x[:1]]), torch.cat([x[:1], torch.full_like(x[:1], value)]))
    beside_itself, beside_other = (dequantize_blocks(*quantize_blocks(pair, fmt, config)) for pair in pairs)
    assert torch.equal(beside_itself[0], beside_other[0])
