"""Saves of ai-toolkit as whole sets, and bit-exact resumes from them.

ai-toolkit neither saves nor samples at its `start_step`: here the step before the first new one.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import os
import random
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.names import COAT_OPTIMIZER
from ...base.rng import rng_state, set_rng_state
from ...config.findings import ConfigError
from ...export.lora_files import check_export
from ...plan.job import save_space
from ...saves.commit import commit, damage, newest_set, require_room, set_step
from ...saves.errors import ResumeError
from ...saves.repair import MODEL_META, repair, step_of, way_back
from ...saves.state import (
    AI_TOOLKIT,
    OPTIMIZER_FILE,
    REMEDY,
    RunState,
    execution_of,
    keep_execution,
    require_same_optimizer,
    require_same_run,
    restore_tensors,
    run_identity,
)
from ...watch.guard import WINDOW
from ..full import check_model
from .data_order import LOADING, ResumableLoader, fingerprint, make_resumable, seeded
from .host import AIToolkitError, info

NETWORK = ("type", "linear", "conv", "transformer_only", "network_kwargs")
BATCH = ("batch_size", "gradient_accumulation")
READING = ("num_workers", "prefetch_factor", "dataset_path", "cache_")  # beginnings of keys: how a data set is read
COUNTERS = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
LOADERS = {"data": "data_loader", "regularization": "data_loader_reg"}
TICKS, TICK_SECONDS = 100, 0.001
START_OVER = "order of data and random numbers start over"


def find_continuation(process: Any) -> Continuation | None:
    """Find the save to resume from; ResumeError if another run's, None if saves are ai-toolkit's own."""
    others = (process.embed_config, process.adapter_config, process.decorator_config)
    merges = process.network_config is not None and process.train_config.merge_network_on_save
    if merges or any(others):
        info("note: more than a LoRA is trained: saves and resumes are ai-toolkit's own")
        return None
    identity = identity_of(process)
    saves = Saves(Path(process.save_root), process.job.name, process.save_config.save_every)
    folder = saves.newest()
    state = None if folder is None else RunState.read(folder, AI_TOOLKIT)
    if state is not None:
        for note in require_same_run(state.record["identity"], identity, process.coat.resume.allow, state.folder):
            info(f"resume: {note}")
        saved_with = state.record["identity"]["train"].get("optimizer", "adamw")
        if saved_with != COAT_OPTIMIZER:  # ai-toolkit would go on without it
            path = state.folder / OPTIMIZER_FILE
            require_same_optimizer(path, saved_with, process.train_config.optimizer)
        start = process.train_config.start_step
        if start is not None:
            raise ResumeError(f"train.start_step={start}: the run resumes after step {state.step}; remove the key")
        return Continuation(process, saves, identity, state)
    other = process.get_latest_save_path() if process.network_config is None else None
    if other is not None:  # the base of a whole model is unknown here
        raise ResumeError(f"{other}: is not a save of this trainer; start a new run: another config.name")
    if folder is not None:
        info(f"note: {folder} is the stand-alone trainer's: {START_OVER}")
    return Continuation(process, saves, identity, None)


class Continuation:
    """The position of a run; `seed` determines the order of the data, `state` is the resumed save's."""

    def __init__(self, process: Any, saves: Saves, identity: dict[str, Any], state: RunState | None):
        self._process = process
        self.saves = saves
        self._identity = identity
        self.state = state
        self._loading = ExitStack()
        self._loaders: dict[str, ResumableLoader] = {}
        self._order: dict[str, str] = {}  # loader → fingerprint
        self._has_same_seed = state is not None and state.record["identity"]["seed"] == identity["seed"]
        self.seed = random.getrandbits(63)  # a resume draws it too, so that later draws are the same
        if self._has_same_seed:
            self.seed = state.record["seed"]

    def begin_loading(self) -> None:
        """Seed the loading of data sets."""
        self._loading.enter_context(seeded(self.seed, LOADING))
        if self._process.device_torch.type == "cuda":
            torch.cuda.manual_seed(self.seed)

    def end_loading(self) -> None:
        """Restore the generators; replace the loaders."""
        self._loading.close()
        team = self._process._team
        for number, (name, attribute) in enumerate(LOADERS.items()):
            loader = getattr(self._process, attribute)
            if loader is None:
                continue
            self._order[name] = fingerprint(loader)
            if self._order[name] != team.from_main(self._order[name]):
                raise AIToolkitError("the processes batch the photos differently")
            self._loaders[name] = make_resumable(loader, self.seed ^ number, team.rank, team.size)
            setattr(self._process, attribute, self._loaders[name])

    def close(self) -> None:
        """End the loader processes; restore the generators."""
        self._loading.close()
        for loader in self._loaders.values():
            loader.close()

    def restore(self) -> None:
        """Restore what the loop starts with."""
        if self.state is None:
            return
        process, state = self._process, self.state
        if process.step_num != state.step:
            raise ResumeError(f"ai-toolkit is at step {process.step_num}, the newest save is of step {state.step}")
        process.start_step = state.step - 1
        process.epoch_num = state.record["epoch"]
        if process.network is not None:
            restore_tensors(dict(process.network.named_parameters()), state.tensors("lora"), state.folder)
        average = state.tensors("ema")
        if process.ema is not None and average is not None:
            averages = {str(index): tensor for index, tensor in enumerate(process.ema.shadow_params)}
            restore_tensors(averages, average, state.folder)
        elif process.ema is not None:
            info("resume: train.ema_config is new, the average starts with the LoRA")
            parameters = (p for group in process.optimizer.param_groups for p in group["params"])
            process.ema.shadow_params = [p.detach().clone() for p in parameters]
        for name, loader in self._loaders.items():
            place = state.record["data"].get(name)
            if place is None or place["order"] != self._order[name]:
                info(f"note: the photos ({name}) or their order changed: not bit for bit")
            if place is not None:
                loader.epoch = place["epoch"]
                loader.taken = place["taken"]
        keep_execution(process.sd.unet, state.record["path"])
        info(f"resume: continues after step {state.step}, epoch {process.epoch_num + 1}, all states restored")

    def restore_draws(self) -> None:
        """Restore random generators, and lr schedule unless its settings changed."""
        if self.state is None:
            return
        wrapped = self._process.lr_scheduler  # by accelerate
        schedule = getattr(wrapped, "scheduler", wrapped)
        saved = self.state.record["lr_scheduler"]
        now = plain_values(schedule)
        uncounted = dict.fromkeys(COUNTERS)
        if {**now, **uncounted} == {**saved, **uncounted}:
            schedule.load_state_dict({**schedule.state_dict(), **saved})
            for group, lr in zip(schedule.optimizer.param_groups, saved["_last_lr"], strict=True):
                group["lr"] = lr
        elif now["_last_lr"] != saved["_last_lr"]:
            info(f"resume: lr is {now['_last_lr']} by the changed schedule, not {saved['_last_lr']}")
        if self._has_same_seed:
            set_rng_state(self.state.tensors("rng"))

    def write_state(self, folder: Path, step: int, guard: dict[str, Any], measured: dict[str, Any]) -> None:
        """Write the state after `step` steps, with what was `measured` of held-out photos, into the folder of a set."""
        process = self._process
        record = {
            "step": step,
            "epoch": process.epoch_num,
            "seed": self.seed,
            "data": {
                name: {"epoch": loader.epoch, "taken": loader.taken, "order": self._order[name]}
                for name, loader in self._loaders.items()
            },
            "path": execution_of(process.sd.unet),
            "lr_scheduler": plain_values(getattr(process.lr_scheduler, "scheduler", process.lr_scheduler)),
            "guard": guard,
            **measured,
            "identity": self._identity,
        }
        ema: dict[str, Tensor] = {}
        lora: dict[str, Tensor] = {}
        if process.ema is not None:  # in the optimizer's order
            ema = {str(index): tensor for index, tensor in enumerate(process.ema.shadow_params)}
        if process.network is not None:
            lora = dict(process.network.named_parameters())
        RunState.write(folder, AI_TOOLKIT, record, lora, ema, rng_state())


