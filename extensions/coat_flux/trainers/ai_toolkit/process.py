"""Process type `coat_flux_trainer`: ai-toolkit's own trainer with COAT applied at its hooks.

    hook_before_model_load        check the whole job, ai-toolkit and the photos; find the save to go on from
    hook_after_model_load         FP8 linears (unless they were made at load), checkpoint policy
    hook_add_extra_train_params   the LoRA network is complete: adapters share the FP8 input of their base linear;
                                  without `network:` what of the transformer is trained (`full`)
    before_dataset_load           the order of the data comes from the run's seed
    hook_before_train_loop        the optimizer is the right one and a resume really happened; the start table
    hook_train_loop               a step, watched and guarded (`loop`)
    calculate_loss, ...           the loss as computed, before ai-toolkit turns NaN into 0
    save                          a whole set or none (`saves`), with all that a resume needs (`resume`)
    maybe_stop                    the web UI's stop waits for the end of the step
    end_step_hook                 Ctrl+C, that stop, or a closed terminal end the run here
    done_hook                     summary, memory report

`coat.enabled: false` leaves every one of them to ai-toolkit.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

try:
    from extensions_built_in.sd_trainer.DiffusionTrainer import DiffusionTrainer as HostTrainer
except ImportError:
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer as HostTrainer

from ...base import streams as steady
from ..processes import EXIT_OTHER, first_to_fail
from .common import AIToolkitError, detail, info, job_scope, load_core, run_lines, set_active, show_logs
from .contract import HOOKS, check_host, check_network, let_lora_find, untested_version
from .full import FullModel
from .loop import TrainingLoop, end_with, live_run
from .optimizer import check_optimizer, states_left_alone
from .preflight import check_job, check_photos, config_file, leave_room
from .quantizer import choose_at_load, convert_model, damaged_linears
from .resume import Continuation, find_continuation, kept_draws
from .team import Team
from .validation import HeldOutPhotos

__all__ = ["CoatFluxTrainer"]


class SamplingStopped(Exception):
    """Raised between two samples, and caught around all of them: the run is to end."""


class CoatFluxTrainer(HostTrainer):
    """ai-toolkit's trainer with the `coat:` block of its process entry applied."""

    coat: Any = None
    _phases: Any = None
    _continuation: Continuation | None = None
    _training: TrainingLoop | None = None
    _lock: ExitStack | None = None
    _held_out: HeldOutPhotos | None = None
    _full: FullModel | None = None
    _live: Any = None
    _begun = False
    _team: Any = None

    def run(self) -> None:
        """Run the job; what it left for the optimizer and the qtype is forgotten afterwards."""
        absent = [name for name in HOOKS if not hasattr(HostTrainer, name)]
        if absent:
            raise AIToolkitError(f"{HostTrainer.__name__} has no {', '.join(absent)}")
        with job_scope():
            try:
                super().run()
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, Exception) and not first_to_fail():
                    raise SystemExit(EXIT_OTHER) from error  # the first one says why
                if self._phases is not None:
                    end_with(error, self, self._job_config)
                raise
            finally:
                for part in (self._training, self._continuation, self._phases):
                    if part is not None:
                        part.close()
                if self._lock is not None:
                    self._lock.__exit__(*sys.exc_info())

    @property
    def _on(self) -> bool:
        return self.coat is not None and self.coat.enabled

    @property
    def _sets(self) -> bool:
        """Whether saves are whole sets with all a resume needs: those of a LoRA, or of the transformer, alone."""
        return self._continuation is not None

    # -- before the model ------------------------------------------------------------------------------------------

    def hook_before_model_load(self) -> None:
        """Read and check everything that needs no model."""
        super().hook_before_model_load()
        load_core()
        from ...blocks.gemms import config_for
        from ...config.full_rules import coat_of_entry
        from ...mini_flux.folder import provide_embedded
        from ...saves.lock import run_lock
        from ...watch.phases import MEMORY_FILE, PhaseTracker

        steady.keep_streams()
        show_logs()
        file = config_file(self.save_root)
        self._team = Team(self.accelerator)
        self._team.begin(HostTrainer)
        with self._team.in_turn():
            provide_embedded(self.model_config.name_or_path)
        check_job(self)
        self.coat = coat_of_entry(self.config, file)
        if not self._on:
            info("[coat] coat.enabled=false: this is ai-toolkit's own run")
            return
        check_host(HostTrainer)
        if (line := untested_version()) is not None:
            info(f"[coat] note: {line}")
        self._lock = ExitStack()
        if self._team.is_main:
            self._lock.enter_context(run_lock(Path(self.save_root)))
        lines = self._lock.enter_context(run_lines(verbose=bool((self.get_conf("logging", None) or {}).get("verbose"))))
        with self._team.in_turn():
            self._held_out = check_photos(self)
            self._continuation = find_continuation(self)
        if self._sets:
            self._continuation.seed = self._team.from_main(self._continuation.seed)
        if self._team.is_main:
            lines.open(Path(self.save_root))
        self._live = self._lock.enter_context(live_run(self))
        self.coat = config_for(self.device_torch, self.coat)
        set_active(self.coat)
        choose_at_load(self)
        compiled = bool(getattr(self.model_config, "compile", False))
        path = Path(self.save_root) / MEMORY_FILE if self._team.is_main else None
        self._phases = PhaseTracker(self.device_torch, path, counts=not compiled)
        self._phases.enter("load")

    # -- the model and its adapters --------------------------------------------------------------------------------

    def hook_after_model_load(self) -> None:
        """Convert the linears, unless loading did, and set what blocks keep for backward."""
        super().hook_after_model_load()
        if not self._on:
            return
        from ...blocks.apply import apply_coat
        from ...blocks.held import module_tensors

        if self._sets and self.network_config is None:
            self._full = FullModel(self)
        trained = () if self._full is None else self._full.linears
        if self.coat.weight.use_fp8:
            convert_model(self, self._text_encoders(), trained)
        else:
            let_lora_find("FP8TrainableLinear")
        self._report = apply_coat(
            self.sd.unet,
            self.coat,
            allow_recompute=bool(self.train_config.gradient_checkpointing),
            device=self.device_torch,
            trained=trained,
        )
        leave_room(self)
        self._phases.hold("transformer", self.sd.unet, module_tensors)
        self._phases.hold_models(getattr(self.sd, "vae", None), self._text_encoders())

    def _text_encoders(self) -> list[Any]:
        encoders = self.sd.text_encoder
        return [e for e in (encoders if isinstance(encoders, list) else [encoders]) if e is not None]

    def hook_add_extra_train_params(self, params: Any) -> Any:
        """Let the adapters share the FP8 input of their base linears; without them choose what is trained."""
        params = super().hook_add_extra_train_params(params)
        if self._full is not None:
            return self._full.param_groups(self.train_config.lr)
        if not self._on or self.network is None:
            return params
        # sampling would merge the LoRA into a base that holds no bf16 weight, or drift one that does
        self.network.can_merge_in = False
        self._team.share(self.network.parameters())
        if self.network_config.type.lower() == "lora":
            from ...blocks.lora import attach_lora

            check_network(self.network)
            attach_lora(self.network, self.coat)
        return params

    # -- the data --------------------------------------------------------------------------------------------------

    def before_dataset_load(self) -> None:
        """Loading ends, caching begins; from here the run's seed decides on the order of the data."""
        super().before_dataset_load()
        if self._on:
            self._phases.enter("cache")
        if self._held_out is not None:
            self._held_out.encode()
        if self._sets:
            self._continuation.begin_loading()

    # -- the loop --------------------------------------------------------------------------------------------------

    def hook_before_train_loop(self) -> None:
        """Check the optimizer and a resume; print the start table."""
        if self._sets:
            self._continuation.end_loading()
        if self._on:
            self._report.add_row("optimizer", *check_optimizer(self))
            with self._team.unwrapped(self), states_left_alone(self):
                super().hook_before_train_loop()
        else:
            super().hook_before_train_loop()
        if self._sets:
            self._continuation.restore()
            self._continuation.saves.check_room(self)
        if self._on:
            self._training = TrainingLoop(self, self._continuation, self._job_config)
            info(self._report.brief())
            detail(self._report.table())
            self._phases.enter("step")

    def hook_train_loop(self, batch: Any) -> Any:
        """Run ai-toolkit's step, watched."""
        if not self._on:
            return super().hook_train_loop(batch)
        if not self._begun:
            self._begin()
        return self._training.step(lambda: super(CoatFluxTrainer, self).hook_train_loop(batch))

    def _begin(self) -> None:
        """Once, after the first samples: casts made by sampling did not reach codes or scales; draws go on."""
        damaged = damaged_linears(self.sd.unet)
        if damaged:
            raise AIToolkitError(
                f"codes or scales of {len(damaged)} linears changed their dtype while sampling ({damaged[0]})"
            )
        if self._full is not None:
            self._full.begin(self, self._training.watch)
        if self._sets:
            self._continuation.restore_draws()
        if self._held_out is not None and self._training.done == 0:
            self._training.validate()
        self._begun = True

    def train_single_accumulation(self, batch: Any) -> Any:
        """Draw for the micro-batch by its number, where a step has several."""
        if self._on:
            self._training.begin_micro_batch()
        return super().train_single_accumulation(batch)

    def calculate_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Record the loss as computed."""
        return self._recorded(super().calculate_loss(*args, **kwargs))

    def get_guided_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Record the loss as computed."""
        return self._recorded(super().get_guided_loss(*args, **kwargs))

    def get_mean_flow_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Record the loss as computed."""
        return self._recorded(super().get_mean_flow_loss(*args, **kwargs))

    def _recorded(self, loss: Any) -> Any:
        return self._training.facts.record(loss) if self._training is not None else loss

    def sample(self, *args: Any, **kwargs: Any) -> None:
        """Let ai-toolkit sample; the random numbers of the training go on as if it had not."""
        if not self._on:
            super().sample(*args, **kwargs)
            return
        try:
            self._leave_samples_out()
            with self._phases.during("sample"), kept_draws(), self._team.all_sample(self):
                super().sample(*args, **kwargs)
        except SamplingStopped:
            info("[coat] samples are left out: the run ends here")
            if self.ema is not None:
                self.ema.train()  # back from the average, which is what is sampled
            if not self._begun:
                self._training.end_step()  # nothing was trained; ai-toolkit would begin with a step
        self._team.wait()

    def post_process_generate_image_config_list(self, images: list[Any]) -> list[Any]:
        """Leave images to the other processes."""
        images = super().post_process_generate_image_config_list(images)
        return self._team.share_of(images) if self._on else images

    def sample_step_hook(self, *args: Any, **kwargs: Any) -> None:
        """Called after each sample."""
        super().sample_step_hook(*args, **kwargs)
        if self._on:
            self._leave_samples_out()

    def _leave_samples_out(self) -> None:
        if self._training is not None and self._training.stops:
            raise SamplingStopped

    def maybe_stop(self) -> None:
        """Let a stop or a return to the queue, asked for in the web UI, wait for the end of the step and its save."""
        if self._training is None:
            super().maybe_stop()
        elif self.is_ui_trainer and not self._training.stops and (self.should_stop() or self.should_return_to_queue()):
            self._training.ask_to_stop("the web UI")

    def stop_as_asked(self) -> None:
        """Tell the web UI that the run has stopped, as ai-toolkit does.

        Raises:
            Exception: ai-toolkit's, where the web UI asked.
        """
        if hasattr(HostTrainer, "maybe_stop"):
            super().maybe_stop()

    def end_step_hook(self) -> None:
        """Let an interrupt, or the web UI's stop, end the run."""
        super().end_step_hook()
        if self._on:
            self._training.end_step()

    # -- saves -----------------------------------------------------------------------------------------------------

    def save(self, step: int | None = None) -> None:
        """Save as a whole set."""
        if not self._on:
            super().save(step)
            return
        if self._sets and step is not None and self._training.puts_off_save():
            return
        with self._phases.during("save"):
            self._training.check_lora(last=step is None)
            if self._sets:
                self._training.save(lambda folder: self._save_into(folder, step))
                super().clean_up_saves()
                if self._team.is_main:
                    super().post_save_hook(os.path.join(self.save_root, "optimizer.pt"))
                if step is not None:  # the last one is the main process's alone
                    self._team.wait()
                self.last_save_step = self._training.done  # what the web UI shows once the run has stopped
            else:
                super().save(step)

    def _save_into(self, folder: Path, step: int | None) -> None:
        root, self.save_root = self.save_root, str(folder)
        try:
            super().save(step)
        finally:
            self.save_root = root

    def clean_up_saves(self) -> Any:
        """Called in the middle of ai-toolkit's save: wait until the set is committed."""
        return None if self._sets else super().clean_up_saves()

    def post_save_hook(self, save_path: str) -> None:
        """As `clean_up_saves`."""
        if not self._sets:
            super().post_save_hook(save_path)

    def update_training_metadata(self) -> None:
        """Add what the layers got."""
        super().update_training_metadata()
        if self._on:
            self.add_meta(OrderedDict(self._report.metadata()))

    def get_training_info(self) -> Any:
        """Count the steps that are done: ai-toolkit says one less in a save between two steps."""
        info = super().get_training_info()
        if self._sets:
            info["step"] = self._training.done
        return info

    # -- the end ---------------------------------------------------------------------------------------------------

    def done_hook(self) -> None:
        """Print the summary."""
        super().done_hook()
        if self._on:
            from ...base.text import GB
            from ...watch.memory_report import finish

            finish(self._phases, self._job_config, info, detail if self.coat.memory.log_memory_stats else None)
            peak = self._phases.peak / GB
            skipped = self._training.watch.guard.skipped
            left_out = f", {skipped} updates skipped" if skipped else ""
            if self._held_out is not None:
                from ...data.hold_out import describe_lowest

                info(f"[coat] {describe_lowest(self._held_out.curve, Path(self.save_root), self.job.name)}")
            info(f"[coat] done: {self.step_num} steps{left_out}, peak memory {peak:.2f}GB, files in {self.save_root}")

    def _job_config(self) -> Any:
        """The job as `coat-flux plan` reads it; ConfigError where it has what the stand-alone trainer refuses."""
        from ...config.job import JobConfig

        raw = {"job": "extension", "config": {"name": self.job.name, "process": [copy.deepcopy(dict(self.config))]}}
        return JobConfig.from_dict(raw, file=config_file(self.save_root))
