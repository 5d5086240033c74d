"""Takes a run up where its last save left it, so that it ends as if it had never stopped.

    hook_before_model_load   `find`: repair the folder, read the newest state, refuse what would be another run
    before_dataset_load      `begin_loading`: photos are grouped into batches by the run's seed
    hook_before_train_loop   `restore`: raw LoRA, EMA, step, place in the data; a whole model is as it was saved
    first hook_train_loop    `restore_draws`: random generators and lr schedule, which ai-toolkit still moves until then

One number is set otherwise than ai-toolkit does: `start_step`, at which it neither saves nor samples, is the step
before the first new one, so that a resumed run saves and samples where the uninterrupted one does.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .common import AIToolkitError, info
from .data_order import LOADING, ResumableLoader, fingerprint, make_resumable, seeded
from .saves import Saves

if TYPE_CHECKING:
    from ...saves.state import RunState

__all__ = ["Continuation", "find_continuation", "identity_of", "kept_draws"]

NETWORK = ("type", "linear", "conv", "transformer_only", "network_kwargs")
BATCH = ("batch_size", "gradient_accumulation")
HOW_NOT_WHAT = ("num_workers", "prefetch_factor", "dataset_path")  # of a data set: how it is read; caches besides
COUNTERS = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
LOADERS = {"data": "data_loader", "regularization": "data_loader_reg"}


@contextmanager
def kept_draws() -> Iterator[None]:
    """Let the random generators go on after the block as if it had not been."""
    from ...saves.rng import rng_state, set_rng_state

    draws = rng_state()
    try:
        yield
    finally:
        set_rng_state(draws)


def find_continuation(process: Any) -> Continuation | None:
    """Find the save a run resumes from.

    Args:
        process: built and checked, nothing loaded.

    Returns:
        The run's place; None where more than a LoRA, or than the transformer itself, is trained: then ai-toolkit saves
        and resumes by itself.

    Raises:
        ResumeError: there is a save that this run cannot go on from.
    """
    others = (process.embed_config, process.adapter_config, process.decorator_config)
    merges = process.network_config is not None and process.train_config.merge_network_on_save
    if merges or any(others):
        info("[coat] note: more than a LoRA is trained: saves and resumes are ai-toolkit's own")
        return None
    continuation = Continuation(process, identity_of(process))
    continuation.find(process.coat.resume.allow)
    return continuation


class Continuation:
    """The place of a run: found at its start, kept for each save.

    Args:
        process: the running process.
        identity: of the run as configured now.

    Attributes:
        saves: the run's committed saves.
        seed: of the order of the data.
        state: of the save the run resumes from; None for a new run.
    """

    def __init__(self, process: Any, identity: dict[str, Any]):
        self._process = process
        self._identity = identity
        self._loading = ExitStack()
        self._order: dict[str, str] = {}
        self.saves = Saves(Path(process.save_root), process.job.name, process.save_config.save_every)
        self.seed = random.getrandbits(63)
        self.state: RunState | None = None

    # -- before the model ------------------------------------------------------------------------------------------

    def find(self, allow: tuple[str, ...]) -> None:
        """Look for the save to go on from.

        Args:
            allow: `coat.resume.allow`.

        Raises:
            ResumeError: there is one, of what would be another run, or it is damaged.
        """
        from ...saves.state import AI_TOOLKIT, RunState

        folder = self.saves.newest()
        state = None if folder is None else RunState.read(folder, AI_TOOLKIT)
        if state is None:
            if self._process.network_config is None:
                self._refuse_others()
            elif folder is not None:
                info(f"[coat] note: {folder} is the stand-alone trainer's: order of data and random numbers start over")
            return
        self._check_identity(state, allow)
        self.state = state
        if self._same_seed():
            self.seed = state.record["seed"]

    def _refuse_others(self) -> None:
        """Whole models are resumed by the trainer that saved them: what they were made from is not known here."""
        from ...saves.errors import ResumeError

        other = self._process.get_latest_save_path()
        if other is not None:
            raise ResumeError(
                f"{other}: is not a save of this trainer, and full fine-tuning resumes from its own; choose another "
                "config.name to start a new run (all that is in this folder stays)"
            )

    def _check_identity(self, state: RunState, allow: tuple[str, ...]) -> None:
        from ...saves.errors import ResumeError
        from ...saves.identity import require_same_run

        for note in require_same_run(state.record["identity"], self._identity, allow, state.folder):
            info(f"[coat] resume: {note}")
        start = self._process.train_config.start_step
        if start is not None:
            raise ResumeError(f"train.start_step={start}: the run resumes after step {state.step}; remove the key")

    def _same_seed(self) -> bool:
        return self.state is not None and self.state.record["identity"]["seed"] == self._identity["seed"]

    # -- the data --------------------------------------------------------------------------------------------------

    def begin_loading(self) -> None:
        """Let what is drawn while the data sets are loaded, and latents cached, come from the run's seed."""
        device = self._process.device_torch
        if device.type == "cuda":
            self._loading.enter_context(torch.random.fork_rng([device]))
            torch.cuda.manual_seed(self.seed)
        self._loading.enter_context(seeded(self.seed, LOADING))

    def end_loading(self) -> None:
        """Put the random generators back and take over the order of the data."""
        self._loading.close()
        team = self._process._team
        for number, (name, attribute) in enumerate(LOADERS.items()):
            loader = getattr(self._process, attribute)
            if loader is not None:
                self._order[name] = fingerprint(loader)
                if self._order[name] != team.from_main(self._order[name]):
                    raise AIToolkitError("the processes put the photos into batches in different ways")
                resumable = make_resumable(loader, self.seed ^ number, team.rank, team.size)
                setattr(self._process, attribute, resumable)

    def close(self) -> None:
        """End the loader processes; put the random generators back if loading failed."""
        self._loading.close()
        for loader in self._loaders().values():
            if isinstance(loader, ResumableLoader):
                loader.close()

    def _loaders(self) -> dict[str, ResumableLoader]:
        found = {name: getattr(self._process, attribute) for name, attribute in LOADERS.items()}
        return {name: loader for name, loader in found.items() if loader is not None}

    # -- back ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put back what the loop begins with.

        Raises:
            ResumeError: ai-toolkit took up another save, or the state does not fit the network.
        """
        if self.state is None:
            return
        from ...saves.errors import ResumeError
        from ...saves.state import keep_execution, restore_tensors

        process, state = self._process, self.state
        if process.step_num != state.step:
            raise ResumeError(f"ai-toolkit is at step {process.step_num}, the newest save is of step {state.step}")
        process.start_step = state.step - 1
        process.epoch_num = state.record["epoch"]
        if process.network is not None:
            restore_tensors(dict(process.network.named_parameters()), state.lora(), state.folder)
        average = state.ema()
        if process.ema is not None and average is not None:
            restore_tensors(_numbered(process.ema.shadow_params), average, state.folder)
        elif process.ema is not None:
            info("[coat] resume: no average was kept so far (train.ema_config); it begins with the LoRA as it is")
            parameters = (p for group in process.optimizer.param_groups for p in group["params"])
            process.ema.shadow_params = [p.detach().clone() for p in parameters]
        self._restore_place(state)
        keep_execution(process.sd.unet, state.record["path"])
        info(f"[coat] resume: continues after step {state.step}, epoch {process.epoch_num + 1}, all states restored")

    def _restore_place(self, state: RunState) -> None:
        for name, loader in self._loaders().items():
            place = state.record["data"].get(name)
            if place is None or place["order"] != self._order[name]:
                info(f"[coat] note: the photos ({name}) are others or are listed in another order: not bit for bit")
            if place is not None:
                loader.epoch, loader.taken = place["epoch"], place["taken"]

    def restore_draws(self) -> None:
        """Put back random generators and lr schedule, when nothing of ai-toolkit's start comes any more."""
        if self.state is None:
            return
        from ...saves.rng import set_rng_state

        _restore_schedule(self._process.lr_scheduler, self.state.record["lr_scheduler"])
        if self._same_seed():
            set_rng_state(self.state.rng())

    # -- a save ----------------------------------------------------------------------------------------------------

    def write_state(self, folder: Path, step: int, guard: dict[str, Any], held_out: list[tuple[int, float]]) -> None:
        """Write the state into the folder of a set.

        Args:
            folder: of the set.
            step: steps done.
            guard: counters of the guard.
            held_out: losses on photos held out, by steps done.
        """
        from ...saves.rng import rng_state
        from ...saves.state import AI_TOOLKIT, RunState, execution_of

        process = self._process
        scheduler = getattr(process.lr_scheduler, "scheduler", process.lr_scheduler)
        record = {
            "step": step,
            "epoch": process.epoch_num,
            "seed": self.seed,
            "data": {
                name: {"epoch": loader.epoch, "taken": loader.taken, "order": self._order[name]}
                for name, loader in self._loaders().items()
            },
            "path": execution_of(process.sd.unet),
            "lr_scheduler": _plain(scheduler.state_dict()),
            "guard": guard,
            "held_out_loss": held_out,
            "identity": self._identity,
        }
        ema = None if process.ema is None else _numbered(process.ema.shadow_params)
        raw = {} if process.network is None else dict(process.network.named_parameters())
        RunState.write(folder, AI_TOOLKIT, record, raw, ema, rng_state())


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Averages, which are in the order of the optimizer's parameters, under the names they are saved with."""
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _restore_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Put an lr schedule back to where it stopped, if it is the same one.

    A schedule with other settings (the config was changed) stays as ai-toolkit put it: at its own place for this step.

    Args:
        scheduler: of torch, with or without accelerate's wrapper.
        saved: `_plain(state_dict())` of the saved run's.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    now = _plain(inner.state_dict())
    if {**now, **dict.fromkeys(COUNTERS)} != {**saved, **dict.fromkeys(COUNTERS)}:
        if now["_last_lr"] != saved["_last_lr"]:
            info(f"[coat] resume: lr is {now['_last_lr']} by the changed schedule, not {saved['_last_lr']}")
        return
    inner.load_state_dict({**inner.state_dict(), **saved})
    for group, lr in zip(inner.optimizer.param_groups, saved["_last_lr"], strict=True):
        group["lr"] = lr


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that JSON keeps as they are: numbers, strings, and lists of them."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, list):
            return all(is_plain(item) for item in value)
        return value is None or isinstance(value, (bool, int, float, str))

    return {key: value for key, value in values.items() if is_plain(value)}


