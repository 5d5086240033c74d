"""The acceptance line of the optimizer, on moments of a real (small, short) LoRA training of a real FLUX class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.config import ExpansionConfig
from scripts.capture_moments import build_lora_flux, train_and_capture
from scripts.moment_error import FIXED_POINT, PAPER, Method, bitsandbytes_method, coat, measure
from tests.tolerances import EXPANSION_GAIN

STEPS = [1, 2, 10, 30]
PLAIN: Method = (coat("e4m3", None), coat("e4m3", None))
DEFAULT = ExpansionConfig()
EXPANDED: Method = (coat("e4m3", DEFAULT), coat("e4m3", DEFAULT))


@pytest.fixture(scope="module")
def captures() -> dict[int, dict[str, Tensor]]:
    """Moments of a rank-16 LoRA on 1 + 1 blocks, B = 0 at the start, on smooth latents."""
    torch.manual_seed(0)
    model = build_lora_flux(blocks=1, heads=2, head_dim=32, rank=16)
    coarse = torch.randn(8, 16, 3, 3)
    data = {
        "latents": torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear"),
        "prompt_embeds": torch.randn(8, 6, 64),
        "pooled": torch.randn(8, 64),
    }
    return {step: moments for step, _, moments in train_and_capture(model, data, STEPS, lr=1e-3, batch=2)}


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
    _, dynamic = bitsandbytes_method()
    assert measure(captures[step], EXPANDED)[0] <= measure(captures[step], dynamic)[0]


@pytest.mark.parametrize("step", STEPS)
def test_fixed_point_constants_are_better_than_the_kernels(step: int, captures: dict[int, dict[str, Tensor]]) -> None:
    kernel, fixed = ((coat("e4m3", constants),) * 2 for constants in (PAPER, FIXED_POINT))
    assert measure(captures[step], fixed)[0] < measure(captures[step], kernel)[0]