def plain_values(schedule: Any) -> dict[str, Any]:
    """What JSON can hold of an lr schedule's state."""
    plain = {}
    for key, value in schedule.state_dict().items():
        items = value if isinstance(value, list) else [value]
        if all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            plain[key] = value
    return plain


def identity_of(process: Any) -> dict[str, Any]:
    """The identity of a run; its seed is None if each start draws one."""
    network = process.network_config
    train = dict(process.get_conf("train", {}))
    seed = process.training_seed
    from_environment = os.environ.get("SEED", "")
    if seed is None and from_environment.lstrip("-").isdigit():
        seed = int(from_environment)
    held_out, datasets = process._held_out, []
    for entry in process.get_conf("datasets", None) or []:
        folder = entry.get("dataset_path") or entry["folder_path"]
        settings = {key: value for key, value in entry.items() if not key.startswith(READING)}
        names = [] if held_out is None else held_out.names.get(folder, [])
        datasets.append({**settings, "folder_path": folder, "held_out": names})
    if network is None:
        targets = {"linear": None, "include": process.coat.include, "exclude": process.coat.exclude}
    else:
        targets = {key: getattr(network, key) for key in NETWORK}
    return run_identity(
        model=process.model_config.name_or_path,
        datasets=datasets,
        network=targets,
        seed=seed,
        world_size=process.accelerator.num_processes,
        batch={key: getattr(process.train_config, key) for key in BATCH},
        coat=dataclasses.asdict(process.coat),
        train={key: value for key, value in train.items() if key not in BATCH},
    )


