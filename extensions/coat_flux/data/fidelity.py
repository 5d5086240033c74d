"""How true photos are when a model redraws them from noise: colour, and print and texture, in the subject's mask.

    start     x = (1 - σ)·x0 + σ·noise, σ of LEVELS, noise from the number of the draw
    redraw    STEPS Euler steps from σ to 0 with the photo's own caption, then the VAE's decoder
    colour    mean and 95th percentile of CIEDE2000 between the pixels of photo and drawing
    texture   mean over scales of |log2(c_drawn / c_photo)|: 1 where the contrast is double or half

c is the root mean square of lightness L* in a band of blurs, plus FLOOR: it does not ask where exactly a stripe lies.
On the example's photos (median): shifted by 2 px 0.02, lighter by 6 % 0.06, of another hue 0.01, blurred by 1 px 0.22,
by 2 px 0.57, with the print of another garment 1.2, without its print 2.2 (RESULTS.md).

Two marks stand beside it: the same without the LoRA, and the photo through the VAE alone, which no training can pass.

Source: CIEDE2000 of scikit-image; Sharma et al., 2005.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.rng import Stream, mixed_seed

MOST_PHOTOS = 4
LEVELS = (0.4, 0.6)
STEPS = 3  # 24 forwards in all: one sample's
SCALES = (0.7, 1.4, 2.8, 5.6, 11.2)  # standard deviations of the blurs, in pixels
FLOOR = 0.25  # units of L*: contrast that nobody sees
EDGE = 40  # the shorter side over this lies between the outline, which is the cut, and the cloth whose texture counts

Velocity = Callable[[Mapping[str, Any], Tensor, Tensor], Tensor]  # of a photo, x [1, C, h, w], σ [1]
Decode = Callable[[Tensor], Tensor]  # latents [1, C, h, w] → pixels [1, 3, H, W] from -1 to 1


class Fidelity(NamedTuple):
    """Differences between a photo and its drawing; 0 is the photo itself."""

    colour: float  # mean CIEDE2000
    colour_p95: float
    texture: float  # octaves of contrast


def compare(photo: NDArray[np.uint8], drawn: NDArray[np.uint8], mask: NDArray[np.bool_]) -> Fidelity:
    """Compare pictures [H, W, 3] where `mask` [H, W] is true, or all of them where it nowhere is."""
    from scipy.ndimage import binary_erosion
    from skimage.color import deltaE_ciede2000, rgb2lab

    if not mask.any():
        mask = np.ones_like(mask)
    lab, of_drawn = rgb2lab(photo), rgb2lab(drawn)
    colours = deltaE_ciede2000(lab, of_drawn)[mask]
    inside = binary_erosion(mask, iterations=max(min(mask.shape) // EDGE, 1))
    inside = inside if inside.any() else mask
    before, after = (_contrasts(each[..., 0], inside) for each in (lab, of_drawn))
    return Fidelity(
        float(colours.mean()), float(np.percentile(colours, 95)), float(np.abs(np.log2(after / before)).mean())
    )


def _contrasts(lightness: NDArray[np.float64], inside: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The contrast of each band, of pixels inside alone."""
    from scipy.ndimage import gaussian_filter

    weight = inside.astype(float)
    blurred = []
    for scale in SCALES:
        share = np.maximum(gaussian_filter(weight, scale), 1e-3)
        blurred.append((gaussian_filter(lightness * weight, scale) / share)[inside])
    bands = [fine - coarse for fine, coarse in itertools.pairwise(blurred)]
    return np.array([math.sqrt(np.square(band).mean()) + FLOOR for band in bands])


class Subject(NamedTuple):
    """A held-out photo at its training size."""

    picture: NDArray[np.uint8]  # [H, W, 3]
    mask: NDArray[np.bool_]  # [H, W]
    inputs: Mapping[str, Any]  # of the model: "latents" [C, h, w] fp32 on the CPU, and its caption


