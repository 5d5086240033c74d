"""Everything a run needs, made in the order that keeps memory low and mistakes cheap.

Data set and resume point are checked before any model is loaded. Encoders come first, fill the caches and leave; the
transformer then meets an empty device: loaded on the CPU, its linears quantized there, moved, adapters added.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coat_core.optim import FP8AdamW

from ..config.job_config import JobConfig
from ..data.dataset import BucketBatchSampler, scan
from ..data.loader import LatentDataset, cache_all
from ..flux import apply_coat
from ..lora import attach_lora
from ..memory.parts import gradients, module_tensors, state_tensors, trained
from ..memory.phases import PhaseTracker
from ..memory.stats import MemoryLog
from ..optimizer import describe_optimizer
from .ema import LoraEMA
from .loading import Encoders, load_encoders, load_transformer
from .network import add_lora, load_lora_tensors, lora_parameters, lora_targets
from .objective import Objective
from .optim import advance, make_optimizer, make_scheduler, restore_optimizer
from .progress import RunLog
from .resume import ResumeError, ResumePoint, load_optimizer_state
from .sampling import ImageSampler
from .workers import Workers

__all__ = ["Session", "open_session", "seed_of"]

DEFAULT_SEED = 42
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Session:
    """The parts of a run; `step` counts optimizer steps done, `record` goes into `state.json`."""

    job: JobConfig
    workers: Workers
    log: RunLog
    memory: MemoryLog
    phases: PhaseTracker
    dataset: LatentDataset
    sampler: BucketBatchSampler
    images: ImageSampler | None
    transformer: nn.Module
    dtype: torch.dtype
    lora: dict[str, nn.Parameter]
    objective: Objective
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    ema: LoraEMA | None
    step: int = 0
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Passes over the data done."""
        return self.sampler.state_dict()["epoch"]

    def averaged(self) -> AbstractContextManager[None]:
        """With an EMA, the transformer carries the average inside this context: what is saved, sampled, validated."""
        return nullcontext() if self.ema is None else self.ema.applied()


def seed_of(job: JobConfig) -> int:
    """`training_seed`, or a fixed one where none is given: a run can always be repeated."""
    return DEFAULT_SEED if job.training_seed is None else job.training_seed


def open_session(
    job: JobConfig, workers: Workers, log: RunLog, phases: PhaseTracker, point: ResumePoint | None
) -> Session:
    """Make a session, continuing from `point`, the newest save, where there is one.

    Raises:
        DatasetError: the data cannot be used.
        ModelLoadError: the model cannot be loaded.
        ResumeError: the save does not fit this config.
    """
    dtype = TORCH_DTYPES[job.train.dtype]
    samples = scan(job.datasets, job.trigger_word)
    phases.enter("cache")
    encoders = load_encoders(job.model.name_or_path, dtype)
    phases.hold_models(encoders.vae, [encoders.text.clip, encoders.text.t5])
    dataset, images = _prepare_data(job, workers, encoders, samples)
    phases.enter("load")
    transformer = _prepare_transformer(job, workers, log, dtype)
    lora = lora_parameters(transformer)
    if point is not None:
        _restore_lora(transformer, point)
    workers.share(list(lora.values()))
    optimizer = _prepare_optimizer(job, lora, log, point)
    train = job.train
    session = Session(
        job=job,
        workers=workers,
        log=log,
        memory=_make_memory_log(job, workers, log, phases),
        phases=phases,
        dataset=dataset,
        sampler=BucketBatchSampler(samples, train.batch_size, seed_of(job), workers.rank, workers.world_size),
        images=images,
        transformer=transformer,
        dtype=dtype,
        lora=lora,
        objective=Objective(transformer, train, encoders.scheduler, seed_of(job), dtype),
        optimizer=optimizer,
        lr_scheduler=make_scheduler(train.lr_scheduler, optimizer, train.steps, train.lr_scheduler_params or {}),
        ema=_make_ema(job, lora),
    )
    _hold(session)
    if point is not None:
        _continue(session, point)
    return session


def _hold(session: Session) -> None:
    """Let the memory report count the run's parts."""
    phases = session.phases
    phases.hold("transformer", session.transformer, module_tensors)
    phases.hold("lora", session.transformer, trained)
    phases.hold("gradients", session.transformer, gradients)
    phases.hold("optimizer", session.optimizer, state_tensors)
    if session.ema is not None:
        phases.hold("ema", session.ema, lambda ema: ema.shadow.values())


def _make_memory_log(job: JobConfig, workers: Workers, log: RunLog, phases: PhaseTracker) -> MemoryLog:
    memory = job.coat.memory
    enabled = job.coat.enabled and memory.log_memory_stats and workers.is_main
    return MemoryLog(workers.device, memory.log_every, enabled, log.say, phases.see)


