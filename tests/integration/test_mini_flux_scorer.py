"""The shipped scorer of the mini-FLUX: near perfect on pictures of the generator, so that what it says counts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tolerances import SCORER_ACCURACY, SCORER_ALL_FOUR, SCORER_BY_CHANCE

ROOT = Path(__file__).resolve().parents[2]
PICTURES = 200
SEED = 977  # of no picture that it was trained on


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from mini_flux import pictures, scorer

        return pictures, scorer


def drawn(pictures, size, count):
    rng = random.Random(SEED)
    items = [pictures.random_item(rng, tuple(pictures.GARMENTS)) for _ in range(count)]
    pixels = np.stack([np.asarray(pictures.draw(item, size, rng)) for item in items])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), items


@pytest.fixture(scope="module")
def judged(world):
    pictures, scorer = world
    pixels, items = drawn(pictures, (64, 64), PICTURES)
    return scorer, scorer.judge(scorer.load_scorer(), pixels), items


def test_reads_fresh_pictures(judged):
    scorer, found, items = judged
    shares = scorer.accuracies(scorer.right(found, items))
    assert set(shares) == {"garment", "colour", "pattern", "background", "all four"}
    assert min(shares[name] for name in scorer.ATTRIBUTES) >= SCORER_ACCURACY, shares
    others = scorer.accuracies(scorer.right(found.roll(1, 0), items))
    assert max(others.values()) <= SCORER_BY_CHANCE, others
    assert others["all four"] <= others["garment"]


def test_reads_other_shapes(world):
    pictures, scorer = world
    pixels, items = drawn(pictures, (48, 80), 50)
    shares = scorer.accuracies(scorer.right(scorer.judge(scorer.load_scorer(), pixels), items))
    assert shares["all four"] >= SCORER_ALL_FOUR, shares
