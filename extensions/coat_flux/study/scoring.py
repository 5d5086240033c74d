"""What the final LoRAs do in the bf16 model, which is where other programs load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config.job import JobConfig
from ..trainers.standalone.loading import load_transformer
from ..trainers.standalone.network import add_lora, load_lora_tensors, lora_parameters, lora_targets
from ..trainers.standalone.session import TORCH_DTYPES
from .held_out import HeldOut
from .similarity import Gram

__all__ = ["Scores", "score_loras"]


@dataclass(frozen=True)
class Scores:
    """Losses and outputs on the held-out photos in the bf16 model.

    Attributes:
        base: loss without a LoRA.
        losses: run → loss.
        outputs: inner products of the predicted velocities.
        changes: of what each LoRA adds to the prediction without one.
    """

    base: float
    losses: dict[str, float]
    outputs: Gram
    changes: Gram


@torch.no_grad()
def score_loras(
    job: JobConfig,
    loras: Mapping[str, Path],
    held_out: HeldOut,
    *,
    device: torch.device,
    sigmas: int = 8,
    on_batch: Callable[[int, int], None] | None = None,
) -> Scores:
    """Load each LoRA into one high precision model and run it on the held-out photos.

    Args:
        job: of any of the runs: model, dtype, LoRA's rank and targets.
        loras: run → LoRA file.
        held_out: the photos.
        device: where to run.
        sigmas: noise levels per photo.
        on_batch: is told batches done and their number.

    Raises:
        ValueError: a LoRA does not fit the job's network.
    """
    transformer, dtype = _model(job, device)
    files = {name: load_file(path) for name, path in loras.items()}
    losses: list[list[Tensor]] = [[] for _ in range(len(files) + 1)]
    outputs = torch.zeros(len(files), len(files), dtype=torch.float64)
    changes = outputs.clone()
    batches = list(held_out.batches(sigmas))
    for done, points in enumerate(batches, 1):
        rows = []
        for run, (source, tensors) in enumerate([("", None), *files.items()]):
            _load(transformer, tensors, source)
            velocity, loss = held_out.predictions(transformer, points, dtype=dtype, device=device)
            rows.append(velocity.flatten().double().cpu())
            losses[run].append(loss.double().cpu())
        stacked = torch.stack(rows)
        outputs += stacked[1:] @ stacked[1:].T
        changes += (stacked[1:] - stacked[0]) @ (stacked[1:] - stacked[0]).T
        if on_batch is not None:
            on_batch(done, len(batches))
    base, *finals = (torch.cat(parts).mean().item() for parts in losses)
    names = list(files)
    return Scores(base, dict(zip(names, finals, strict=True)), Gram(names, outputs), Gram(names, changes))


def _model(job: JobConfig, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    """The transformer in `train.dtype`, with adapters that do nothing yet, in eval mode."""
    dtype, kwargs = TORCH_DTYPES[job.train.dtype], job.network.network_kwargs
    transformer = load_transformer(job.model.name_or_path, dtype)
    targets = lora_targets(
        transformer,
        only_if_contains=kwargs.only_if_contains,
        ignore_if_contains=kwargs.ignore_if_contains,
        transformer_only=job.network.transformer_only,
    )
    transformer.to(device)
    add_lora(transformer, targets, job.network.linear, seed=0)
    return transformer.eval(), dtype


def _load(transformer: nn.Module, tensors: Mapping[str, Tensor] | None, source: str) -> None:
    if tensors is not None:
        load_lora_tensors(transformer, tensors, source=source)
        return
    for name, param in lora_parameters(transformer).items():
        if ".lora_B." in name:
            param.zero_()
