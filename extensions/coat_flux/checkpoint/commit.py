"""A checkpoint is a set of files that one rename commits.

    <run>/coat/.writing-<pid>-state-000000500/   written here, every file brought to the disk
    <run>/coat/state-000000500/                  after the rename: the set is committed
        commit/files.json                        size and SHA-256 of each file, and which of them are published
    <run>/<name>_000000500.safetensors, ...      published: hard links (copies where there are none), each renamed in
    <run>/coat/state-000000250/                  the set before, removed at the very end

A process killed before the rename leaves the old set, after it the new one. What it had not done yet, publishing and
removing, the next start does (`repair`). A set of a step that is there already takes the place of the old one, which
waits as `.replaced-state-…` meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import SaveError, save_errors
from .files import TEMP_PREFIX, discard, file_sha256, link_or_copy, remove, staging_path, sync_folder, write_bytes

__all__ = ["commit", "damage", "newest_set", "repair", "set_step", "state_folder"]

COAT = "coat"
MANIFEST = Path("commit", "files.json")
REPLACED_PREFIX = ".replaced-"
SET_NAME = re.compile(r"state-(\d{9,})")
SPARE_BYTES = 4 << 20  # beyond what is counted: folders, JSON


def state_folder(run_dir: Path, step: int) -> Path:
    """Where the set of `step` optimizer steps lies."""
    return run_dir / COAT / f"state-{step:09d}"


def set_step(folder: Path) -> int:
    """Steps done, by a set's name."""
    return int(folder.name.removeprefix("state-"))


def newest_set(run_dir: Path) -> Path | None:
    """Folder of the newest committed set, None without one."""
    return max(_sets(run_dir), key=set_step, default=None)


def _sets(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / COAT).glob("state-*") if SET_NAME.fullmatch(path.name) and path.is_dir()]


def commit(
    run_dir: Path,
    step: int,
    write: Callable[[Path], None],
    publish: Mapping[str, str],
    *,
    needed_bytes: int | None = None,
) -> Path:
    """Write a set, commit it, publish files of it in the run's folder, and remove the sets before it.

    Args:
        run_dir: the run's folder; made where it is missing.
        step: optimizer steps done.
        write: fills the empty folder it is given.
        publish: name in the run's folder → name in the set; read after `write`, which may fill it.
        needed_bytes: what the set takes, for a check before anything is written; None takes the size of the set before.

    Returns:
        The set's folder.

    Raises:
        SaveError: it could not be written; the set before and what it published are as they were. Or it was committed
            and could not be published, which the next start does.
    """
    target, what = state_folder(run_dir, step), f"the checkpoint of step {step} cannot be saved"
    staging = staging_path(target)
    try:
        needed = _size(newest_set(run_dir)) if needed_bytes is None else needed_bytes
        with save_errors(run_dir, what, "the previous checkpoint is as it was", needed):
            target.parent.mkdir(parents=True, exist_ok=True)
            _check_space(run_dir, needed)
            staging.mkdir()
            write(staging)
            _seal(staging, publish)
            _take_place(staging, target)
    finally:
        discard(staging)
    with save_errors(run_dir, what, f"it is whole in {target} and published at the next start"):
        sync_folder(target.parent)
        _publish(run_dir, target)
    for old in [*_sets(run_dir), *_replaced(run_dir)]:
        if old != target:
            discard(old)
    return target


def _check_space(run_dir: Path, needed: int) -> None:
    if needed and shutil.disk_usage(run_dir).free < needed + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir))


