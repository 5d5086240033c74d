"""scripts/garment_trials.py: its photos and masks, what a colour loss weighs, paired differences in its tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("garment_trials")


def test_a_seed_has_one_colour_in_the_masks_of_its_photos(script: Any, tmp_path: Path) -> None:
    script.write_photos(tmp_path, 2)
    photos = sorted((tmp_path / "photos").glob("*.png"))
    assert len(photos) == script.TRAINED + script.HELD
    middles = []
    for photo in photos:
        mask = np.array(Image.open(tmp_path / "masks" / photo.name)) > 127
        middles.append(np.median(np.array(Image.open(photo))[mask], axis=0))
    assert np.ptp(middles, axis=0).max() < 12
    assert np.abs(np.mean(middles, axis=0) - script.COLOURS[5]).max() < 25  # shaded by folds


@pytest.mark.parametrize("term", ["mean", "low"])
def test_the_colour_term_is_of_the_mean_error_inside_the_mask(
    script: Any, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    errors = torch.zeros(3, 16, 8, 8)
    mask = torch.zeros(3, 1, 8, 8)
    mask[:, :, 2:6, 2:6] = 2.5  # the mean over a batch of masks is 1
    errors[0, :, 2:6, 2:6] = 0.5  # another colour
    errors[1] = errors[0] * (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8))  # another texture
    errors[2] = 0.5 * (mask[2] == 0)  # another background
    monkeypatch.setattr(script.flow_matching, "predict_velocity", lambda *call, **named: errors)
    zeros, sigmas = torch.zeros_like(errors), torch.full((3,), 0.8)
    drawn = {"latents": zeros, "noise": zeros, "sigmas": sigmas, "mask": mask, "prompt_embeds": None, "pooled": None}
    plain, whole = (script.colour_losses(term, weight)(None, drawn, torch.float32) for weight in (0.0, 10.0))
    torch.testing.assert_close(plain, errors.square().mean((1, 2, 3)))
    colour, texture, ground = ((whole - plain) / 10).tolist()
    assert colour == pytest.approx((0.8 * 0.5) ** 2)
    assert ground == pytest.approx(0, abs=1e-7)
    assert texture < colour / 10


def test_differences_are_of_the_same_seed(script: Any) -> None:
    runs = []
    for seed in (1, 2, 3):
        for arm, value in (("plain", 10.0 * seed), ("rank 4", 10.0 * seed + 1)):
            rows = [[0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
            runs.append({"arm": arm, "seed": seed, "rows": rows, "ground_before": 1.0})
            runs[-1] |= dict.fromkeys(script.MEASURES, value)
    text = script.tables(runs)
    assert "| rank 4 | 3 | 21.000 (10.000)" in text
    assert "| rank 4 | 3 | +1.000 (0.000)" in text
