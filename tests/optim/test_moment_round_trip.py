"""What a moment goes through at every step: nothing nonzero becomes zero, and repeating it changes nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import Parameter

from coat_core.config import PAPER_EXPANSION, ExpansionConfig, FP8QuantizationConfig
from coat_core.expansion import dequantize_blocks, quantize_blocks
from coat_core.formats import get_format
from coat_core.optim import FP8AdamW
from coat_core.optim.state import storages
from tests.optim.common import read_back
from tests.tolerances import REPEATED_ROUND_TRIP_REL

magnitudes = st.floats(min_value=0.0, max_value=2.0**127, width=32, allow_subnormal=True)
FIXED_POINT = ExpansionConfig()
constants = st.sampled_from([FIXED_POINT, PAPER_EXPANSION, ExpansionConfig(1.0, 0.0, 1.0)])


@settings(max_examples=200)
@given(
    values=st.lists(magnitudes, min_size=1, max_size=40),
    fmt=st.sampled_from(["e4m3", "e5m2", "uint8_log"]),
    block_size=st.sampled_from([16, 32]),
    expansion=constants,
)
def test_nonzero_exp_avg_sq_never_becomes_zero(
    values: list[float], fmt: str, block_size: int, expansion: ExpansionConfig
) -> None:
    config = FP8QuantizationConfig(m2_format=fmt, block_size=block_size, expansion=expansion)
    exact = torch.tensor(values, dtype=torch.float32)
    param = Parameter(torch.zeros_like(exact))
    optimizer = FP8AdamW([param], fp8_config=config)
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(exact), "exp_avg_sq": exact}
    groups = torch.optim.AdamW([param]).state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": groups})  # fp32 -> FP8
    back = read_back("exp_avg_sq", optimizer.state[param], storages(config))
    assert torch.equal(back != 0, exact != 0)
    assert (back >= 0).all()
    assert back.isfinite().all()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.isfinite().all()


def drift(fmt: str, expansion: ExpansionConfig, repeats: int = 100) -> float:
    """Largest relative change of any element between the first and a much later round trip."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(200, 128, generator=generator) * torch.exp(2 * torch.randn(200, 128, generator=generator))
    once = values = dequantize_blocks(quantize_blocks(blocks, get_format(fmt), expansion))
    for _ in range(repeats):
        values = dequantize_blocks(quantize_blocks(values, get_format(fmt), expansion))
    return (values / once - 1).abs().max().item()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_with_both_ends_on_codes_repeated_round_trips_change_nothing(fmt: str) -> None:
    assert drift(fmt, FIXED_POINT) < REPEATED_ROUND_TRIP_REL


def test_with_the_small_end_between_codes_repeated_round_trips_drift() -> None:
    """Why the constants matter: the smallest value is rounded down, the range found next is wider, and so on."""
    assert drift("e4m3", ExpansionConfig(range_fraction=1.0, exponent_step=0.0)) > 0.9