def _size(folder: Path | None) -> int:
    return 0 if folder is None else sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _seal(folder: Path, publish: Mapping[str, str]) -> None:
    """Bring all files to the disk and write down what they are."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {"files": files, "publish": dict(publish)}
    (folder / MANIFEST).parent.mkdir()
    write_bytes(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(path)
    sync_folder(folder)


def _take_place(staging: Path, target: Path) -> None:
    """The rename that commits."""
    aside = target.with_name(f"{REPLACED_PREFIX}{target.name}")
    if target.exists():
        remove(aside)
        os.replace(target, aside)
    try:
        os.replace(staging, target)
    except OSError:
        if aside.exists():
            os.replace(aside, target)
        raise


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What a set says of itself; None for one of an earlier version."""
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _publish(run_dir: Path, folder: Path) -> list[str]:
    """Publish what is not in the run's folder yet; returns the names."""
    manifest = _manifest(folder) or {"publish": {}, "files": {}}
    done = []
    for name, inside in manifest["publish"].items():
        _check_name(name)
        _check_name(inside)
        if not _is_published(run_dir / name, folder / inside, manifest["files"][inside]):
            temp = staging_path(run_dir / name)
            try:
                remove(temp)
                link_or_copy(folder / inside, temp)
                os.replace(temp, run_dir / name)
            finally:
                discard(temp)
            done.append(name)
    if done:
        sync_folder(run_dir)
    return done


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or re.search(r"[/\\:]", name):
        raise SaveError(f"{MANIFEST}: {name!r}: must be the name of a file, without a folder; nothing is written there")


def _is_published(path: Path, source: Path, entry: Mapping[str, Any]) -> bool:
    if not path.is_file():
        return False
    return os.path.samefile(path, source) or _is_as_written(path, entry)


def _is_as_written(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.stat().st_size == entry["bytes"] and file_sha256(path) == entry["sha256"]


def damage(folder: Path) -> str | None:
    """What is wrong with a committed set, or None; all its files are read.

    A set of an earlier version, which does not say what it holds, is taken as it is.
    """
    try:
        manifest = _manifest(folder)
        for name, entry in (manifest or {"files": {}})["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{path}: is missing"
            if not _is_as_written(path, entry):
                return f"{path}: is not the file that was written (damaged or exchanged)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST}: cannot be read ({error})"
    return None


def repair(run_dir: Path) -> list[str]:
    """Put right what a killed process left: to be called at the start, by one process.

    Unfinished files are removed, and files of the newest set that are not published, or torn, are published. A set that
    is damaged, or older than a LoRA in the run's folder (another program went on with the run), is left alone.

    Args:
        run_dir: the run's folder; need not exist.

    Returns:
        Lines to say.

    Raises:
        SaveError: the folder cannot be written.
    """
    if not run_dir.is_dir():
        return []
    with save_errors(run_dir, "this folder cannot be put right", "its checkpoints are as they were"):
        left = [*run_dir.glob(f"{TEMP_PREFIX}*"), *(run_dir / COAT).glob(f"{TEMP_PREFIX}*")]
        for path in left:
            remove(path)
        for aside in _replaced(run_dir):
            _put_back(aside)
        lines = [f"{path}: removed, a process was ended while it wrote it" for path in left]
        newest = newest_set(run_dir)
        if newest is None or _manifest_is_missing(newest) or _newer_lora(run_dir, set_step(newest)) or damage(newest):
            return lines
        lines += [f"{run_dir / name}: put back from {newest}" for name in _publish(run_dir, newest)]
        for old in _sets(run_dir):
            if old != newest:
                remove(old)
    return lines


def _manifest_is_missing(folder: Path) -> bool:
    return not (folder / MANIFEST).exists()


def _replaced(run_dir: Path) -> list[Path]:
    return list((run_dir / COAT).glob(f"{REPLACED_PREFIX}state-*"))


def _put_back(aside: Path) -> None:
    """A set that was waiting for its replacement: not needed where that came, else it is the set."""
    target = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX))
    if target.exists():
        remove(aside)
    else:
        os.replace(aside, target)


def _newer_lora(run_dir: Path, step: int) -> bool:
    """Whether a LoRA in the run's folder says more steps."""
    return any(_step_of(path) > step for path in run_dir.glob("*.safetensors"))


def _step_of(path: Path) -> int:
    """Steps by a LoRA's metadata; -1 where they do not say."""
    try:
        with safe_open(path, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["training_info"])["step"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return -1
