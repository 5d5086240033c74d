"""Builds all parts of a run, in the order that keeps memory low and mistakes cheap.

Encoders come first, fill the caches and leave; the transformer then has an empty device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coat_core.optim import FP8AdamW
from coat_core.optim.sharded import local_values

from ...base.errors import UserError
from ...base.names import COAT_OPTIMIZER
from ...base.rng import set_rng_state
from ...base.text import size_text
from ...blocks.apply import apply_coat
from ...blocks.decide import budget_bytes
from ...blocks.formats import PIXELS_PER_TOKEN, config_for, linear_sizes
from ...blocks.held import module_tensors, usable_bytes, used_bytes
from ...blocks.lora import attach_lora
from ...blocks.models import layer_of
from ...blocks.report import CoatReport
from ...blocks.runner import BlockRunner
from ...config.findings import ConfigError
from ...config.job import JobConfig
from ...data.cache import on_device
from ...data.fidelity import Redrawn
from ...data.loader import Batch, BucketBatchSampler, LatentDataset
from ...data.preflight import T5_ARCHS, DataReport
from ...export.lora_files import convert_pairs, layout_of, naming, read_file, read_pairs, write_pairs
from ...plan.job import JobFacts
from ...plan.predict import outside_bytes
from ...plan.speed import card_of, gain_of_auto
from ...saves.state import RunState, keep_execution, model_identity, restore_tensors
from ...watch.guard import UP_MATRICES
from ...watch.live import LiveRun
from ...watch.oom import release_memory
from ...watch.phases import PhaseTracker
from ...watch.run_tables import StepStats
from ...watch.step_watch import StepWatch
from ..full import Chosen, UpdateInBackward, make_states
from ..optimizer import advance, describe_optimizer, make_optimizer, make_scheduler
from .flow_matching import Objective, bypassed_guidance
from .loading import TORCH_DTYPES, Encoders, load_encoders, load_transformer
from .network import LoraEMA, add_lora
from .progress import RunLog
from .validation import ImageSampler, fixed_noise, held_out_of, subjects_of
from .workers import Workers, shard, whole_norms

_REG_DRAWS = 1 << 40  # number of regularization's first draw; noise follows the number, so no two may be equal


class Session:
    """The parts of a run; `point` is the `saving.ResumePoint` that it resumes from, or None."""

    def __init__(
        self,
        job: JobConfig,
        workers: Workers,
        log: RunLog,
        phases: PhaseTracker,
        point: Any,
        identity: dict[str, Any],
        live: LiveRun,
    ) -> None:
        train, model = job.train, job.model
        self.saved: Mapping[str, Any] = {} if point is None else point.record
        sizes = linear_sizes(job.raw["config"]["process"][0])
        execution = self.saved.get("path", {})  # of the saved run, for equal rounding
        job = replace(job, coat=config_for(workers.device, job.coat, sizes, execution))
        self.job = job
        self.workers = workers
        self.log = log
        self.live = live
        self.dtype = TORCH_DTYPES[train.dtype]
        self.step = 0 if point is None else point.step  # optimizer steps done
        losses = ("validation_loss", "held_out_loss", "fidelity")
        self.record = {key: self.saved[key] for key in losses if key in self.saved}  # for `state.json`
        self.graphs: Any = None  # a step_graph.StepGraphs
        # the last step with a function that reads its loss and norm, until it is called
        self.outstanding: tuple[StepStats, Callable[[], list[float]]] | None = None

        reads_t5 = (model.arch or "flux") in T5_ARCHS
        photos = DataReport(job.datasets, job.trigger_word, job.coat.data, reads_t5=reads_t5)
        held_out_paths = {path for paths in held_out_of(job) for path in paths}
        trained, regularization, held_out = [], [], []
        for sample in photos.usable():
            if sample.image_path in held_out_paths:
                held_out.append(sample)
            elif job.datasets[sample.dataset_index].is_reg:
                regularization.append(sample)
            else:
                trained.append(sample)

        phases.enter("cache")
        log.info(f"Loading text encoders and VAE of {model.name_or_path}")
        encoders = load_encoders(model.name_or_path, self.dtype, model.extras_name_or_path)
        phases.hold_models(encoders.vae, encoders.text.models)
        self.dataset, self.images = _prepare_data(job, workers, encoders, [*trained, *regularization, *held_out])
        self.holds_out = bool(held_out)
        self.noise = fixed_noise(self.dataset, held_out, trained)  # of the validation loss
        self.vae = self.redrawn = None
        if job.validation.fidelity:
            self.vae = encoders.vae
            self.redrawn = Redrawn(subjects_of(self.dataset, held_out), self.record.get("fidelity"))
        order = train.batch_size, job.seed, workers.rank, workers.size
        self.sampler = BucketBatchSampler(trained, *order)
        self.reg_sampler = BucketBatchSampler(regularization, *order) if regularization else None
        self._first_reg = len(trained)  # index in `dataset`

        phases.enter("load")
        log.info(f"Loading the transformer of {model.name_or_path}")
        # `lora` has the trained parameters by name, also in full fine-tuning; `report` is None without COAT
        self.transformer, self.lora, self.report = _prepare_transformer(job, workers, self.dtype, log)
        self.objective = Objective(self.transformer, train, encoders.scheduler, job.seed, self.dtype)
        phases.held.add("transformer", self.transformer)
        self.identity = identity
        if identity["model"]["fingerprint"] is None:  # downloaded just now
            self.identity = {**identity, "model": model_identity(model.name_or_path)}
        if point is not None:
            point.restore(self.lora)
            keep_execution(self.transformer, execution)
        params = list(self.lora.values())
        workers.share(params)

        sharded = job.full and workers.shares_weights
        self.optimizer: Any = make_optimizer(
            train.optimizer,
            self.lora if sharded else params,
            train.lr,
            job.coat,
            train.optimizer_params,
            job.seed,
        )
        self.skips_on_device = isinstance(self.optimizer, FP8AdamW) and self.optimizer.defaults["capturable"]
        if point is not None:
            for change in point.restore_optimizer(self.optimizer, train.optimizer):
                log.info(f"Resume: the config's optimizer settings replace the saved ones: {change}")
        schedule = train.lr_scheduler_params
        self.lr_scheduler = make_scheduler(train.lr_scheduler, self.optimizer, train.steps, schedule)
        advance(self.lr_scheduler, self.step)
        if job.full:
            make_states(self.optimizer, self.transformer)

        self.watch = StepWatch(
            job.coat,
            self.transformer,
            None if job.full else self.transformer,
            self.lora,
            self.optimizer,
            log,
            phases,
            lambda: job,
            report=self.report,
            mean=workers.mean,
            norms=whole_norms,
        )
        self.watch.load_state_dict(self.saved.get("guard", {}))  # before `_log_start`, as it takes layers out of FP8
        runner = BlockRunner.of(self.transformer)
        self.captures = False
        if runner is not None:
            runner.expect(graph_obstacle=_capture_obstacle(job, workers), frees_gradients=train.fused_backward)
            if runner.gemms is not None:
                pixels = max(x.bucket.width * x.bucket.height for x in (*trained, *regularization))
                runner.gemms.image_tokens = pixels // PIXELS_PER_TOKEN
            if job.coat.memory.stream_blocks == "auto":
                with suppress(ConfigError):  # unknown model sizes
                    runner.expect(reserve_bytes=outside_bytes(JobFacts(job)))
            self.captures = runner.plan.captured
        if self.report is not None and (gain := gain_of_auto(job.coat, card_of(workers.device))):
            self.report.add_row("weights", job.coat.weight.format, job.coat.weight.format, measured=gain)
        self._log_start()
        if sharded:
            weight_bytes = sum(local_values(x).nbytes for x in module_tensors(self.transformer))
            log.info(
                f"FSDP2: each of {workers.size} processes keeps about {size_text(weight_bytes)} of weights and "
                f"{size_text(self.optimizer.state_bytes())} of moments"
            )

        self.ema: LoraEMA | None = None
        if train.ema_config.use_ema:
            self.ema = LoraEMA(self.lora, train.ema_config)
            phases.held.add("ema", self.ema)
        self.fused: UpdateInBackward | None = None
        if train.fused_backward:
            self.fused = UpdateInBackward(self.optimizer, params, train.max_grad_norm, self.watch.begin_update)
        if point is not None:
            self._continue_from(point.state)

    def _log_start(self) -> None:
        train, log = self.job.train, self.log
        ours = isinstance(self.optimizer, FP8AdamW)
        stored = describe_optimizer(self.optimizer) if ours else train.optimizer
        if self.report is not None:
            why = "" if ours else "moments in FP8 are for coat_fp8_adamw"
            self.report.add_row("optimizer", train.optimizer, stored, why)
            log.info(self.report.table())
        elif ours:
            log.info(f"optimizer {train.optimizer}: {stored}")
        if self.job.full:
            count = sum(param.numel() for param in self.lora.values())
            when = ", updated in backward" if train.fused_backward else ""
            log.info(f"full fine-tuning: {count:,} parameters in {len(self.lora)} tensors{when}")
        else:
            log.info(f"{self.job.network.title} on {len({layer_of(name) for name in self.lora})} linears")

    def _continue_from(self, state: RunState | None) -> None:
        """Restore EMA, position in the data and random generators; `state` is None for a save of ai-toolkit."""
        average = None if state is None else state.tensors("ema")
        if self.ema is not None and average is not None:
            restore_tensors(self.ema.shadow, average, "saved EMA")
        elif self.ema is not None:
            self.log.info("Resume: no average was kept with this save; the EMA starts again from its weights")
        if state is None:
            self.log.info(
                "Resume: this save is ai-toolkit's; weights continue in its save.dtype, data order by step count"
            )
            reg_steps = sum(map(self._takes_regularization, range(1, self.step + 1)))
            for sampler, steps in ((self.sampler, self.step - reg_steps), (self.reg_sampler, reg_steps)):
                if sampler is not None:
                    draws = steps * self.job.train.gradient_accumulation * self.workers.size
                    epoch, within = divmod(draws, sampler.batches_per_epoch)
                    sampler.load_state_dict({"epoch": epoch, "position": within})
        else:
            self.sampler.load_state_dict(state.record["sampler"])
            if self.reg_sampler is not None:
                self.reg_sampler.load_state_dict(state.record.get("reg_sampler", self.reg_sampler.state_dict()))
            set_rng_state(state.tensors("rng"))

    def batches(self) -> Iterator[Batch]:
        """Micro-batches of the coming steps; every second step may be on regularization photos."""
        trained = iter(self.sampler)
        while True:
            if self.reg_sampler is None or not self._takes_regularization(self.step + 1):
                yield next(trained)
                continue
            batch = next(iter(self.reg_sampler))
            yield Batch(tuple(self._first_reg + index for index in batch.indices), _REG_DRAWS + batch.draw)

    def _takes_regularization(self, number: int) -> bool:
        """Whether step `number` is on regularization photos: every second, unless a save or samples come before it."""
        job, done = self.job, number - 1
        if self.reg_sampler is None or done % 2 == 1:
            return False
        saves = done % job.save.save_every == 0
        samples = done >= job.sample.sample_start_step and done % job.sample.sample_every == 0
        return not (saves or (samples and not job.train.disable_sampling))

    @property
    def epoch(self) -> int:
        """Finished passes over the data."""
        return self.sampler.state_dict()["epoch"]

    @contextmanager
    def between_steps(self, phase: str) -> Iterator[None]:
        """Put the transformer in eval mode with the EMA's weights, if any, and free the memory of captured steps."""
        if self.graphs is not None:
            self.graphs.drop()
        # the held-out loss has guidance as in training, samples the model's own
        bypass = phase == "validate" and self.job.train.bypass_guidance_embedding
        with (
            self.watch.phases.during(phase),
            nullcontext() if self.ema is None else self.ema.applied(),
            bypassed_guidance(self.transformer, bypass),
        ):
            self.transformer.eval()
            try:
                yield
            finally:
                self.transformer.train()


