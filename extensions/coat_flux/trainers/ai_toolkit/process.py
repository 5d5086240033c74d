"""Process type `coat_flux_trainer`: ai-toolkit's trainer with COAT in its hooks, in order of their calls."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections import OrderedDict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from extensions_built_in.sd_trainer.DiffusionTrainer import DiffusionTrainer as HostTrainer

from ...base.environment import gpu_notes
from ...base.interrupts import keep_streams
from ...base.rng import kept_draws
from ...base.text import GB
from ...blocks.apply import apply_coat
from ...blocks.formats import PIXELS_PER_TOKEN, config_for, largest_side, linear_sizes
from ...blocks.lora import attach_lora
from ...blocks.models.check import check_models
from ...blocks.runner import BlockRunner
from ...config.check import check_job_dict, job_for_plan
from ...config.findings import ConfigError
from ...config.job import coat_of_entry
from ...config.job_file import load_job_yaml
from ...mini_flux import provide_embedded
from ...plan.job import UNPROBED, JobFacts
from ...plan.predict import outside_bytes
from ...plan.speed import card_of, gain_of_auto
from ...saves.repair import describe_lowest, run_lock
from ...saves.state import require_readable
from ...watch.phases import MEMORY_FILE, PhaseTracker, finish
from ..processes import DDP, EXIT_OTHER, LaunchError, first_to_fail, require_launch, shares_weights
from . import contract, host
from .full import FullModel
from .host import detail, info, patched
from .loop import Team, TrainingLoop, explain_end, live_run
from .optimizer import check_optimizer, install_optimizer
from .photos import HeldOutPhotos, check_photos
from .quantizer import choose_at_load, convert_model, install_quantizer
from .resume import Continuation, find_continuation


class SamplingStopped(Exception):
    """Raised between two samples, to end the run."""


class CoatFluxTrainer(HostTrainer):
    """ai-toolkit's trainer with the `coat:` block of its process entry applied."""

    coat: Any = None
    _phases: Any = None
    _continuation: Continuation | None = None  # if set, saves are whole sets
    _training: TrainingLoop | None = None
    _held_out: HeldOutPhotos | None = None
    _full: FullModel | None = None
    _live: Any = None
    _team: Any = None
    _begun = False

    def run(self) -> None:
        """Run the job; report what ended it."""
        contract.check_overrides(CoatFluxTrainer, HostTrainer)
        with host.job_scope(), ExitStack() as self._held:
            try:
                super().run()
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, Exception) and not first_to_fail():
                    raise SystemExit(EXIT_OTHER) from error  # the first one says why
                if self._phases is not None:
                    explain_end(error, self)
                raise

    def hook_before_model_load(self) -> None:
        """Check what needs no model; find the save to resume from."""
        super().hook_before_model_load()

        keep_streams()
        host.lines.restart(verbose=bool((self.get_conf("logging", None) or {}).get("verbose")))
        host.show_logs()
        self._team = Team(self.accelerator)
        accumulates = inspect.signature(HostTrainer.train_single_accumulation)
        self._team.averages = "accum_scale" in accumulates.parameters
        with self._team.in_turn():
            provide_embedded(self.model_config.name_or_path)
        files = [word for word in sys.argv[1:] if word.endswith((".yaml", ".yml", ".json", ".jsonc"))]
        self._config_file = files[0] if len(files) == 1 else os.path.join(self.save_root, "config.yaml")
        self._check_job()
        self.coat = coat_of_entry(self.config, self._config_file)
        folder = Path(self.save_root)
        if not self.coat.enabled:
            require_readable(folder, self.train_config.optimizer)
            info("coat.enabled=false: this is ai-toolkit's own run")
            self._phases = None  # of the instance, for `run` reads it
            self.__class__ = HostTrainer  # from here on
            return
        contract.check_start(self, install_optimizer, install_quantizer)
        version = host.ai_toolkit_version()
        if not version.startswith(host.TESTED_SERIES):
            info(f"note: ai-toolkit {version} is not tested with COAT-FLUX, {host.TESTED_VERSION} is")
        for note in gpu_notes(self.device_torch):
            info(f"note: {note}")
        if self._team.is_main:
            self._held.enter_context(run_lock(folder))
        with self._team.in_turn():
            self._held_out = check_photos(self)
            self._continuation = find_continuation(self)
            require_readable(folder, self.train_config.optimizer)
        if self._continuation is not None:
            self._continuation.seed = self._team.from_main(self._continuation.seed)
        if self._team.is_main:
            host.lines.open(folder)
        self._live = self._held.enter_context(live_run(self))
        state = None if self._continuation is None else self._continuation.state
        saved = {} if state is None else state.record["path"]
        self.coat = config_for(self.device_torch, self.coat, linear_sizes(self.config), saved)
        host.config = self.coat
        choose_at_load(self)
        is_compiled = bool(getattr(self.model_config, "compile", False))
        memory_file = folder / MEMORY_FILE if self._team.is_main else None
        self._phases = PhaseTracker(self.device_torch, memory_file, counts=not is_compiled)
        self._held.callback(self._phases.close)
        self._phases.enter("load")

    def _check_job(self) -> None:
        """Check the whole job as `coat-flux check` does: ai-toolkit accepts unknown and ineffective keys."""
        import toolkit

        # the process has changed its own entry since
        raw = load_job_yaml(os.path.join(self.save_root, "config.yaml"))
        root = Path(next(iter(toolkit.__path__))).parent
        place = {"file": self._config_file, "trainer": "ai-toolkit", "toolkit_root": root}
        findings = check_job_dict(raw, **place, num_processes=self.accelerator.num_processes)
        if all(finding.severity != "error" for finding in findings):
            findings += check_models(raw, **place)
        errors = [finding for finding in findings if finding.severity == "error"]
        for finding in findings:
            if finding not in errors:
                info(f"note: {finding.line()}")
        if shares_weights(os.environ):
            raise LaunchError(f"accelerate launch with FSDP: inside ai-toolkit each process holds the model; {DDP}")
        require_launch(os.environ)
        if errors:
            raise ConfigError(errors)

    def _job_config(self) -> Any:
        entry = copy.deepcopy(dict(self.config))
        raw = {"job": "extension", "config": {"name": self.job.name, "process": [entry]}}
        return job_for_plan(raw, self._config_file)

    def hook_after_model_load(self) -> None:
        """Convert remaining linears; prepare the blocks."""
        super().hook_after_model_load()

        contract.check_model(self.sd)
        if self._continuation is not None and self.network_config is None:
            self._full = FullModel(self)
        trained = () if self._full is None else self._full.linears
        if self.coat.weight.use_fp8:
            convert_model(self, self._text_encoders(), trained)
        else:
            host.let_lora_find("FP8TrainableLinear")
        self._report = apply_coat(
            self.sd.unet,
            self.coat,
            allow_recompute=bool(self.train_config.gradient_checkpointing),
            device=self.device_torch,
            trained=trained,
        )
        runner = BlockRunner.of(self.sd.unet)
        if runner.gemms is not None:
            runner.gemms.image_tokens = largest_side(self.config) ** 2 // PIXELS_PER_TOKEN
        if self.coat.memory.stream_blocks == "auto":
            with suppress(ConfigError, *UNPROBED):  # a model that `plan` cannot size
                runner.expect(reserve_bytes=outside_bytes(JobFacts(self._job_config())))  # for sampling
        self._phases.held.add("transformer", self.sd.unet)
        self._phases.hold_models(getattr(self.sd, "vae", None), self._text_encoders())

    def _text_encoders(self) -> list[Any]:
        encoders = self.sd.text_encoder
        if not isinstance(encoders, list):
            encoders = [encoders]
        return [encoder for encoder in encoders if encoder is not None]

    def hook_add_extra_train_params(self, params: Any) -> Any:
        """Attach adapters to their FP8 linears, or choose trained parameters."""
        params = super().hook_add_extra_train_params(params)
        if self._full is not None:
            return self._full.param_groups(self.train_config.lr)
        if self.network is None:
            return params
        # sampling would merge the LoRA into a base without bf16 weights, or let one with them drift
        self.network.can_merge_in = False
        self._team.share(self.network.parameters())
        if self.network_config.type.lower() == "lora":
            contract.check_network(self.network)
            attach_lora(self.network, self.coat)
        return params

    def before_dataset_load(self) -> None:
        """Seed the order of the data."""
        super().before_dataset_load()
        self._phases.enter("cache")
        if self._held_out is not None:
            self._held_out.encode()
        if self._continuation is not None:
            self._held.callback(self._continuation.close)
            self._continuation.begin_loading()

    def hook_before_train_loop(self) -> None:
        """Check optimizer and resume; print the start table."""
        contract.check_data(self)
        if self._continuation is not None:
            self._continuation.end_loading()
        self._report.add_row("optimizer", *check_optimizer(self))
        if gain := gain_of_auto(self.coat, card_of(self.device_torch)):
            self._report.add_row("weights", self.coat.weight.format, self.coat.weight.format, measured=gain)
        with ExitStack() as stack:
            stack.enter_context(self._team.unwrapped(self))
            if self._full is not None:
                # accelerate would move a whole model's state to the GPU and load it from there
                stack.enter_context(patched(self.optimizer, state_dict=dict, load_state_dict=lambda state: None))
            super().hook_before_train_loop()
        if self._continuation is not None:
            self._continuation.restore()
            self._continuation.saves.check_room(self)
        self._training = TrainingLoop(self)
        info(f"blocks, as planned:\n{self._report.table()}")
        self._phases.enter("step")

    def hook_train_loop(self, batch: Any) -> Any:
        """Run ai-toolkit's step, watched."""
        if not self._begun:  # the first step, after the first samples
            if self._full is not None:
                self._full.begin(self, self._training.watch)
            if self._continuation is not None:
                self._continuation.restore_draws()
            if self._held_out is not None and self._training.done == 0:
                self._training.validate()
            self._training.redraw()
            self._begun = True
        return self._training.step(lambda: super(CoatFluxTrainer, self).hook_train_loop(batch))

    def train_single_accumulation(self, batch: Any, **kwargs: Any) -> Any:
        """Seed by the micro-batch's number."""
        self._training.begin_micro_batch()
        return super().train_single_accumulation(batch, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> None:
        """Sample without effect on training."""
        try:
            if self._training is not None and self._training.stops:
                raise SamplingStopped
            every_process = patched(type(self.accelerator), is_main_process=True)
            with self._phases.during("sample"), kept_draws(), every_process:
                super().sample(*args, **kwargs)
        except SamplingStopped:
            info("samples are left out: the run ends here")
            if self.ema is not None:
                self.ema.train()
            if not self._begun:
                self._training.end_step()  # ai-toolkit would begin with a step
        self._team.wait()

    def post_process_generate_image_config_list(self, images: list[Any]) -> list[Any]:
        """Leave images to the other processes."""
        return self._team.share_of(super().post_process_generate_image_config_list(images))

    def sample_step_hook(self, *args: Any, **kwargs: Any) -> None:
        """Called after each sample."""
        super().sample_step_hook(*args, **kwargs)
        if self._training is not None and self._training.stops:
            raise SamplingStopped

    def maybe_stop(self) -> None:
        """Delay a stop until the end of the step."""
        if self._training is None:
            super().maybe_stop()
            return
        is_asked = self.should_stop() or self.should_return_to_queue()
        if is_asked and self.is_ui_trainer and not self._training.stops:
            self._training.ask_to_stop("the web UI")

    def end_step_hook(self) -> None:
        """Stop here, if asked to."""
        super().end_step_hook()
        self._training.end_step()

    def save(self, step: int | None = None) -> None:
        """Save a whole set, or as ai-toolkit does."""
        with self._phases.during("save"):
            self._training.save(step, super().save)

    def update_training_metadata(self) -> None:
        """Add the layers' formats, and correct the steps: ai-toolkit may be one behind."""
        super().update_training_metadata()
        self.add_meta(OrderedDict(self._report.metadata()))
        if self._continuation is not None:
            self.meta["training_info"]["step"] = self._training.done

    def done_hook(self) -> None:
        """Print the summary."""
        super().done_hook()

        finish(self._phases, self._job_config, detail if self.coat.memory.log_memory_stats else None)
        peak = self._phases.peak / GB
        skipped = self._training.watch.guard.skipped
        skips = f", {skipped} updates skipped" if skipped else ""
        if self._held_out is not None:
            info(describe_lowest(self._held_out.curve, Path(self.save_root), self.job.name))
            for line in () if self._held_out.redrawn is None else self._held_out.redrawn.best():
                info(line)
        info(f"done: {self.step_num} steps{skips}, peak memory {peak:.2f}GB, files in {self.save_root}")
