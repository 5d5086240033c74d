"""A run's folder at its start: locked, repaired, or taken back to an earlier state.

One process at a time works in it: a second one would remove what the first is writing. Files in the way of a resume
are moved aside, not deleted, and the returned lines say where:

    <run>/coat/set-aside-000000250/            everything newer than step 250, or damaged; a second time …-250-2
        state-000000500/                       sets (`commit`)
        <name>_000000500.safetensors, ...      LoRAs of later steps, from the run's folder
        metrics.csv, ...                       copies: the run cuts its tables back to the step it resumes from
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from safetensors import SafetensorError, safe_open

from ..base.files import TEMP_PREFIX, remove
from .commit import (
    COAT,
    REPLACED_PREFIX,
    committed_sets,
    damage,
    is_known,
    publish_set,
    published_names,
    replaced_sets,
    set_step,
    state_folder,
)
from .errors import ResumeError, save_errors

LOCK_FILE = Path("coat") / "lock"
LOCKED_BY_ANOTHER = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
MODEL_META = "aitk_meta.yaml"  # in the folder of a whole model; has the step that ai-toolkit resumes from
RECORDS = ("state.json", "aitk/state.json")  # in a set, of either trainer
HEALTHY_GROWTH = 10.0  # of the LoRA's norm since the start; after more, a save is not worth going back to


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock `run_dir` for the block, if its file system can; raises ResumeError if locked, SaveError if read-only."""
    path = run_dir / LOCK_FILE
    with save_errors(run_dir, "the run's folder cannot be made", "nothing was written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # its target would be overwritten
            path.unlink()
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            if sys.platform == "win32":
                import msvcrt

                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not `flock`, which a child process would inherit
        except OSError as error:
            if error.errno in LOCKED_BY_ANOTHER:
                owner = ""
                with suppress(OSError):  # Windows keeps others from reading a locked file
                    pid = path.read_text(encoding="utf-8").strip()
                    owner = f" ({pid})" if pid.isdecimal() else ""
                raise ResumeError(
                    f"{run_dir}: another process{owner} is training in this folder; wait for it, end it, or "
                    "choose another config.name"
                ) from error
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def repair(run_dir: Path) -> list[str]:
    """Repair a run after a killed process or disk damage, in one process, at its start; returns lines for the user.

    Unfinished files are removed. A damaged newest set is moved aside with its LoRA, so that the set before is the
    newest. Published files of the newest set that are missing or damaged are restored. A run that another program
    continued (it has a LoRA of more steps) is left alone. Raises SaveError if the folder is not writable.
    """
    if not run_dir.is_dir():
        return []
    with save_errors(run_dir, "this folder cannot be repaired", "its checkpoints are as they were"):
        unfinished = [*run_dir.glob(f"{TEMP_PREFIX}*"), *(run_dir / COAT).glob(f"{TEMP_PREFIX}*")]
        for path in unfinished:
            remove(path)
        for replaced in replaced_sets(run_dir):
            target = replaced.with_name(replaced.name.removeprefix(REPLACED_PREFIX))
            if not target.exists():
                os.replace(replaced, target)
        lines = [f"{path}: removed, a process was ended while it wrote it" for path in unfinished]
        lines += _restore_newest(run_dir)
        for replaced in replaced_sets(run_dir):
            remove(replaced)
    return lines


def _restore_newest(run_dir: Path) -> list[str]:
    """Move sets that are newer than the newest whole one aside, and restore its published files."""
    sets = committed_sets(run_dir)
    if not sets:
        return []
    sizes = {path.stat().st_size for path in sets[0].rglob("*.safetensors")}
    for path in run_dir.glob("*.safetensors"):
        # of an equal size it is a published file of the set, with damaged metadata
        if step_of(path) > set_step(sets[0]) and path.stat().st_size not in sizes:
            return []  # another program continued the run
    problems = []
    for newest in sets:
        problem = damage(newest)
        if problem is None:
            break
        problems.append(problem)
    else:
        return []
    lines = [f"{problem}; the run resumes from step {set_step(newest)}" for problem in problems]
    if problems:
        lines += _set_aside_newer(run_dir, newest)
    known_sets = [*committed_sets(run_dir), *replaced_sets(run_dir)]
    published = (run_dir / name for name in published_names(newest))
    damaged = [path for path in published if path.exists() and not is_known(path, known_sets)]
    if damaged:
        aside = _aside_folder(run_dir, newest)
        for path in damaged:
            os.replace(path, aside / path.name)
            lines.append(f"{path}: is not the file that was written; moved to {aside}")
    return lines + [f"{run_dir / name}: put back from {newest}" for name in publish_set(run_dir, newest)]


def step_of(path: Path) -> int:
    """Steps done, from a LoRA's metadata or ai-toolkit's file beside a whole model; -1 if it has none."""
    try:
        if path.is_dir():
            return int(yaml.safe_load((path / MODEL_META).read_text(encoding="utf-8"))["training_info"]["step"])
        with safe_open(path, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["training_info"])["step"])
    except (OSError, SafetensorError, yaml.YAMLError, KeyError, ValueError, TypeError):
        return -1


