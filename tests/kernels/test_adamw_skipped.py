"""A row of NaN in the kernel's table: its tensor and moments are left as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from coat_core.ops.adamw import hyper_table
from tests.kernels.test_adamw import BETAS, DECAY, INTEGERS, LR, Problem, bits_of, copy_state, kernel, reference

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), INTEGERS, (None, None)])
@pytest.mark.parametrize("run", [kernel, reference])
def test_a_row_of_nan_skips_its_tensor(formats: tuple[str | None, str | None], run: Any, device: torch.device) -> None:
    shapes = [(40,), (300,), (128, 3)]
    before, after = (Problem(device, formats, shapes=shapes) for _ in range(2))
    before.step(1, before.grads(2), run)
    copy_state(before, after)
    table = hyper_table(LR, torch.tensor([2.0] * 3), BETAS, DECAY).to(device)
    table[1] = math.nan
    grads = after.grads(3)
    grads[1].fill_(math.inf)
    after.step(2, grads, run, table=table)
    rows = slice(before.first_blocks[1], before.first_blocks[2])
    for mine, other in zip(after.moments, before.moments, strict=True):
        assert torch.equal(bits_of(mine.codes[rows]), bits_of(other.codes[rows]))
        assert torch.equal(mine.numbers[:, rows], other.numbers[:, rows])
        assert not torch.equal(bits_of(mine.codes), bits_of(other.codes))
    same = [torch.equal(mine, other) for mine, other in zip(after.params, before.params, strict=True)]
    assert same == [False, True, False]
    assert all(param.isfinite().all() for param in after.params)
