"""Single blocks hand over their streams as views of one tensor; what is no such pair of views is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from coat_flux.blocks.fused.streams import join, split

BATCH, TEXT, IMAGE, WIDTH = 2, 3, 5, 4


def streams() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TEXT, WIDTH), torch.randn(BATCH, IMAGE, WIDTH)


def block(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x * weight)


def by_slices(text: Tensor, image: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    for weight in weights:
        y = block(torch.cat([text, image], dim=1), weight)
        text, image = y[:, :TEXT], y[:, TEXT:]
    return text, image


def by_views(text: Tensor, image: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    for weight in weights:
        text, image = split(block(join(text, image), weight), TEXT)
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
        assert torch.equal(expected, got)


def test_neighbours_are_not_copied_forward_or_backward() -> None:
    y = torch.randn(BATCH, TEXT + IMAGE, WIDTH).requires_grad_()
    text, image = split(y, TEXT)
    joined = join(text, image)
    assert joined.data_ptr() == y.data_ptr()
    assert torch.equal(joined, y)
    seen: list[Tensor] = []
    text.register_hook(seen.append)
    image.register_hook(seen.append)
    grad = torch.randn_like(y)
    joined.backward(grad)
    assert [x.untyped_storage().data_ptr() for x in seen] == [grad.untyped_storage().data_ptr()] * 2
    assert torch.equal(y.grad, grad)


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
    y = torch.randn(BATCH, TEXT + IMAGE, WIDTH).requires_grad_()
    split(y, TEXT)[1].sum().backward()
    assert torch.equal(y.grad[:, :TEXT], torch.zeros(BATCH, TEXT, WIDTH))
    assert torch.equal(y.grad[:, TEXT:], torch.ones(BATCH, IMAGE, WIDTH))