def _prepare_optimizer(
    job: JobConfig, lora: Mapping[str, nn.Parameter], log: RunLog, point: ResumePoint | None
) -> Optimizer:
    train = job.train
    optimizer = make_optimizer(train.optimizer, lora.values(), train.lr, job.coat, train.optimizer_params or {})
    if isinstance(optimizer, FP8AdamW):
        log.say(f"optimizer {train.optimizer}: {describe_optimizer(optimizer)}")
    if point is not None:
        _restore_optimizer(optimizer, job.folder, point, train.optimizer, log)
    return optimizer


def _prepare_data(
    job: JobConfig, workers: Workers, encoders: Encoders, samples: list[Any]
) -> tuple[LatentDataset, ImageSampler | None]:
    device = workers.device
    with workers.main_first():
        dataset = cache_all(
            samples,
            encoders.vae,
            encoders.text,
            device,
            progress=workers.is_main,
            dataset_configs=job.datasets,
            seed=seed_of(job),
        )
    images = None
    wanted = job.sample.items()
    if workers.is_main and wanted and not job.train.disable_sampling:
        _move_text(encoders, device)
        images = ImageSampler(wanted, job.trigger_word, encoders, device, job.sample.format)
    if dataset.needs_vae:
        encoders.vae.to(device)
    if dataset.needs_encoders:
        _move_text(encoders, device)
    encoders.text = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return dataset, images


def _move_text(encoders: Encoders, device: torch.device) -> None:
    encoders.text.clip.to(device)
    encoders.text.t5.to(device)


def _prepare_transformer(job: JobConfig, workers: Workers, log: RunLog, dtype: torch.dtype) -> nn.Module:
    transformer = load_transformer(job.model.name_or_path, dtype)
    targets = lora_targets(
        transformer,
        only_if_contains=job.network.network_kwargs.only_if_contains,
        ignore_if_contains=job.network.network_kwargs.ignore_if_contains,
        transformer_only=job.network.transformer_only,
    )
    if job.coat.enabled:
        allowed = job.train.gradient_checkpointing
        log.say(apply_coat(transformer, job.coat, allow_recompute=allowed, device=workers.device).table())
        _use_tf32(workers.device)
    elif job.train.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    transformer.to(workers.device)
    add_lora(transformer, targets, job.network.linear, seed=seed_of(job), dropout=job.network.dropout or 0.0)
    if job.coat.enabled:
        attach_lora(transformer, job.coat)
    log.say(f"LoRA: rank {job.network.linear} on {len(targets)} linears")
    return transformer.train()


def _use_tf32(device: torch.device) -> None:
    """TF32 for the LoRA's fp32 products: it holds their bf16 inputs exactly. ai-toolkit's own loop does without it."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def _make_ema(job: JobConfig, lora: Mapping[str, nn.Parameter]) -> LoraEMA | None:
    config = job.train.ema_config
    if not config.use_ema:
        return None
    return LoraEMA(lora, config.ema_decay, use_feedback=config.use_feedback, param_multiplier=config.param_multiplier)


def _restore_lora(transformer: nn.Module, point: ResumePoint) -> None:
    try:
        load_lora_tensors(transformer, point.lora(), source=str(point.path))
    except ValueError as error:
        raise ResumeError(str(error)) from error


def _restore_optimizer(optimizer: Optimizer, run_dir: Path, point: ResumePoint, name: str, log: RunLog) -> None:
    saved_with = point.record.get("optimizer", name)
    if saved_with != name and name != "coat_fp8_adamw":
        raise ResumeError(
            f"{run_dir / 'optimizer.pt'}: was written by {saved_with}, which train.optimizer={name} cannot read; "
            f"go back to {saved_with}, or choose another config.name to start anew"
        )
    try:
        changes = restore_optimizer(optimizer, load_optimizer_state(run_dir))
    except (ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{run_dir / 'optimizer.pt'}: does not fit this run's LoRA ({error})") from error
    for change in changes:
        log.say(f"Resume: the config's optimizer settings replace the saved ones: {change}")


def _continue(session: Session, point: ResumePoint) -> None:
    session.step = point.step
    session.record = dict(point.record)
    advance(session.lr_scheduler, point.step)
    average = point.ema()
    if session.ema is not None and average is not None:
        session.ema.load({name: value.to(session.workers.device) for name, value in average.items()})
    elif session.ema is not None:
        session.log.say("Resume: no average was kept with this save; the EMA starts again from its weights")
    position = point.record.get("sampler")
    if position is None:
        session.log.say(
            "Resume: this save is ai-toolkit's; weights continue in its save.dtype, data order by step count"
        )
        draws = point.step * session.job.train.gradient_accumulation * session.workers.world_size
        epoch, within = divmod(draws, session.sampler.batches_per_epoch)
        position = {**session.sampler.state_dict(), "epoch": epoch, "position": within}
    session.sampler.load_state_dict(position)