def evenly(items: Sequence[Any]) -> list[Any]:
    """At most `MOST_PHOTOS` of the items, evenly spaced."""
    count = min(len(items), MOST_PHOTOS)
    return [items[i * len(items) // count] for i in range(count)]


class Redrawn:
    """The subjects of a run, and their fidelity at each save.

    `record` is of the state: "vae", and "saves", a list of [steps done, the draws' `Fidelity`]; step 0 has no LoRA.
    """

    def __init__(self, subjects: Sequence[Subject], record: Mapping[str, Any] | None):
        self.subjects = subjects
        self.record: dict[str, Any] = dict(record or {"vae": [], "saves": []})
        self.seconds = 0.0  # that the last measurement took

    def lacks(self, step: int) -> bool:
        """Whether this step is not measured yet."""
        return all(done != step for done, _ in self.record["saves"])

    @torch.no_grad()
    def measure(self, step: int, velocity: Velocity, decode: Decode) -> None:
        """Redraw all subjects after `step` steps; the same noise at every step."""
        began = time.monotonic()
        if not self.record["vae"]:
            for subject in self.subjects:
                drawn = to_picture(decode(subject.inputs["latents"][None]))
                self.record["vae"].append(compare(subject.picture, drawn, subject.mask))
        draws = []
        for number, (subject, level) in enumerate(itertools.product(self.subjects, LEVELS)):
            latents = subject.inputs["latents"][None]
            generator = torch.Generator().manual_seed(mixed_seed(0, Stream.REDRAWN, number))
            noise = torch.randn(latents.shape, generator=generator)
            x = (1 - level) * latents + level * noise
            for now, then in itertools.pairwise(torch.linspace(level, 0.0, STEPS + 1).tolist()):
                x = x + (then - now) * velocity(subject.inputs, x, torch.tensor([now])).float().cpu()
            draws.append(compare(subject.picture, to_picture(decode(x)), subject.mask))
        self.record["saves"] = [*self.record["saves"], [step, draws]]
        self.seconds = time.monotonic() - began

    def mean(self) -> Fidelity:
        """The mean of the last measurement."""
        return _mean(self.record["saves"][-1][1])

    def rows(self) -> list[tuple[float, ...]]:
        """The step and mean of each measurement, and that of the VAE alone: rows of the run's table."""
        vae = _mean(self.record["vae"])
        return [(step, *_mean(draws), *vae) for step, draws in self.record["saves"]]

    def describe(self) -> str:
        """The last measurement in a line."""
        step = self.record["saves"][-1][0]
        vae, first = _mean(self.record["vae"]), _mean(self.record["saves"][0][1])
        without = "" if step == 0 or self.lacks(0) else f"; without the LoRA {show(first)}"
        shown = "in their masks" if any(not subject.mask.all() for subject in self.subjects) else "whole"
        names = f"step {step}: {len(self.subjects)} held-out photos, redrawn, {shown}"
        return f"{names}: {show(self.mean())}{without}; the VAE alone {show(vae)}"

    def best(self) -> list[str]:
        """For each measure the best save, and those that its draws cannot tell apart from it."""
        saves = [(step, draws) for step, draws in self.record["saves"] if step > 0]
        lines = []
        for column, (name, unit) in enumerate((("colour", "ΔE "), ("95 % of colour", "ΔE "), ("texture", ""))):
            values = {step: [draw[column] for draw in draws] for step, draws in saves}
            if not values:
                continue
            step = min(values, key=lambda each: (statistics.fmean(values[each]), each))
            near = [str(other) for other in values if other != step and _is_near(values[other], values[step])]
            found = f"{name}: the save of step {step} is best, {unit}{statistics.fmean(values[step]):.2f}"
            lines.append(f"{found}; that of {', '.join(near)} cannot be told apart from it" if near else found)
        return lines


def upper_half(levels: Tensor) -> NDArray[np.bool_]:
    """Where levels [H, W] of a mask are in the upper half of their range; everywhere if all are the same."""
    return (levels >= (levels.amin() + levels.amax()) / 2).cpu().numpy()


def to_picture(pixels: Tensor) -> NDArray[np.uint8]:
    """Pixels [1, 3, H, W] from -1 to 1 as uint8 [H, W, 3]."""
    levels = ((pixels[0].float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return levels.permute(1, 2, 0).contiguous().numpy()


def _mean(draws: Sequence[Sequence[float]]) -> Fidelity:
    return Fidelity(*map(statistics.fmean, zip(*draws, strict=True)))


def show(mean: Fidelity) -> str:
    """The three numbers in a line."""
    return f"ΔE {mean.colour:.2f} (95 %: {mean.colour_p95:.1f}), texture {mean.texture:.2f}"


def _is_near(values: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the mean difference of draws with the same noise is within two of its standard errors."""
    differences = [value - least for value, least in zip(values, best, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) <= 2 * error
