"""A moment format is an entry in the table and its encode and decode: the optimizer and its files follow."""

from __future__ import annotations

import pytest
import torch

from coat_core.config import FP8QuantizationConfig
from coat_core.expansion import QuantizedBlocks
from coat_core.formats import M1_FORMATS, IntegerFormat
from coat_core.moments import CODECS, Codec
from coat_core.optim import FP8AdamW
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import UNQUANTIZED, make_params, run
from tests.tolerances import INT16_MOMENT_ATOL

INT16 = IntegerFormat("int16_even", torch.int16, ("scale",))


def encode(blocks: torch.Tensor) -> QuantizedBlocks:
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / 32767).clamp(min=1e-30)
    return QuantizedBlocks((blocks / scale).round().to(torch.int16), scale)


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> FP8QuantizationConfig:
    monkeypatch.setitem(M1_FORMATS, INT16.name, INT16)
    monkeypatch.setitem(CODECS, INT16.dtype, Codec(encode, decode))
    return FP8QuantizationConfig(m1_format=INT16.name, use_fp8_m2=False)


def test_a_new_format_trains_is_saved_and_resumed(config: FP8QuantizationConfig) -> None:
    params, exact = make_params(), make_params()
    optimizer = FP8AdamW(params, lr=1e-2, fp8_config=config)
    run(optimizer, params, range(3))
    run(FP8AdamW(exact, lr=1e-2, fp8_config=UNQUANTIZED), exact, range(3))
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype == torch.int16
    assert "exp_avg_scale" in state
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param, other, rtol=0.0, atol=INT16_MOMENT_ATOL)

    resumed = [torch.nn.Parameter(param.detach().clone()) for param in params]
    again = FP8AdamW(resumed, lr=1e-2, fp8_config=config)
    again.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(3, 5))
    run(again, resumed, range(3, 5))
    for param, other in zip(params, resumed, strict=True):
        assert_bitwise(other.detach(), param.detach())
