"""The text and the image stream as one tensor, and apart again, without a copy where they are neighbours in memory.

Single blocks run over both streams together, and diffusers hands them over apart. What one single block returns are two
views of one tensor, so the next one takes that tensor, and the gradients of the two views are views of one gradient.
Slices and `torch.cat` would copy both ways and fill two tensors with zeros in backward.

Shapes: text [B, T, D], image [B, S, D], joined [B, T + S, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["join", "split"]


def join(text: Tensor, image: Tensor) -> Tensor:
    """Return both streams as one tensor, text first; a view of them where `split` made them."""
    if torch.compiler.is_compiling():
        return torch.cat([text, image], dim=1)
    joined: Tensor = _Join.apply(text, image)
    return joined


def split(joined: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return text (the first `tokens`) and image, views of `joined`."""
    if torch.compiler.is_compiling():
        return joined[:, :tokens], joined[:, tokens:]
    text, image = _Split.apply(joined, tokens)
    return text, image


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: Tensor, image: Tensor) -> Tensor:
        ctx.tokens = text.shape[1]
        return _together(text, image)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[:, : ctx.tokens], grad[:, ctx.tokens :]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        return joined[:, :tokens], joined[:, tokens:]

    @staticmethod
    def backward(ctx: Any, text: Tensor, image: Tensor) -> tuple[Tensor, None]:
        return _together(text, image), None


def _together(text: Tensor, image: Tensor) -> Tensor:
    """Both along the tokens: the tensor that both are views of, where the one follows the other there, else a copy."""
    batch, tokens, width = text.shape
    rows = tokens + image.shape[1]
    follows = (
        text.untyped_storage()._cdata == image.untyped_storage()._cdata
        and text.dtype == image.dtype
        and text.stride() == image.stride() == (rows * width, width, 1)
        and image.storage_offset() == text.storage_offset() + tokens * width
    )
    if follows:
        return text.as_strided((batch, rows, width), text.stride())
    return torch.cat([text, image], dim=1)
