"""A small classifier that says what a picture shows: garment, colour, pattern and background, so quality is a number.

Shipped in `scorer.safetensors`, trained on the generator's pictures and labels (scripts/train_scorer.py, removed, is in
commit 52801d4). Pictures of any shape are brought to 64 · 64 pixels of area first, at which the patterns are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .pictures import BACKGROUNDS, COLOURS, GARMENTS, PATTERNS, Item

ATTRIBUTES = {
    "garment": tuple(GARMENTS),
    "colour": tuple(COLOURS),
    "pattern": tuple(PATTERNS),
    "background": tuple(BACKGROUNDS),
}
WEIGHTS = Path(__file__).with_name("scorer.safetensors")
_AREA = 64 * 64
_CHANNELS = (20, 40, 72, 96)
_AT_ONCE = 64


class Scorer(nn.Module):
    """Four strided convolutions, mean and maximum over the picture, one linear head per attribute."""

    def __init__(self) -> None:
        super().__init__()
        stages = []
        for a, b in pairwise((3, *_CHANNELS)):
            convolution = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
            stages.append(nn.Sequential(convolution, nn.BatchNorm2d(b), nn.ReLU()))
        self.body = nn.Sequential(*stages)
        self.heads = nn.ModuleDict({name: nn.Linear(2 * _CHANNELS[-1], len(v)) for name, v in ATTRIBUTES.items()})

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Pictures fp32 [N, 3, H, W] in -1 to 1 -> logits of garment, colour, pattern, background, each [N, values]."""
        height, width = pictures.shape[-2:]
        scale = (_AREA / (height * width)) ** 0.5
        size = (round(height * scale), round(width * scale))
        if size != (height, width):
            pictures = F.interpolate(pictures, size, mode="bilinear", antialias=True, align_corners=False)
        x = self.body(pictures)
        x = torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)
        return [head(x) for head in self.heads.values()]


def to_unit(pixels: Tensor) -> Tensor:
    """uint8 [..., H, W] in 0 to 255 -> fp32 in -1 to 1."""
    return pixels.float() / 127.5 - 1


def load_scorer() -> Scorer:
    """Reads the shipped scorer, in fp32 and eval mode."""
    scorer = Scorer()
    state = {name: tensor.float() for name, tensor in load_file(WEIGHTS).items()}
    counters = {name: tensor for name, tensor in scorer.state_dict().items() if not tensor.is_floating_point()}
    scorer.load_state_dict(state | counters)
    return scorer.eval().requires_grad_(False)


@torch.no_grad()
def judge(scorer: Scorer, pixels: Tensor) -> Tensor:
    """What pictures show: uint8 [N, 3, H, W] -> int64 [N, 4], places in the tables of `ATTRIBUTES`."""
    found = [torch.stack([x.argmax(1) for x in scorer(to_unit(part))], 1) for part in pixels.split(_AT_ONCE)]
    return torch.cat(found)


def right(found: Tensor, items: Sequence[Item]) -> Tensor:
    """Which attributes are as they should be: bool [N, 4]."""
    tables = list(ATTRIBUTES.values())
    wanted = [[table.index(name) for table, name in zip(tables, item, strict=True)] for item in items]
    return found == torch.tensor(wanted)


def accuracies(correct: Tensor) -> dict[str, float]:
    """Shares of bool [N, 4] that are right, by attribute, and of all four together."""
    shares = correct.double().mean(0).tolist()
    return dict(zip(ATTRIBUTES, shares, strict=True)) | {"all four": correct.all(1).double().mean().item()}