class Saves:
    """The committed saves of a run, written by ai-toolkit into a staging folder: it would ignore failures."""

    def __init__(self, run_dir: Path, name: str, save_every: int):
        self._dir = run_dir
        self._name = name
        self._apart = min(save_every, WINDOW)
        self._names = f"{glob.escape(name)}*"

    def newest(self) -> Path | None:
        """Repair the folder and return that of the newest set, unless another program saved a later step."""
        for line in repair(self._dir):
            info(line)
        folder = newest_set(self._dir)
        if folder is None:
            return None
        newer = next((path for path in self._dir.glob(self._names) if step_of(path) > set_step(folder)), None)
        if newer is not None:
            info(f"note: {newer.name} is newer than {folder}: {START_OVER}")
            return None
        problem = damage(folder)
        if problem is not None:
            raise ResumeError(f"{problem}; no other state is whole: {REMEDY}")
        self._make_newest(folder)
        return folder

    def commit(self, step: int, write: Callable[[Path], None], apart: int | None = 1) -> Path:
        """Write and publish a set; returns the LoRA or model folder."""
        published: dict[str, str] = {}

        def write_checked(folder: Path) -> None:
            write(folder)
            # a file without torch's directory at its end: writing failed and ai-toolkit continued
            if not zipfile.is_zipfile(folder / OPTIMIZER_FILE):
                raise OSError(errno.EIO, "not written, see above", str(folder / OPTIMIZER_FILE))
            published.update({path.name: path.name for path in folder.iterdir() if path.name != AI_TOOLKIT})

        self._make_newest(commit(self._dir, step, write_checked, published, apart=apart or self._apart))
        published.pop(OPTIMIZER_FILE)
        return self._dir / next(name for name in published if name.startswith(self._name))

    def check_room(self, process: Any) -> None:
        """Warn, or raise SaveError, if the disk has no room for saves."""
        full = process._full
        whole = 0 if full is None else full.size
        parameters = process.network.parameters() if full is None else full.trained.values()
        space = None
        with suppress(ConfigError):  # a job only ai-toolkit can run
            space = save_space(process._job_config(), [parameter.numel() for parameter in parameters], whole)
        for line in require_room(self._dir, space):
            info(f"WARNING: {line}")

    def way_back(self, since: int) -> str:
        """How to continue after a divergence; `since`: the first step in doubt."""
        program = "coat-flux"
        if not shutil.which(program):
            program = f'"{sys.executable}" "{Path(__file__).resolve().parents[2] / "cli"}"'
        command = f'{program} rewind "{self._dir}" --to-step'
        return way_back(
            self._dir,
            since,
            self._apart,
            lambda step: f"go back to step {step} and start the job again: {command} {step}",
        )

    def _make_newest(self, folder: Path) -> None:
        """Change a set's published files last: ai-toolkit resumes from the newest by `getctime`, which links change."""
        places = [self._dir / path.name for path in folder.iterdir()]
        own = [path for path in places if path.exists()]
        others = [path.stat().st_ctime_ns for path in self._dir.glob(self._names) if path not in own]
        newest = max(others, default=0)
        for path in own:
            for _ in range(TICKS):
                os.utime(path)
                if path.stat().st_ctime_ns > newest:
                    break
                time.sleep(TICK_SECONDS)


def read_back(process: Any, folder: Path) -> list[str]:
    """Read back a save; returns log lines. Raises ExportError."""
    if process._full is not None:
        model = next(path.parent for path in folder.glob(f"*/{MODEL_META}"))
        return [check_model(model, process._full.trained)]
    if not process.model_config.is_flux or process.network_config.type.lower() != "lora":
        return ["not read back: not a LoRA of FLUX"]
    if not any(value.any() for name, value in process.network.named_parameters() if "lora_up" in name):
        return ["the LoRA is still zero"]
    return [check_export(path).line() for path in sorted(folder.glob("*.safetensors"))]
