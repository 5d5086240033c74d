"""A run's folder at its start: locked, repaired, or taken back to an earlier state.

One process at a time works in it: a second one would remove what the first is writing.

    <run>/coat/set-aside-000000250/            everything newer than step 250, or damaged; a second time …-250-2
        state-000000500/                       sets
        <name>_000000500.safetensors, ...      LoRAs of later steps, from the run's folder
        metrics.csv, ...                       copies: the run cuts its tables back to the step it resumes from

Nothing is deleted: files in the way of a resume are moved aside, and the returned lines say where.
"""

from __future__ import annotations

import errno
import itertools
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
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
MODEL_META = "aitk_meta.yaml"  # in the folder of a whole model; ai-toolkit resumes from the step it says
RECORDS = ("state.json", "aitk/state.json")  # of the two trainers
HEALTHY_GROWTH = 10.0  # of the LoRA's norm, at a save worth going back to


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

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: no child of it holds it on
        except OSError as error:
            if error.errno in TAKEN:
                owner = ""
                with suppress(OSError):  # Windows keeps others from a locked file
                    text = path.read_text(encoding="utf-8").strip()
                    owner = f" ({text})" if text.isdecimal() else ""
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
    """Repair a run after a killed process or disk damage, at its start, in one process; returns lines for the user.

    Unfinished files are removed. A damaged newest set is moved aside with its LoRA, so that the set before is the
    newest. Published files of the newest set that are missing or damaged are restored. A run that another program
    continued (a LoRA of more steps) is left alone. Raises SaveError if the folder is not writable.
    """
    if not run_dir.is_dir():
        return []
    with save_errors(run_dir, "this folder cannot be repaired", "its checkpoints are as they were"):
        unfinished = [*run_dir.glob(f"{TEMP_PREFIX}*"), *(run_dir / COAT).glob(f"{TEMP_PREFIX}*")]
        for path in unfinished:
            remove(path)
        for aside in replaced_sets(run_dir):
            target = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX))
            if not target.exists():
                os.replace(aside, target)
        lines = [f"{path}: removed, a process was ended while it wrote it" for path in unfinished]
        lines += _choose_newest(run_dir)
        for aside in replaced_sets(run_dir):
            remove(aside)
    return lines


def _choose_newest(run_dir: Path) -> list[str]:
    sets, problems = committed_sets(run_dir), []
    if not sets:
        return []
    own = {path.stat().st_size for path in sets[0].rglob("*.safetensors")}
    for path in run_dir.glob("*.safetensors"):
        if step_of(path) > set_step(sets[0]) and path.stat().st_size not in own:  # not a damaged file of ours
            return []  # another program continued the run
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
    known = [*committed_sets(run_dir), *replaced_sets(run_dir)]
    published = (run_dir / name for name in published_names(newest))
    differing = [path for path in published if path.exists() and not is_known(path, known)]
    if differing:
        where = _aside_folder(run_dir, newest)
        for path in differing:
            os.replace(path, where / path.name)
            lines.append(f"{path}: is not the file that was written; moved to {where}")
    return lines + [f"{run_dir / name}: put back from {newest}" for name in publish_set(run_dir, newest)]


def step_of(path: Path) -> int:
    """Steps in a LoRA's metadata, or in ai-toolkit's file next to a whole model; -1 if neither has them."""
    try:
        if path.is_dir():
            return int(yaml.safe_load((path / MODEL_META).read_text(encoding="utf-8"))["training_info"]["step"])
        with safe_open(path, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["training_info"])["step"])
    except (OSError, SafetensorError, yaml.YAMLError, KeyError, ValueError, TypeError):
        return -1


def saves_of(run_dir: Path, name: str) -> dict[Path, int]:
    """The LoRA files, or folders of whole models, that a run of this name saved, sorted; with `step_of` each."""
    files = {path: path for path in run_dir.glob("*.safetensors")}
    files |= {shard.parents[1]: shard for shard in run_dir.glob("*/transformer/*.safetensors")}
    named = re.compile(re.escape(name) + r"(_\d{9})?(\.safetensors)?")
    return {path: step_of(files[path]) for path in sorted(files) if named.fullmatch(path.name)}