def _prepare_data(
    job: JobConfig, workers: Workers, encoders: Encoders, samples: list[Any]
) -> tuple[LatentDataset, ImageSampler | None]:
    """The data set with its caches filled, and the sampler if samples are drawn; drops the text encoders."""
    device = workers.device
    room = None  # bytes for the encoders
    if device.type == "cuda":
        room = (budget_bytes(job.coat, usable_bytes(device)) or 0) - used_bytes(device)[0]
    with workers.main_first():
        dataset = LatentDataset(
            samples,
            job.datasets,
            encoders.vae,
            encoders.text,
            device,
            seed=job.seed,
            options=job.coat.data,
            room=room,
            reg_weight=job.train.reg_weight,
        )
        dataset.fill(progress=workers.is_main and bool(samples))
    images = None
    if job.sample.items() and not job.train.disable_sampling and (workers.is_main or workers.shares_weights):
        with on_device(encoders.text.models, device, room, last=True):
            images = ImageSampler(job, encoders, device)
    if dataset.needs_encoders:  # not cached: encoded at every draw
        for model in encoders.text.models:
            model.to(device)
    if dataset.needs_vae:
        encoders.vae.to(device)
    encoders.text = None
    release_memory()
    return dataset, images


def _prepare_transformer(
    job: JobConfig, workers: Workers, dtype: torch.dtype, log: RunLog
) -> tuple[nn.Module, dict[str, nn.Parameter], CoatReport | None]:
    """The transformer, its trained parameters by saved name, and COAT's report."""
    name = job.model.name_or_path
    device = workers.device
    coat = job.coat
    chosen = Chosen(coat)  # in full fine-tuning; found while loading
    report = None
    transformer = load_transformer(name, dtype, coat, device, trained=chosen.find if job.full else None, log=log.info)
    if coat.enabled:
        allowed = job.train.gradient_checkpointing
        report = apply_coat(transformer, coat, allow_recompute=allowed, device=device, trained=chosen.linears)
        if workers.shares_weights and not job.full:
            streaming: Any = BlockRunner.of(transformer).streaming  # ensured by `joint_job`
            size = streaming.share_out(dist.group.WORLD) / 1e9
            log.info(f"FSDP2: each of {workers.size} processes keeps {size:.2f} GB of the blocks' codes")
        if device.type == "cuda" and not job.full:
            # TF32 for the LoRA's fp32 products: it holds their bf16 inputs exactly; ai-toolkit does not use it
            torch.set_float32_matmul_precision("high")
    elif job.train.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    transformer.to(device)
    if job.full:
        trained = chosen.train(transformer.train())
        if workers.shares_weights:
            block_size = coat.optimizer_config(job.train.optimizer_params)[0].block_size
            trained = shard(transformer, list(trained), device, block_size)
        return transformer, trained, report
    trained = add_lora(transformer, job.network, job.seed)
    if coat.enabled and job.network.type == "lora":
        attach_lora(transformer, coat)
    return transformer.train(), trained, report


