"""The final LoRAs, or fully fine-tuned models, in bf16: their loss, and their similarity.

LoRAs of two bf16 runs that differ in the seed alone are far from parallel, so the cosine of a (bf16, COAT) pair is
compared with theirs. The change of a layer is B · A, N × K numbers, but inner products need only r × r:

    <B1 A1, B2 A2> = trace(A1ᵀ B1ᵀ B2 A2) = sum over all elements of (B1ᵀ B2) * (A1 A2ᵀ)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config.job import JobConfig
from ..data.hold_out import FixedNoise
from ..saves.state import restore_tensors
from ..trainers.standalone.loading import TORCH_DTYPES, base_weights, load_transformer
from ..trainers.standalone.network import add_lora, lora_parameters, lora_targets
from ..trainers.standalone.validation import predictions
from .study import as_many_as_fit

__all__ = ["Gram", "Scores", "mean_cosine", "model_grams", "score_loras", "weight_grams"]

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class Gram:
    """Inner products (R, R) fp64 of the same tensor of R runs."""

    def __init__(self, names: Iterable[str], products: Tensor):
        self.names, self.products = list(names), products

    def cosine(self, a: str, b: str) -> float | None:
        """Cosine of runs a and b; None if one is zero."""
        i, j = self.names.index(a), self.names.index(b)
        norms = (self.products[i, i] * self.products[j, j]).sqrt().item()
        return self.products[i, j].item() / norms if norms > 0 else None


def mean_cosine(gram: Gram, pairs: Iterable[tuple[str, str]]) -> float | None:
    """The mean cosine of pairs of runs; None if no pair has one."""
    cosines = [gram.cosine(a, b) for a, b in pairs]
    known = [cosine for cosine in cosines if cosine is not None]
    return fmean(known) if known else None


@dataclass(frozen=True)
class Scores:
    """Losses on the held-out photos in the bf16 model; inner products of predicted velocities and of their changes."""

    base: float
    losses: dict[str, float]
    outputs: Gram
    changes: Gram


@torch.no_grad()
def score_loras(
    job: JobConfig,
    loras: Mapping[str, Path],
    held_out: FixedNoise,
    *,
    device: torch.device,
    sigmas: int = 8,
    on_batch: Callable[[int, int], None] = lambda done, batches: None,
) -> Scores:
    """Run each LoRA in one bf16 model, or each whole model, on the held-out photos; ResumeError if one does not fit."""
    dtype = TORCH_DTYPES[job.train.dtype]
    if job.full:
        places = (job.model.name_or_path, *map(str, loras.values()))
        models = [load_transformer(place, dtype, device=device) for place in places]
    else:
        transformer = _model_with_lora(job, dtype, device)
        files = {name: load_file(path) for name, path in loras.items()}
    losses: list[list[Tensor]] = [[] for _ in range(len(loras) + 1)]
    outputs = torch.zeros(len(loras), len(loras), dtype=torch.float64)
    changes = outputs.clone()
    batches = list(held_out.batches(sigmas, as_many_as_fit))
    for done, points in enumerate(batches, 1):
        rows = []
        for run, model in enumerate(models if job.full else _with_each(transformer, files)):
            velocity, loss = predictions(model, *held_out.drawn(points), dtype=dtype, device=device)
            rows.append(velocity.flatten().double().cpu())
            losses[run].append(loss.double().cpu())
        base, trained = rows[0], torch.stack(rows[1:])
        outputs += trained @ trained.T
        changes += (trained - base) @ (trained - base).T
        on_batch(done, len(batches))
    means = [torch.cat(parts).mean().item() for parts in losses]
    return Scores(means[0], dict(zip(loras, means[1:], strict=True)), Gram(loras, outputs), Gram(loras, changes))


def _model_with_lora(job: JobConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    kwargs = job.network.network_kwargs
    transformer = load_transformer(job.model.name_or_path, dtype, device=device)
    targets = lora_targets(
        transformer,
        only_if_contains=kwargs.only_if_contains,
        ignore_if_contains=kwargs.ignore_if_contains,
        transformer_only=job.network.transformer_only,
    )
    add_lora(transformer, targets, job.network.linear, seed=0)
    return transformer.eval()


def _with_each(transformer: nn.Module, loras: Mapping[str, Mapping[str, Tensor]]) -> Iterator[nn.Module]:
    """The one model, first without a LoRA, then with each of them."""
    parameters = lora_parameters(transformer)
    for key, parameter in parameters.items():
        if ".lora_B." in key:
            parameter.zero_()
    yield transformer
    for name, tensors in loras.items():
        restore_tensors(parameters, tensors, name)
        yield transformer


def model_grams(base: str, folders: Mapping[str, Path]) -> dict[str, Gram]:
    """`weight_grams` of whole models trained from `base`."""
    sources = [base_weights(place) for place in (base, *map(str, folders.values()))]
    grams: dict[str, Gram] = {}
    for name in sources[0].places:
        if name.endswith(".weight"):
            start, *ends = (source.read(name).double().flatten() for source in sources)
            rows = torch.stack(ends) - start
            grams[name.removesuffix(".weight")] = Gram(folders, rows @ rows.T)
    return _with_total(grams)


def weight_grams(loras: Mapping[str, Path]) -> dict[str, Gram]:
    """Inner products of weight changes of LoRAs with the same layers: layer → Gram, "" for all layers together."""
    files = {name: load_file(path) for name, path in loras.items()}
    layers = sorted(key.removesuffix(DOWN) for key in next(iter(files.values())) if key.endswith(DOWN))
    grams = {}
    for layer in layers:
        downs = torch.stack([tensors[layer + DOWN].double() for tensors in files.values()])
        ups = torch.stack([tensors[layer + UP].double() for tensors in files.values()])
        inner_a = torch.einsum("irk,jsk->ijrs", downs, downs)
        inner_b = torch.einsum("inr,jns->ijrs", ups, ups)
        grams[layer] = Gram(files, (inner_a * inner_b).sum(dim=(2, 3)))
    return _with_total(grams)


def _with_total(grams: dict[str, Gram]) -> dict[str, Gram]:
    names = next(iter(grams.values())).names
    return {"": Gram(names, torch.stack([gram.products for gram in grams.values()]).sum(dim=0)), **grams}
