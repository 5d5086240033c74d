"""How alike two LoRAs are: cosines of their weight changes and of what they do to the model's output.

A cosine says nothing by itself: LoRAs of two bf16 runs that differ in their seed alone are far from parallel. So every
cosine of a (bf16, COAT) pair stands beside that of two bf16 seeds.

The change of a layer is B · A, N × K numbers, 9 million in a square linear of FLUX. Inner products need only r × r:

    <B1 A1, B2 A2> = trace(A1ᵀ B1ᵀ B2 A2) = sum over all elements of (B1ᵀ B2) * (A1 A2ᵀ)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Gram", "mean_pair_cosine", "mean_seed_cosine", "weight_grams"]

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class Gram:
    """Inner products of the same thing of several runs.

    Args:
        names: of the R runs.
        products: (R, R) fp64.
    """

    def __init__(self, names: Sequence[str], products: Tensor):
        self.names, self.products = list(names), products

    def cosine(self, a: str, b: str) -> float | None:
        """Of runs a and b; None where one of them is zero."""
        i, j = self.names.index(a), self.names.index(b)
        norms = (self.products[i, i] * self.products[j, j]).sqrt().item()
        return self.products[i, j].item() / norms if norms > 0 else None


def weight_grams(loras: Mapping[str, Path]) -> dict[str, Gram]:
    """Inner products of the weight changes.

    Args:
        loras: run → LoRA file, all with the same layers.

    Returns:
        layer → Gram, and under "" that of all layers together.
    """
    files = {name: load_file(path) for name, path in loras.items()}
    layers = sorted(key.removesuffix(DOWN) for key in next(iter(files.values())) if key.endswith(DOWN))
    names = list(files)
    grams = {}
    for layer in layers:
        downs = torch.stack([files[name][layer + DOWN].double() for name in names])
        ups = torch.stack([files[name][layer + UP].double() for name in names])
        inner_a = torch.einsum("irk,jsk->ijrs", downs, downs)
        inner_b = torch.einsum("inr,jns->ijrs", ups, ups)
        grams[layer] = Gram(names, (inner_a * inner_b).sum(dim=(2, 3)))
    total = torch.stack([gram.products for gram in grams.values()]).sum(dim=0)
    return {"": Gram(names, total), **grams}


def mean_pair_cosine(gram: Gram, bf16: Sequence[str], coat: Sequence[str]) -> float | None:
    """The mean cosine of the runs with the same seed."""
    return _mean([gram.cosine(a, b) for a, b in zip(bf16, coat, strict=True)])


def mean_seed_cosine(gram: Gram, runs: Sequence[str]) -> float | None:
    """The mean cosine of all pairs of `runs`, which differ in their seed alone."""
    return _mean([gram.cosine(a, b) for a, b in combinations(runs, 2)])


def _mean(cosines: Sequence[float | None]) -> float | None:
    known = [cosine for cosine in cosines if cosine is not None]
    return fmean(known) if known else None
