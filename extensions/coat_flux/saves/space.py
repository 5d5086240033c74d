"""Whether a run can write its folder, and has room there for its saves: asked by `check`, and at the start."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .commit import COAT, SETS_KEPT, SPARE_BYTES
from .errors import REMEDY_FORBIDDEN, REMEDY_SPACE

__all__ = ["SaveSpace", "check_output"]

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class SaveSpace:
    """What saves take on disk.

    Attributes:
        lora: bytes of a LoRA file.
        state: bytes of a state besides it.
        loras: LoRA files that are kept, the final one included.
    """

    lora: int
    state: int
    loras: int

    @property
    def one(self) -> int:
        """Bytes of one save."""
        return self.lora + self.state

    @property
    def all(self) -> int:
        """Bytes of everything at most: LoRAs, the states that are kept, and a save that is being written."""
        return self.loras * self.lora + SETS_KEPT * self.state + self.one


def check_output(run_dir: Path, space: SaveSpace | None = None) -> tuple[list[str], list[str]]:
    """Look at where a run is to be saved; nothing stays there.

    Args:
        run_dir: `<training_folder>/<name>`; need not exist.
        space: what saves take; None where that is not known.

    Returns:
        (errors, warnings), a line each.
    """
    links = [path for folder in (run_dir, run_dir / COAT) for path in _entries(folder) if path.is_symlink()]
    errors = [
        f"{path}: is a link to a folder, and a run writes through no links in its folder; remove it, or let the whole "
        "run folder be a link"
        for path in links
        if path.is_dir()
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
    free, there = shutil.disk_usage(folder).free, _bytes_of(run_dir)
    if space.one + SPARE_BYTES > free and space.all > there:
        errors.append(f"{folder}: one save takes {_text(space.one)}, {_text(free)} are free; {REMEDY_SPACE}")
    elif space.all + SPARE_BYTES > free + there:
        what = f"{space.loras} LoRAs of {_text(space.lora)}, {SETS_KEPT} states, and a save being written"
        have = f"; {_text(there)} of it are there" if there else ""
        warning = f"{folder}: all that the run keeps takes {_text(space.all)} ({what}){have}, {_text(free)} are free"
        return errors, [f"{warning}; {REMEDY_SPACE}, or lower save.max_step_saves_to_keep"]
    return errors, []


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _bytes_of(run_dir: Path) -> int:
    """Of LoRAs and states that are there; hard links count once."""
    found = {}
    for path in (*run_dir.glob("*.safetensors"), *run_dir.glob(f"{COAT}/state-*/**/*")):
        try:
            stat = os.stat(path)
        except OSError:
            continue
        if path.is_file():
            found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def _text(size: float) -> str:
    unit, name = next((pair for pair in UNITS if size >= pair[0]), UNITS[-1])
    return f"{size / unit:.1f} {name}"
