"""Photos held out of training, and the loss on them with fixed noise.

Photo i of n meets L noise levels, one in each L-th of the range, shifted from photo to photo so that all n · L levels
are different and evenly spread:

    sigma_ij = (j + (i + 1/2) / n) / L,   noise from the number of the draw, i · L + j

so the loss is the mean of n · L forwards that are the same at every step and in every run of a trainer. While it
falls, the LoRA learns the subject; if it rises while the training loss falls, the LoRA memorizes the photos.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.rng import Stream, mixed_seed
from ..config.findings import closest
from ..config.job import DEFAULT_SEED
from .files import DatasetError, find_images, printable

LEVELS, FEWEST_FORWARDS = 4, 16
MOST_AT_ONCE = 32


def choose_hold_out(
    folders: Sequence[Path | str], hold_out: int | Sequence[str] | None, seed: int | None
) -> tuple[tuple[Path, ...], ...]:
    """Choose the photos of each folder that are not trained on, sorted; none if `hold_out` is None.

    A number is spread evenly over the sorted photos of all folders, from a place set by the seed. A list has file names
    or paths within the folder. Raises DatasetError if a name is unknown, or nothing is left to train on.
    """
    listed = [find_images(Path(folder)) for folder in folders]
    if hold_out is None:
        return tuple(() for _ in folders)
    if isinstance(hold_out, int):
        places = list(dict.fromkeys(path.resolve() for paths in listed if len(paths) > 1 for path in paths))
        if hold_out >= len(places):
            most = max(len(places) - 1, 0)
            remedy = f"write at most {most}" if most else "add photos"
            raise DatasetError(
                f"validation.hold_out={hold_out}: at most {most} of {sum(map(len, listed))} photos can be held out of "
                f"training; {remedy}, or remove the block"
            )
        start = random.Random(f"{DEFAULT_SEED if seed is None else seed}/hold out").random()
        chosen = {places[int((i + start) * len(places) / hold_out)] for i in range(hold_out)}
    else:
        chosen = set()
        for name in hold_out:
            wanted, photos = name.replace("\\", "/"), set()
            for folder, paths in zip(folders, listed, strict=True):
                for path in paths:
                    if wanted in (path.name, path.relative_to(folder).as_posix()):
                        photos.add(path.resolve())
            if not photos:
                near = closest(name, [path.name for paths in listed for path in paths])
                remedy = f"did you mean {near!r}?" if near else "write the name of a photo with its extension"
                raise DatasetError(f"validation.hold_out: {printable(name)!r} is not a photo of any dataset; {remedy}")
            chosen |= photos
    held_out = tuple(tuple(path for path in paths if path.resolve() in chosen) for paths in listed)
    for number, (held, paths) in enumerate(zip(held_out, listed, strict=True)):
        if paths and len(held) == len(paths):
            raise DatasetError(
                f"validation.hold_out: leaves no photo of datasets[{number}] to train on "
                f"({printable(folders[number])}); hold out fewer, or remove that dataset"
            )
    return held_out


class FixedNoise:
    """Encoded photos with "latents" (C, h, w) fp32 on the CPU and other inputs, and the loss on them.

    Each has 4 noise levels if `levels` is None, or more if the photos are so few that the loss would be coarse.
    """

    def __init__(self, photos: Sequence[Mapping[str, Any]], levels: int | None = None):
        self.photos = photos
        self.levels = max(LEVELS, ceil(FEWEST_FORWARDS / len(photos))) if levels is None else levels

    def batches(self, at_once: int) -> Iterator[list[int]]:
        """All draws grouped by picture size, at most `at_once`."""
        by_shape: dict[torch.Size, list[int]] = {}
        for draw in range(len(self.photos) * self.levels):
            by_shape.setdefault(self.photos[draw // self.levels]["latents"].shape, []).append(draw)
        most = min(at_once, MOST_AT_ONCE)
        for draws in by_shape.values():
            for start in range(0, len(draws), most):
                yield draws[start : start + most]

    @torch.no_grad()
    def mean_loss(self, losses: Callable[[list[Mapping[str, Any]], Tensor, Tensor], Tensor], at_once: int) -> float:
        """The mean over all draws; `losses` (B,) of B photos, sigmas (B,) and noise (B, C, h, w) fp32 on the CPU."""
        all_losses = []
        for draws in self.batches(at_once):
            photos, sigmas, noise = [], [], []
            for draw in draws:
                photo, level = divmod(draw, self.levels)
                photos.append(self.photos[photo])
                sigmas.append((level + (photo + 0.5) / len(self.photos)) / self.levels)
                generator = torch.Generator().manual_seed(mixed_seed(0, Stream.HELD_OUT, draw))
                noise.append(torch.randn(self.photos[photo]["latents"].shape, generator=generator))
            all_losses.append(losses(photos, torch.tensor(sigmas), torch.stack(noise)))
        return torch.cat(all_losses).double().mean().item()
