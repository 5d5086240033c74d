"""Single blocks hand over their streams as views of one tensor; what is no such pair of views is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_flux.blocks.fused.forms import join, split

BATCH, TEXT, IMAGE, WIDTH = 2, 3, 5, 4


def streams() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TEXT, WIDTH), torch.randn(BATCH, IMAGE, WIDTH)


class Block(torch.autograd.Function):
    """tanh(x·weight) of both streams together, which joins and splits inside, as fused blocks do."""

    @staticmethod
    def forward(ctx: Any, text: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = join(text, image)
        y = torch.tanh(x * weight)
        ctx.save_for_backward(x, weight, y)
        return split(y, text.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight, y = ctx.saved_tensors
        g = join(*grads) * (1 - y.square())
        return *split(g * weight, grads[0].shape[1]), (g * x).sum((0, 1))


def by_slices(text: Tensor, image: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    for weight in weights:
        y = torch.tanh(torch.cat([text, image], dim=1) * weight)
        text, image = y[:, :TEXT], y[:, TEXT:]
    return text, image


def by_views(text: Tensor, image: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    for weight in weights:
        text, image = Block.apply(text, image, weight)
    return text, image


def test_values_and_gradients_are_those_of_slices() -> None:
    found = []
    for run in (by_slices, by_views):
        torch.manual_seed(1)
        leaves = [x.requires_grad_() for x in streams()]
        weights = [torch.randn(WIDTH).requires_grad_() for _ in range(3)]
        text, image = run(*leaves, weights)
        (text.square().sum() + image.sin().sum()).backward()
        found.append([text, image, *(x.grad for x in (*leaves, *weights))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_neighbours_are_not_copied_forward_or_backward() -> None:
    y = torch.randn(BATCH, TEXT + IMAGE, WIDTH)
    joined = join(*split(y, TEXT))
    assert joined.data_ptr() == y.data_ptr()
    assert torch.equal(joined, y)
    leaves = [x.requires_grad_() for x in streams()]
    text, image = Block.apply(*leaves, torch.ones(WIDTH))
    seen: list[Tensor] = []
    text.register_hook(seen.append)
    image.register_hook(seen.append)
    sum(x.sum() for x in Block.apply(text, image, torch.ones(WIDTH))).backward()
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1
    assert len({x.untyped_storage().data_ptr() for x in (text, image)}) == 1


def test_a_stream_changed_in_place_before_backward_is_an_error() -> None:
    leaves = [x.requires_grad_() for x in streams()]
    text, image = (x.detach() for x in Block.apply(*leaves, torch.ones(WIDTH)))
    outputs = Block.apply(text, image, torch.ones(WIDTH, requires_grad=True))
    image.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


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


def test_an_unused_stream_has_a_gradient_of_zeros() -> None:
    leaves = [x.requires_grad_() for x in streams()]
    Block.apply(*leaves, torch.ones(WIDTH))[1].sum().backward()
    assert torch.equal(leaves[0].grad, torch.zeros(BATCH, TEXT, WIDTH))
    torch.testing.assert_close(leaves[1].grad, 1 - torch.tanh(leaves[1].detach()).square())
