"""A checkpoint is a set of files that one rename commits.

    <run>/coat/.writing-<…>-state-000000500/     written here, every file flushed to disk
    <run>/coat/state-000000500/                  after the rename: the set is committed
        commit/files.json                        size and SHA-256 of each file, and which of them are published
    <run>/<name>_000000500.safetensors, ...      published: hard links (or copies), each renamed into place;
                                                 for a whole model a folder of them
    <run>/coat/state-000000250/                  the set before, known to be good: kept
    <run>/coat/state-000000000/                  older sets: removed at the very end

A process killed before the rename leaves the old set, after it the new one; unfinished publishing is completed by the
next start (`repair`). A new set replaces an existing one of the same step, which waits meanwhile as
`.replaced-state-…`.

Two sets are kept. The guard's doubt may come a few steps after things went wrong, so the older set is one the run has
passed by at least `apart` steps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import (
    discard,
    file_sha256,
    link_or_copy,
    replace_folder,
    replacing,
    replacing_folder,
    staging_path,
    sync_file,
    sync_folder,
)
from ..base.text import size_text
from .errors import REMEDY_FORBIDDEN, REMEDY_SPACE, SaveError, save_errors

COAT = "coat"
MANIFEST = Path("commit", "files.json")
REPLACED_PREFIX = ".replaced-"
SET_NAME = re.compile(r"state-(\d{9,})")
SETS_KEPT = 2
SPARE_BYTES = 4 << 20  # not counted: folders, JSON


def state_folder(run_dir: Path, step: int) -> Path:
    """Folder of the set after `step` optimizer steps."""
    return run_dir / COAT / f"state-{step:09d}"


def set_step(folder: Path) -> int:
    """Steps done, from a set's name."""
    return int(folder.name.removeprefix("state-"))


def committed_sets(run_dir: Path) -> list[Path]:
    """Folders of the committed sets, newest first."""
    sets = [path for path in (run_dir / COAT).glob("state-*") if SET_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(sets, key=set_step, reverse=True)


def newest_set(run_dir: Path) -> Path | None:
    """Folder of the newest committed set, or None."""
    return next(iter(committed_sets(run_dir)), None)


def replaced_sets(run_dir: Path) -> list[Path]:
    """Sets left waiting for their replacement by a killed process."""
    return list((run_dir / COAT).glob(f"{REPLACED_PREFIX}state-*"))


def commit(
    run_dir: Path, step: int, write: Callable[[Path], None], publish: Mapping[str, str], *, apart: int = 1
) -> Path:
    """Write a set, commit it, publish its files in the run's folder, and remove all sets but it and one before it.

    Args:
        publish: name in the run's folder → name in the set; read after `write`, which may fill it.
        apart: distance in steps of the older set, as soon as there is such a set.

    Raises SaveError if writing failed, and the previous set is unchanged; or publishing, which the next start does.
    """
    what = f"the checkpoint of step {step} cannot be saved"
    target = state_folder(run_dir, step)
    staging = staging_path(target)
    before = committed_sets(run_dir)
    needed_bytes = sum(path.stat().st_size for folder in before[:1] for path in folder.rglob("*"))
    try:
        with save_errors(run_dir, what, "the previous checkpoint is as it was", needed_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            if needed_bytes and shutil.disk_usage(run_dir).free < needed_bytes + SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir))
            staging.mkdir()
            write(staging)
            _seal(staging, publish)
            replace_folder(staging, target, target.with_name(f"{REPLACED_PREFIX}{target.name}"))
    finally:
        discard(staging)
    with save_errors(run_dir, what, f"it is whole in {target} and published at the next start"):
        sync_folder(target.parent)
        publish_set(run_dir, target)
    before = [folder for folder in before if folder != target]
    far = [folder for folder in before if step - set_step(folder) >= apart]
    trusted = next(iter([*far, *reversed(before)]), None)
    for old in [*before, *replaced_sets(run_dir)]:
        if old != trusted:
            discard(old)
    return target


# --- what a set says of itself ---