# -- which run this is -------------------------------------------------------------------------------------------------


def identity_of(process: Any) -> dict[str, Any]:
    """The identity of a run inside ai-toolkit, so that a resume that would be another run is refused.

    The seed is the config's, or that of run.py; None where each start draws its own. A data set that reads a list of
    files has no folder to look into.

    Args:
        process: built, nothing loaded.
    """
    from ...saves.identity import run_identity

    network, train = process.network_config, dict(process.get_conf("train", {}))
    seed, given = process.training_seed, os.environ.get("SEED", "")
    if seed is None and given.lstrip("-").isdigit():
        seed = int(given)
    held_out, datasets = getattr(process, "_held_out", None), []
    for entry in process.get_conf("datasets", None) or []:
        place = entry.get("dataset_path") or entry["folder_path"]
        if os.path.isdir(place):
            kept = {k: v for k, v in entry.items() if k not in HOW_NOT_WHAT and not k.startswith("cache_")}
            names = [] if held_out is None else held_out.names.get(place, [])
            datasets.append({**kept, "folder_path": place, "held_out": names})
    return run_identity(
        model=process.model_config.name_or_path,
        datasets=datasets,
        network={"linear": None, "include": process.coat.include, "exclude": process.coat.exclude}
        if network is None
        else {key: getattr(network, key) for key in NETWORK},
        seed=seed,
        world_size=process.accelerator.num_processes,
        batch={key: getattr(process.train_config, key) for key in BATCH},
        coat=dataclasses.asdict(process.coat),
        train={key: value for key, value in train.items() if key not in BATCH},
    )
