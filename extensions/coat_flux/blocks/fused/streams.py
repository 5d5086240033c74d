"""The text and the image stream as one tensor, and apart again, without a copy where they are neighbours in memory.

Single blocks run over both streams together, and diffusers hands them over apart. What one single block returns are two
views of one tensor, so the next one takes that tensor, and the gradients of the two views are views of one gradient.
Slices and `torch.cat` would copy both ways and fill two tensors with zeros in backward.

Shapes: text [B, T, D], image [B, S, D], joined [B, T + S, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join", "split"]


def join(text: Tensor, image: Tensor) -> Tensor:
    """Return both streams as one tensor, text first: the one that both are views of, where `split` made them."""
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


def split(joined: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return text (the first `tokens`) and image, views of `joined`."""
    return joined[:, :tokens], joined[:, tokens:]