def _seal(folder: Path, publish: Mapping[str, str]) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync_file(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    manifest: dict[str, Any] = {"files": files, "publish": dict(publish)}
    manifest["sha256"] = _digest(manifest)
    (folder / MANIFEST).parent.mkdir()
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8", newline="\n")
    sync_file(folder / MANIFEST)
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(path)
    sync_folder(folder)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a set: "files" and "publish"; raises OSError if unreadable, ValueError if damaged."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError("it is not what was written")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def published_names(folder: Path) -> list[str]:
    """Names of a set's published files in the run's folder; none if its manifest is damaged."""
    try:
        return list(manifest_of(folder)["publish"])
    except (OSError, ValueError):
        return []


def damage(folder: Path) -> str | None:
    """Read all files of a committed set and describe damage, or return None."""
    try:
        for name, entry in manifest_of(folder)["files"].items():
            if not (folder / name).is_file():
                return f"{folder / name}: is missing"
            if not _is_as_written(folder / name, entry):
                return f"{folder / name}: is not the file that was written (damaged or exchanged)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST}: cannot be read ({error})"
    return None


def is_known(path: Path, sets: Iterable[Path]) -> bool:
    """Whether a file or folder of the run equals, byte for byte, one that a complete set published under this name."""
    for folder in sets:
        if path.name in published_names(folder):
            manifest = manifest_of(folder)
            entries = _entries_of(manifest, manifest["publish"][path.name])
            if all(_is_as_written(path / part, entry) for part, entry in entries.items()):
                return True
    return False


def _is_as_written(path: Path, entry: Mapping[str, Any], source: Path | None = None) -> bool:
    """Whether a file has an entry's content, as a link to `source` must have."""
    if source is not None and path.is_file() and path.samefile(source):
        return True
    return path.is_file() and path.stat().st_size == entry["bytes"] and file_sha256(path) == entry["sha256"]


def _entries_of(manifest: Mapping[str, Any], inside: str) -> dict[str, Any]:
    """Published entries: of a file under "", of a folder's files under their names in it."""
    entries = {
        name.removeprefix(inside).removeprefix("/"): entry
        for name, entry in manifest["files"].items()
        if name == inside or name.startswith(f"{inside}/")
    }
    if not entries:
        raise SaveError(f"{MANIFEST}: {inside!r} is to be published, and no file of it is there")
    return entries


# --- publishing ---


def publish_set(run_dir: Path, folder: Path) -> list[str]:
    """Publish what the run's folder lacks; returns the names."""
    manifest = manifest_of(folder)
    done = []
    for name, inside in manifest["publish"].items():
        for each in (name, inside):
            if each in ("", ".", "..") or re.search(r"[/\\:]", each):
                rule = "must be the name of a file, without a folder; nothing is written there"
                raise SaveError(f"{MANIFEST}: {each!r}: {rule}")
        source, target, entries = folder / inside, run_dir / name, _entries_of(manifest, inside)
        if all(_is_as_written(target / part, entry, source / part) for part, entry in entries.items()):
            continue
        if source.is_dir():
            with replacing_folder(target) as made:
                for part in entries:
                    (made / part).parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(source / part, made / part)
        else:
            with replacing(target, sync=False) as temp:
                link_or_copy(source, temp)
        done.append(name)
    if done:
        sync_folder(run_dir)
    return done


# --- the disk ---


@dataclass(frozen=True)
class SaveSpace:
    """Bytes of a LoRA file and of a state besides it, and the number of LoRA files kept, the final one included."""

    lora: int
    state: int
    loras: int

    @property
    def most(self) -> int:
        """The most bytes at any time: LoRAs, kept states, and a save being written."""
        return (self.loras + 1) * self.lora + (SETS_KEPT + 1) * self.state


def check_output(run_dir: Path, space: SaveSpace | None = None) -> tuple[list[str], list[str]]:
    """Return errors and warnings about a run's output folder, which need not exist, and its free space."""
    errors = [
        f"{path}: is a link to a folder, and a run writes through no links in its folder; remove it, or let the whole "
        "run folder be a link"
        for path in (*run_dir.glob("*"), *(run_dir / COAT).glob("*"))
        if path.is_symlink() and path.is_dir()
    ]
    folder = run_dir
    while not folder.exists() and not folder.is_symlink() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        errors.append(f"{folder}: the run cannot be saved there ({error.strerror}); {REMEDY_FORBIDDEN}")
        return errors, []
    if space is None:
        return errors, []
    sizes = {}  # of the run's saves; files with several hard links count once
    for pattern in ("*.safetensors", "*/transformer/*.safetensors", f"{COAT}/state-*/**/*"):
        for path in run_dir.glob(pattern):
            with suppress(OSError):
                stat = path.stat()
                if path.is_file():
                    sizes[stat.st_dev, stat.st_ino] = stat.st_size
    free = shutil.disk_usage(folder).free
    there = sum(sizes.values())
    warnings = []
    one = space.lora + space.state
    if one + SPARE_BYTES > free and space.most > there:
        errors.append(f"{folder}: one save takes {size_text(one)}, {size_text(free)} are free; {REMEDY_SPACE}")
    elif space.most + SPARE_BYTES > free + there:
        what = f"{space.loras} LoRAs of {size_text(space.lora)}, {SETS_KEPT} states, and a save being written"
        if there:
            what += f"; {size_text(there)} of it are there"
        warnings = [
            f"{folder}: all that the run keeps takes {size_text(space.most)} ({what}), {size_text(free)} are free; "
            f"{REMEDY_SPACE}, or lower save.max_step_saves_to_keep"
        ]
    return errors, warnings


def require_room(run_dir: Path, space: SaveSpace | None = None) -> list[str]:
    """Return the warnings of `check_output`; SaveError if no save fits or the folder is not writable."""
    errors, warnings = check_output(run_dir, space)
    if errors:
        raise SaveError("\n".join(errors))
    return warnings
