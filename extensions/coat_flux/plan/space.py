"""Disk space of a job's saves."""

from __future__ import annotations

from collections.abc import Sequence

from coat_core.ops.packing import n_blocks
from coat_core.optim.state import state_bytes

from ..base.names import COAT_OPTIMIZER
from ..blocks.sizes import FP32
from ..config.job import JobConfig
from ..saves.commit import SaveSpace
from .job import adapted, trained_sizes
from .models import find_model

__all__ = ["job_space", "moment_bytes", "save_space"]

BNB_BLOCK, BNB_SMALLEST = 256, 4096  # bitsandbytes: elements that share a scale; smaller tensors keep fp32 moments


def save_space(job: JobConfig, sizes: Sequence[int], whole: int = 0) -> SaveSpace:
    """The saves' space; `sizes` has the elements of A and B of each linear in turn, or of each trained parameter."""
    kept = min(job.save.max_step_saves_to_keep, (job.train.steps - 1) // job.save.save_every) + 1
    average = FP32 * sum(sizes) if job.train.ema_config.use_ema else 0
    raw = FP32 * sum(sizes)
    if job.full:  # a model saved in its training dtype is its own state
        as_trained = job.save.dtype == job.train.dtype and not average
        raw = 0 if as_trained else sum(sizes) * (FP32 if job.train.dtype == "fp32" else 2)
    return SaveSpace(
        lora=(whole if job.full else sum(sizes)) * (FP32 if job.save.dtype == "fp32" else 2),
        state=raw + average + moment_bytes(job, sizes),
        loras=kept,
    )


def job_space(job: JobConfig) -> SaveSpace:
    """The saves' space from the model's configs, without reading weights; raises ConfigError if sizes are unknown."""
    model = find_model(job.model.name_or_path, f"{job.file}: config.process[0].model.name_or_path")
    if job.full:
        return save_space(job, list(trained_sizes(job, model).values()), model.elements["transformer"])
    rank = job.network.linear
    return save_space(job, [size for x in adapted(job, model) for size in (rank * x.inputs, rank * x.outputs)])


def moment_bytes(job: JobConfig, sizes: Sequence[int]) -> int:
    """Bytes of both moments of every adapter, with scales, as stored by `train.optimizer`."""
    train = job.train
    if train.optimizer == COAT_OPTIMIZER:
        return state_bytes(job.coat.optimizer_config(train.optimizer_params)[0], sizes)
    if train.optimizer == "adamw8bit":
        small = sum(size for size in sizes if size < BNB_SMALLEST)
        scales = sum(n_blocks(size, BNB_BLOCK) for size in sizes if size >= BNB_SMALLEST)
        return 2 * (FP32 * small + sum(sizes) - small + FP32 * scales)
    params, rank = train.optimizer_params or {}, job.network.linear
    if train.optimizer == "prodigy":  # both moments, the gradients' sum, and the start values, which are zero for B
        return FP32 * (2 * sum(sizes) + (sum(sizes) + sum(sizes[::2])) // params.get("slice_p", 1))
    if train.optimizer == "adafactor":  # a row and a column for each matrix
        return FP32 * (sum(size // rank + rank for size in sizes) + sum(sizes) * (params.get("beta1") is not None))
    return (1 if train.optimizer == "lion" else 2) * FP32 * sum(sizes)
