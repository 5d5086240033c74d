"""exp_avg_sq rounded at random: the kernel draws what the reference draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_adamw import INTEGERS, _nan_and_inf, _zeros_and_extremes, assert_special, run_both


@pytest.mark.triton
@pytest.mark.parametrize(
    "stored", [{}, {"formats": ("e4m3", "e5m2"), "expanded": False}, {"formats": INTEGERS, "block_size": 48}], ids=str
)
def test_kernel_rounds_exp_avg_sq_at_random_as_the_reference(stored: dict[str, Any], device: torch.device) -> None:
    run_both(device, steps=2, drawn=True, **stored)


@pytest.mark.triton
@pytest.mark.parametrize("stored", [{}, {"formats": INTEGERS}], ids=["expanded", "integers"])
@pytest.mark.parametrize("spoil", [_nan_and_inf, _zeros_and_extremes])
def test_kernel_rounds_special_moments_at_random(spoil: Any, stored: dict[str, Any], device: torch.device) -> None:
    assert_special(device, spoil, steps=1, drawn=True, **stored)