def _capture_obstacle(job: JobConfig, workers: Workers) -> str:
    """Why steps of this run cannot be CUDA graphs, or ""."""
    if workers.device.type != "cuda":
        return f"there are no CUDA graphs on a {workers.device.type}"
    if workers.size > 1:
        return "gradients travel between processes"
    if job.train.optimizer != COAT_OPTIMIZER:
        return f"{job.train.optimizer} cannot skip a step on the device; {COAT_OPTIMIZER} can"
    if job.full:
        return "all weights are trained"
    if job.network.dropout:
        return "network.dropout draws in the step"
    return ""


class LoraDrawer:
    """Draws a job's samples with one saved adapter after another, whose values it copies into the same model."""

    def __init__(self, job: JobConfig):
        workers = Workers(job.device)
        sizes = linear_sizes(job.raw["config"]["process"][0])
        job = replace(job, datasets=(), coat=config_for(workers.device, job.coat, sizes))
        dtype = TORCH_DTYPES[job.train.dtype]
        encoders = load_encoders(job.model.name_or_path, dtype, job.model.extras_name_or_path)
        self._images: Any = _prepare_data(job, workers, encoders, [])[1]
        silent_log = RunLog(job, workers.device, active=False)
        self._transformer, self._lora, _ = _prepare_transformer(job, workers, dtype, silent_log)
        self._is_lokr = job.network.type == "lokr"
        self._transformer.eval()

    def read(self, path: str | None) -> dict[str, Tensor]:
        """Values of a LoRA in any layout, or of a LoKr, by this run's names; UserError if they do not fit."""
        if path is None:  # the model without one
            return {}
        tensors, _ = read_file(Path(path))
        if self._is_lokr:  # alpha is the rank in both trainers, and not needed
            values = {name: value for name, value in tensors.items() if not name.endswith(".alpha")}
        else:
            with naming(Path(path)):
                layout = layout_of(tensors)
                pairs = convert_pairs(read_pairs(tensors, layout), layout, "diffusers", torch.float32)
            values = write_pairs(pairs, "diffusers")
        for name, value in values.items():
            param = self._lora.get(name)
            if param is None or param.shape != value.shape:
                here = "has none" if param is None else f"has {tuple(param.shape)}"
                rule = f"{name} has shape {tuple(value.shape)}, and this run {here}"
                raise UserError(f"{path}: {rule}; give LoRAs of the same model and network settings")
        return values

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], strength: float) -> None:
        """Replace the adapters' values by those of `read`; adapters that are missing there become zero."""
        for name, param in self._lora.items():
            value = values.get(name, torch.zeros(()))
            param.copy_(value * strength if UP_MATRICES.search(name) else value)

    def draw(self, number: int) -> Any:
        """The image of one of the job's samples."""
        return self._images.image(self._transformer, number)
