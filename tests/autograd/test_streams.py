"""Single blocks hand over their streams as views of one tensor; what is no such pair of views is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from coat_flux.blocks.fused.forms import join

BATCH, TEXT, IMAGE, WIDTH = 2, 3, 5, 4


def streams() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TEXT, WIDTH), torch.randn(BATCH, IMAGE, WIDTH)


def test_neighbours_are_not_copied() -> None:
    y = torch.randn(BATCH, TEXT + IMAGE, WIDTH)
    joined = join(y[:, :TEXT], y[:, TEXT:])
    assert joined.data_ptr() == y.data_ptr()
    assert torch.equal(joined, y)


def test_others_are_copied() -> None:
    text, image = streams()
    whole = torch.randn(BATCH, IMAGE + TEXT, WIDTH)
    wide = torch.randn(BATCH, TEXT + IMAGE, 2 * WIDTH)[..., :WIDTH]
    longer = torch.randn(BATCH, TEXT + IMAGE + 1, WIDTH)
    pairs = [
        (text, image),  # of two tensors
        (whole[:, IMAGE:], whole[:, :IMAGE]),  # in the other order
        (wide[:, :TEXT], wide[:, TEXT:]),  # rows with something between them
        (longer[:, :TEXT], longer[:, TEXT:-1]),  # with a row after each image
        (longer[:, :TEXT], longer[:, TEXT + 1 :]),  # not next to each other
    ]
    for first, second in pairs:
        assert torch.equal(join(first, second), torch.cat([first, second], dim=1))
