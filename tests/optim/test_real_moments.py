"""The acceptance line of the optimizer, on moments of a real (small, short) LoRA training of a real FLUX class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.config import PAPER_EXPANSION
from tests.helpers.moments import (
    bitsandbytes_method,
    build_flux,
    build_lora_flux,
    depth_of,
    measure,
    stored,
    train_and_capture,
)
from tests.tolerances import EXPANSION_GAIN, INTEGER_FORMATS_GAIN

STEPS = [1, 2, 10, 30]
PLAIN = stored(use_dynamic_range_expansion=False)
EXPANDED = stored()
INTEGERS = stored(m1_format="int8_ratio", m2_format="uint8_log")


def captured(model: torch.nn.Module) -> dict[int, dict[str, Tensor]]:
    """Moments of a training on smooth latents."""
    coarse = torch.randn(8, 16, 3, 3)
    data = {
        "latents": torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear"),
        "prompt_embeds": torch.randn(8, 6, 64),
        "pooled": torch.randn(8, 64),
    }
    return {step: moments for step, _, moments in train_and_capture(model, data, STEPS, lr=1e-3, batch=2)}


@pytest.fixture(scope="module")
def captures() -> dict[int, dict[str, Tensor]]:
    """Moments of a rank-16 LoRA on 1 + 1 blocks, B = 0 at the start."""
    torch.manual_seed(0)
    return captured(build_lora_flux(blocks=1, heads=2, head_dim=32, rank=16))


@pytest.fixture(scope="module")
def full_captures() -> dict[int, dict[str, Tensor]]:
    """Moments of all parameters of the same blocks."""
    torch.manual_seed(0)
    return captured(build_flux(blocks=1, heads=2, head_dim=32).train())


def test_first_step_has_zero_moments_for_every_lora_a(captures: dict[int, dict[str, Tensor]]) -> None:
    first = captures[1]
    zero = {key for key, tensor in first.items() if not tensor.any()}
    assert zero == {key for key in first if "lora_A" in key}
    assert len(zero) == len(first) / 2
    assert all(tensor.any() for tensor in captures[10].values())


@pytest.mark.parametrize("step", STEPS)
def test_expansion_lowers_the_error_of_the_update_and_keeps_exp_avg_sq(
    step: int, captures: dict[int, dict[str, Tensor]]
) -> None:
    plain, _ = measure(captures[step], PLAIN)
    expanded, lost = measure(captures[step], EXPANDED)
    assert lost == 0.0
    assert expanded * EXPANSION_GAIN < plain


def test_plain_e4m3_loses_part_of_exp_avg_sq(captures: dict[int, dict[str, Tensor]]) -> None:
    assert measure(captures[1], PLAIN)[1] > 0


@pytest.mark.parametrize("step", STEPS)
def test_not_above_bitsandbytes(step: int, captures: dict[int, dict[str, Tensor]]) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes to compare with")
    dynamic = bitsandbytes_method()
    assert measure(captures[step], EXPANDED)[0] <= measure(captures[step], dynamic)[0]


@pytest.mark.parametrize("step", STEPS)
def test_fixed_point_constants_are_better_than_the_kernels(step: int, captures: dict[int, dict[str, Tensor]]) -> None:
    paper = stored(expansion=PAPER_EXPANSION)
    assert measure(captures[step], EXPANDED)[0] < measure(captures[step], paper)[0]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("trained", ["captures", "full_captures"])
def test_integer_formats_are_better_than_expansion_at_every_depth(
    trained: str, step: int, request: pytest.FixtureRequest
) -> None:
    """At the bytes of the codes, and with half of the numbers per block."""
    moments = request.getfixturevalue(trained)[step]
    for depth in {depth_of(key) for key in moments}:
        here = {key: tensor for key, tensor in moments.items() if depth_of(key) == depth}
        ours, lost = measure(here, INTEGERS)
        assert lost == 0.0
        assert ours * INTEGER_FORMATS_GAIN[step > 2] <= measure(here, EXPANDED)[0]


@pytest.mark.parametrize("trained", ["captures", "full_captures"])
def test_integer_formats_are_better_than_bitsandbytes(trained: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes to compare with")
    dynamic = bitsandbytes_method()
    for moments in request.getfixturevalue(trained).values():
        assert measure(moments, INTEGERS)[0] < measure(moments, dynamic)[0]
