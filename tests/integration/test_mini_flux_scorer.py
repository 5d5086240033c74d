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


def test_is_wrong_about_pictures_of_other_items(judged):
    scorer, found, items = judged
    shares = scorer.accuracies(scorer.right(found.roll(1, 0), items))
    assert max(shares.values()) <= SCORER_BY_CHANCE, shares
    assert shares["all four"] <= shares["garment"]


def test_reads_other_shapes(world):
    pictures, scorer = world
    pixels, items = drawn(pictures, (48, 80), 50)
    shares = scorer.accuracies(scorer.right(scorer.judge(scorer.load_scorer(), pixels), items))
    assert shares["all four"] >= SCORER_ALL_FOUR, shares


def test_right_compares_each_attribute(world):
    pictures, scorer = world
    item = pictures.Item("coat", "red", "dotted", "grey")
    places = [table.index(name) for table, name in zip(scorer.ATTRIBUTES.values(), item, strict=True)]
    found = torch.tensor([places, [places[0], places[1] + 1, places[2], places[3]]])
    correct = scorer.right(found, [item, item])
    assert correct.tolist() == [[True] * 4, [True, False, True, True]]
    assert scorer.accuracies(correct)["all four"] == 0.5


def test_weights_are_small(world):
    _, scorer = world
    assert scorer.WEIGHTS.stat().st_size <= 500_000
