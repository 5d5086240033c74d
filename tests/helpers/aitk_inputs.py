"""What the small models of `aitk_models` share: sizes, drawn inputs, ai-toolkit's modules."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, IMAGE, TEXT, TEXT_WIDTH, SIDE = 256, 4, 256, 64, 64, 16
BUILT_IN = "extensions_built_in.diffusion_models"
Made = tuple[nn.Module, dict[str, Any]]


def draw(*shape: int) -> Tensor:
    """Values that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def host_module(path: str) -> Any:
    """A module of ai-toolkit's diffusion models."""
    return importlib.import_module(f"{BUILT_IN}.{path}")


def grid(side: int = SIDE, axes: int = 3) -> Tensor:
    """Positions [side², axes] of image tokens: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.zeros(side * side, axes)
    places[:, 1], places[:, 2] = rows.flatten(), columns.flatten()
    return places


def noise_level(value: float = 0.5) -> Tensor:
    """One value, for a batch of one."""
    return torch.tensor([value])
