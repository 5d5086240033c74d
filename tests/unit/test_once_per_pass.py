"""What is made of a tensor that all blocks of a pass are given is made once, and goes with it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from coat_flux.blocks.fused.reading import OncePerPass


def test_it_is_made_once_for_the_same_arguments() -> None:
    made: list[int] = []

    @OncePerPass
    def doubled(x: Tensor, other: Tensor, count: int) -> Tensor:
        made.append(count)
        return 2 * x + other

    x, other = torch.ones(3), torch.zeros(3)
    first = doubled(x, other, 1)
    assert doubled(x, other, 1) is first
    assert doubled(x, torch.ones(3), 1)[0] == 3
    assert doubled(x, other, 2)[0] == 2
    x.add_(1)
    assert doubled(x, other, 2)[0] == 4
    doubled(torch.ones(3), other, 2)
    assert made == [1, 1, 2, 2, 2]


def test_it_goes_with_its_tensor() -> None:
    doubled = OncePerPass(lambda x: 2 * x)
    x = torch.ones(3)
    found = weakref.ref(doubled(x))
    assert found() is not None
    del x
    gc.collect()
    assert found() is None