def go_back(run_dir: Path, step: int) -> list[str]:
    """Make the kept set of `step` the newest and return lines about moved files; raises ResumeError or SaveError."""
    target = state_folder(run_dir, step)
    steps = ", ".join(str(set_step(folder)) for folder in reversed(committed_sets(run_dir)))
    if not target.is_dir():
        remedy = f"the kept ones are of step {steps}" if steps else "none is kept there"
        raise ResumeError(f"step {step}: {run_dir / COAT} has no state of this step; {remedy}")
    problem = damage(target)
    if problem is not None:
        raise ResumeError(f"step {step}: {problem}; the kept states are of step {steps}")
    with save_errors(run_dir, f"the run cannot go back to step {step}", "its checkpoints are whole"):
        lines = _set_aside_newer(run_dir, target)
        lines += [f"{run_dir / name}: put back from {target}" for name in publish_set(run_dir, target)]
    return lines or [f"{run_dir}: step {step} is its newest state already"]


def _set_aside_newer(run_dir: Path, target: Path) -> list[str]:
    """Move newer sets and LoRAs aside; LoRAs first, so that a kill in between leaves a consistent run."""
    step = set_step(target)
    sets = [folder for folder in committed_sets(run_dir) if set_step(folder) > step]
    listed = {name for folder in sets for name in published_names(folder)}
    models = [run_dir / name for name in sorted(listed) if (run_dir / name).is_dir()]
    others = [path for path in (*run_dir.glob("*.safetensors"), *models) if not is_known(path, [target])]
    newer = [path for path in others if path.name in listed or _is_newer(path, step)]
    if not sets and not newer:
        return []
    where = _aside_folder(run_dir, target)
    for table in (run_dir / COAT).glob("*.csv"):
        shutil.copyfile(table, where / table.name)
    for path in (*newer, *sets):
        os.replace(path, where / path.name)
    names = ", ".join(path.name for path in (*sets, *newer))
    return [f"{run_dir}: goes back to step {step}; moved to {where}: {names}"]


def _is_newer(path: Path, step: int) -> bool:
    """Whether a LoRA has more steps, by its metadata, or by its name if damaged."""
    done = step_of(path)
    if done >= 0:
        return done > step
    named = re.fullmatch(re.escape(path.parent.name) + r"(?:_(\d+))?\.safetensors", path.name)
    return named is not None and (named[1] is None or int(named[1]) > step)


def _aside_folder(run_dir: Path, target: Path) -> Path:
    name = target.name.replace("state-", "set-aside-")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folder = next(path for path in (run_dir / COAT / name for name in names) if not path.exists())
    folder.mkdir(parents=True)
    return folder


def good_step(run_dir: Path, doubt_since: int, apart: int) -> int | None:
    """Step of the newest kept state at least `apart` steps before `doubt_since`, the guard's first doubt, or None."""
    good = []
    for folder in committed_sets(run_dir):
        growth = 1.0
        for name in RECORDS:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                record = json.loads((folder / name).read_text(encoding="utf-8"))
                growth = float(record["guard"].get("growth") or 1.0)
        if growth <= HEALTHY_GROWTH:
            good.append(set_step(folder))
    trusted = [step for step in good if step + apart <= doubt_since]
    older = [step for step in reversed(good) if step < doubt_since]
    return next(iter([*trusted, *older]), None)


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
    step, loss = min(finite, key=lambda point: (point[1], point[0]))
    saves = {done: save for save, done in saves_of(run_dir, name).items() if done >= 0}
    nearest = min(saves, key=lambda saved: (abs(saved - step), saved), default=None)
    if nearest is None:
        file = "nothing is saved"
    elif nearest == step:
        file = saves[nearest].name
    else:
        file = f"not saved; the nearest is {saves[nearest].name}, step {nearest}"
    last = finite[-1]
    rise = f"; {last[1]:.6f} at step {last[0]}" if last[0] != step else ""
    return f"lowest held-out loss {loss:.6f} at step {step} ({file}){rise}"
