"""The quickstart's options, job and grid of pictures; the training itself takes minutes and is run by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCALE = 4


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        importlib.import_module("mini_flux.samples")
        yield importlib.import_module("quickstart")


def test_one_seed_is_that_of_training_and_pictures(quickstart: ModuleType) -> None:
    as_configured = quickstart.read_job(Path("model"), None, None)["config"]["process"][0]
    asked = quickstart.read_job(Path("model"), 7, 5)["config"]["process"][0]
    assert (asked["training_seed"], asked["sample"]["seed"], asked["train"]["steps"]) == (5, 5, 7)
    assert (as_configured["training_seed"], as_configured["sample"]["seed"]) == (42, 42)


def test_the_grid_has_a_row_of_pictures_for_each_name(quickstart: ModuleType) -> None:
    draws = torch.Generator().manual_seed(0)
    rows = {
        name: torch.randint(0, 200, (3, 3, 16, 16), generator=draws, dtype=torch.uint8)
        for name in ("without LoRA", "with LoRA")
    }
    prompts = ["a plain red dngrs on a white background", "short", "a dotted one"]
    page = np.asarray(sys.modules["mini_flux.samples"].grid(rows, prompts, "3 of 3", enlarged=SCALE)).astype(int)
    side, gap = 16 * SCALE, 8
    left, top = page.shape[1] - 3 * (side + gap), page.shape[0] - 2 * (side + gap)
    for row, pictures in enumerate(rows.values()):
        y = top + row * (side + gap)
        for column, picture in enumerate(pictures):
            x = left + column * (side + gap)
            shown = page[y : y + side : SCALE, x : x + side : SCALE]
            assert (shown == picture.permute(1, 2, 0).numpy()).all()
