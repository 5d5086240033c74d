"""Process type `coat_flux_trainer`: ai-toolkit's own trainer with COAT applied at its hooks.

    hook_before_model_load        read and check the `coat:` block, ai-toolkit, and their settings against each other
    hook_after_model_load         FP8 linears (unless they were made at load), checkpoint policy
    hook_add_extra_train_params   the LoRA network is complete: adapters share the FP8 input of their base linear
    hook_before_train_loop        the optimizer is the right one and a resume really happened; the start table
    hook_train_loop               memory lines, watch the loss
    post_save_hook, done_hook     adapters alive; summary, memory report

`before_dataset_load`, `sample` and `save` only tell the memory report which phase it is.

`coat.enabled: false` leaves every one of them to ai-toolkit.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

try:
    from extensions_built_in.sd_trainer.DiffusionTrainer import DiffusionTrainer as HostTrainer
except ImportError:
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer as HostTrainer

from . import memory
from .active import job_scope, set_active
from .contract import HOOKS, check_host, check_network, let_lora_find, untested_version
from .host import HostError, load_core, say, show_logs
from .optimizer import OPTIMIZER_NAME, load_error
from .preflight import config_file, find_conflict, find_refusal, find_surprises, raise_refusal
from .quantizer import QTYPE, convert, converted_linears, damaged_linears, plain_linears, store_only
from .watch import LossWatch, around_backward, dead_adapters

__all__ = ["CoatFluxTrainer"]


class CoatFluxTrainer(HostTrainer):
    """ai-toolkit's trainer with the `coat:` block of its process entry applied."""

    coat: Any = None
    _phases: Any = None

    def run(self) -> None:
        """Run the job; what it left for the optimizer and the qtype is forgotten afterwards."""
        absent = [name for name in HOOKS if not hasattr(HostTrainer, name)]
        if absent:
            raise HostError(f"{HostTrainer.__name__} has no {', '.join(absent)}")
        with job_scope():
            try:
                super().run()
            finally:
                if self._phases is not None:
                    self._phases.close()

    @property
    def _on(self) -> bool:
        return self.coat is not None and self.coat.enabled

    # -- before the model ------------------------------------------------------------------------------------------

    def hook_before_model_load(self) -> None:
        """Read and check everything that needs no model."""
        super().hook_before_model_load()
        load_core()
        from .. import flux, lora, optimizer  # noqa: F401  (what logs is imported before show_logs)
        from ..config import COATConfig
        from ..tiny_flux import provide_embedded

        show_logs()
        file = config_file(self.save_root)
        self.coat = COATConfig.from_dict(self.get_conf("coat", None), file=file, key_path="config.process[0].coat")
        raise_refusal(find_conflict(self.config, self.coat), file)
        provide_embedded(self.model_config.name_or_path)
        if not self._on:
            say("[coat] coat.enabled=false: this is ai-toolkit's own run")
            return
        check_host(HostTrainer)
        raise_refusal(find_refusal(self.config, self.accelerator.num_processes), file)
        for line in [untested_version(), *find_surprises(self.config)]:
            if line:
                say(f"[coat] note: {line}")
        set_active(self.coat)
        self._choose_at_load()
        compiled = bool(getattr(self.model_config, "compile", False))
        self._phases = memory.tracker(self.device_torch, self.save_root, self.accelerator.is_main_process, compiled)

    def _choose_at_load(self) -> None:
        """Let ai-toolkit's quantization at load convert what COAT converts: the blocks, not what lies around them."""
        if self._loads_fp8() and self.model_config.is_flux:
            from ..flux.policy import FLUX

            self.model_config.quantize_kwargs.setdefault("include", list(FLUX.convert))

    def _loads_fp8(self) -> bool:
        return bool(self.model_config.quantize) and self.model_config.qtype == QTYPE

    # -- the model and its adapters --------------------------------------------------------------------------------

    def hook_after_model_load(self) -> None:
        """Convert the linears, unless loading did, and set what blocks keep for backward."""
        super().hook_after_model_load()
        if not self._on:
            return
        from ..flux import apply_coat

        if self.coat.weight.use_fp8:
            self._convert_weights()
        else:
            let_lora_find("FP8TrainableLinear")
        self._report = apply_coat(
            self.sd.unet,
            self.coat,
            allow_recompute=bool(self.train_config.gradient_checkpointing),
            device=self.device_torch,
        )
        memory.hold_models(self._phases, self.sd, self._text_encoders())

    def _convert_weights(self) -> None:
        """Convert what loading did not, and count: ai-toolkit's quantize() prints "Failed to quantize" and goes on."""
        model = self.sd.unet
        at_load = sum(1 for _ in converted_linears(model))
        if self._loads_fp8() and not at_load:
            raise HostError(f"loading with qtype {QTYPE} converted no linear; see the lines 'Failed to quantize' above")
        names = plain_linears(model)
        convert(model, names, self.coat.linear_config())
        encoders = sum(store_only(encoder) for encoder in self._text_encoders())
        say(f"[coat] FP8 weights: {at_load} linears at load, {len(names)} after it; {encoders} in text encoders")

    def _text_encoders(self) -> list[Any]:
        encoders = self.sd.text_encoder
        return [e for e in (encoders if isinstance(encoders, list) else [encoders]) if e is not None]

    def hook_add_extra_train_params(self, params: Any) -> Any:
        """Let the adapters share the FP8 input of their base linears."""
        params = super().hook_add_extra_train_params(params)
        if not self._on or self.network is None:
            return params
        # sampling would merge the LoRA into a base that holds no bf16 weight, or drift one that does
        self.network.can_merge_in = False
        if self.network_config.type.lower() == "lora":
            from ..lora import attach_lora

            check_network(self.network)
            attach_lora(self.network, self.coat)
        return params

    # -- phases of the memory report -------------------------------------------------------------------------------

    def before_dataset_load(self) -> None:
        """Loading ends, caching begins."""
        super().before_dataset_load()
        if self._on:
            self._phases.enter("cache")

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Let ai-toolkit sample."""
        with self._phase("sample"):
            return super().sample(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Let ai-toolkit save."""
        with self._phase("save"):
            return super().save(*args, **kwargs)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._phases.during(name) if self._on else nullcontext()

    # -- the loop --------------------------------------------------------------------------------------------------

    def hook_before_train_loop(self) -> None:
        """Check the optimizer and a resume; print the start table."""
        if self._on:
            self._check_optimizer()
            say(self._report.table())
            self._start_watching()
        super().hook_before_train_loop()
        if self._on:
            memory.hold_training(self._phases, self.network, self.optimizer, getattr(self, "ema", None))
            self._phases.enter("step")

    def _check_optimizer(self) -> None:
        if self.train_config.optimizer.lower() != OPTIMIZER_NAME:
            return
        path = os.path.join(self.save_root, "optimizer.pt")
        if not os.path.exists(path):
            return
        remedy = f"restore {path}, or delete it to go on with fresh moments"
        error = load_error(self.optimizer)
        if error is not None:
            raise RuntimeError(f"resume: {path} could not be loaded ({error}); {remedy}")
        if self.optimizer.state:
            return
        if self.network is not None and self.network.did_change_weights:
            say(f"[coat] note: the LoRA's shape changed, so {path} was not loaded: moments start fresh")
            return
        raise RuntimeError(f"resume: {path} exists but ai-toolkit did not load it; {remedy}")

    def _start_watching(self) -> None:
        from ..memory.stats import MemoryLog

        asked, phases = self.coat.memory, self._phases
        self._memory = MemoryLog(self.device_torch, asked.log_every, asked.log_memory_stats, say, phases.see)
        self._losses = LossWatch()
        self._first_step = self.step_num
        self._codes_checked = False

    def hook_train_loop(self, batch: Any) -> Any:
        """Run ai-toolkit's step between memory lines."""
        if not self._on:
            return super().hook_train_loop(batch)
        if not self._codes_checked:
            self._check_codes()
        step = self.step_num + 1
        self._memory.line("before_forward", step)
        with around_backward(
            self.accelerator,
            before=lambda: self._memory.line("after_forward", step),
            after=lambda: self._memory.line("after_backward", step),
        ):
            losses = super().hook_train_loop(batch)
        self._memory.line("after_optimizer_step", step)
        self._losses.see(losses["loss"], step)
        return losses

    def _check_codes(self) -> None:
        """Once, after the first samples: casts made by sampling did not reach codes or scales."""
        damaged = damaged_linears(self.sd.unet)
        if damaged:
            raise HostError(
                f"codes or scales of {len(damaged)} linears changed their dtype while sampling ({damaged[0]})"
            )
        self._codes_checked = True

    # -- the end ---------------------------------------------------------------------------------------------------

    def post_save_hook(self, save_path: str) -> None:
        """End the run when its adapters are dead."""
        super().post_save_hook(save_path)
        if self._on and self.network is not None:
            reason = dead_adapters(self.network, self.step_num - self._first_step)
            if reason:
                raise RuntimeError(f"step {self.step_num}: {reason}")

    def done_hook(self) -> None:
        """Print the summary."""
        super().done_hook()
        if self._on:
            from ..memory.report import finish
            from ..memory.stats import GB

            file = config_file(self.save_root)
            finish(
                self._phases,
                lambda: memory.job_config(self.job.name, self.config, file),
                say,
                table=self.coat.memory.log_memory_stats,
            )
            peak = self._phases.peak / GB
            say(f"[coat] done: {self.step_num} steps, peak memory {peak:.2f}GB, files in {self.save_root}")