def saves_of(run_dir: Path, name: str) -> dict[Path, int]:
    """LoRA files, or folders of whole models, that a run of this name saved → steps done (`step_of`), sorted."""
    metadata_files = {path: path for path in run_dir.glob("*.safetensors")}
    metadata_files |= {shard.parents[1]: shard for shard in run_dir.glob("*/transformer/*.safetensors")}
    pattern = re.compile(re.escape(name) + r"(_\d{9})?(\.safetensors)?")
    return {path: step_of(metadata_files[path]) for path in sorted(metadata_files) if pattern.fullmatch(path.name)}


def go_back(run_dir: Path, step: int) -> list[str]:
    """Make the kept set of `step` the newest and return lines about moved files; raises ResumeError or SaveError."""
    target = state_folder(run_dir, step)
    kept_steps = ", ".join(str(set_step(folder)) for folder in reversed(committed_sets(run_dir)))
    if not target.is_dir():
        remedy = f"the kept ones are of step {kept_steps}" if kept_steps else "none is kept there"
        raise ResumeError(f"step {step}: {run_dir / COAT} has no state of this step; {remedy}")
    problem = damage(target)
    if problem is not None:
        raise ResumeError(f"step {step}: {problem}; the kept states are of step {kept_steps}")
    with save_errors(run_dir, f"the run cannot go back to step {step}", "its checkpoints are whole"):
        lines = _set_aside_newer(run_dir, target)
        lines += [f"{run_dir / name}: put back from {target}" for name in publish_set(run_dir, target)]
    return lines or [f"{run_dir}: step {step} is its newest state already"]


def _set_aside_newer(run_dir: Path, target: Path) -> list[str]:
    """Move sets and LoRAs newer than `target` aside; LoRAs first, so that a kill in between leaves a consistent run."""
    step = set_step(target)
    newer_sets = [folder for folder in committed_sets(run_dir) if set_step(folder) > step]
    published = {name for folder in newer_sets for name in published_names(folder)}
    models = [run_dir / name for name in sorted(published) if (run_dir / name).is_dir()]
    newer_saves = []
    for path in (*run_dir.glob("*.safetensors"), *models):
        if not is_known(path, [target]) and (path.name in published or _is_newer(path, step)):
            newer_saves.append(path)
    if not newer_sets and not newer_saves:
        return []
    aside = _aside_folder(run_dir, target)
    for table in (run_dir / COAT).glob("*.csv"):
        shutil.copyfile(table, aside / table.name)
    for path in (*newer_saves, *newer_sets):
        os.replace(path, aside / path.name)
    names = ", ".join(path.name for path in (*newer_sets, *newer_saves))
    return [f"{run_dir}: goes back to step {step}; moved to {aside}: {names}"]


def _is_newer(path: Path, step: int) -> bool:
    """Whether a LoRA has more steps, by its metadata, or by its name if damaged."""
    done = step_of(path)
    if done >= 0:
        return done > step
    match = re.fullmatch(re.escape(path.parent.name) + r"(?:_(\d+))?\.safetensors", path.name)
    return match is not None and (match[1] is None or int(match[1]) > step)  # no number: the final save


def _aside_folder(run_dir: Path, target: Path) -> Path:
    first = folder = run_dir / COAT / target.name.replace("state-", "set-aside-")
    number = 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    folder.mkdir(parents=True)
    return folder


def good_step(run_dir: Path, doubt_since: int, apart: int) -> int | None:
    """Step of the kept state to go back to, or None: healthy, and before the guard's first doubt.

    The newest that is at least `apart` steps before it, else the oldest.
    """
    healthy = []  # steps, newest first
    for folder in committed_sets(run_dir):
        growth = 1.0
        for name in RECORDS:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                record = json.loads((folder / name).read_text(encoding="utf-8"))
                growth = float(record["guard"].get("growth") or 1.0)
        if growth <= HEALTHY_GROWTH:
            healthy.append(set_step(folder))
    for step in healthy:
        if step + apart <= doubt_since:
            return step
    return healthy[-1] if healthy and healthy[-1] < doubt_since else None


def way_back(run_dir: Path, since: int, apart: int, go_back_to: Callable[[int], str]) -> str:
    """Instructions to resume a run that diverged at step `since`, once its config is corrected."""
    step = good_step(run_dir, since, apart)
    if step is not None:
        return f"then {go_back_to(step)}"
    if not committed_sets(run_dir):
        return "nothing has been saved yet: then start the same config again"
    return "no state from before that is kept: then choose another config.name to start over"


def describe_lowest(curve: Sequence[tuple[int, float]], run_dir: Path, name: str) -> str:
    """Describe at which step the curve of (steps done, loss) was lowest, and which save is nearest to it."""
    finite = [(step, loss) for step, loss in curve if math.isfinite(loss)]
    if not finite:
        return "the held-out loss was never finite"
    step, lowest = min(finite, key=lambda point: (point[1], point[0]))
    saves = {done: save for save, done in saves_of(run_dir, name).items() if done >= 0}
    nearest = min(saves, key=lambda done: (abs(done - step), done), default=None)
    if nearest is None:
        save = "nothing is saved"
    elif nearest == step:
        save = saves[nearest].name
    else:
        save = f"not saved; the nearest is {saves[nearest].name}, step {nearest}"
    last_step, last = finite[-1]
    rise = f"; {last:.6f} at step {last_step}" if last_step != step else ""
    return f"lowest held-out loss {lowest:.6f} at step {step} ({save}){rise}"
