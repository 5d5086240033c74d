"""The mini-FLUX, a whole FLUX.1 of 9 MB in diffusers layout, copied to where a config names it."""

from __future__ import annotations

import filecmp
import logging
import shutil
from pathlib import Path

from ..base.files import discard, replace_folder, staging_path

logger = logging.getLogger(__name__)

MARKER_NAME = "coat_tiny_flux.json"  # a file in folders that were made here
EMBEDDED_MODEL = "models/coat_mini_flux"  # how configs name it, below the working directory
MINI_FLUX = Path(__file__).parent / "files"  # made by scripts/pretrain_mini_flux.py


def make_mini_flux(out_dir: Path | str) -> Path:
    """Copy the mini-FLUX unless a complete copy is there; returns the absolute path.

    Raises FileExistsError for a folder that was not made here.
    """
    out_dir = Path(out_dir).resolve()
    if _is_complete(out_dir):
        return out_dir
    if out_dir.exists() and not (out_dir / MARKER_NAME).is_file() and (out_dir.is_file() or any(out_dir.iterdir())):
        raise FileExistsError(
            f"out_dir={out_dir}: must be new, empty or made by coat_flux.mini_flux (has no {MARKER_NAME}); choose "
            "another folder or delete this one"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    made, aside = staging_path(out_dir), staging_path(out_dir)
    try:
        shutil.copytree(MINI_FLUX, made)
        (made / MARKER_NAME).write_text("{}", encoding="utf-8")
        replace_folder(made, out_dir, aside)
    except OSError:
        if not _is_complete(out_dir):  # another process has been faster
            raise
    finally:
        discard(made)
        discard(aside)
    logger.info("copied the embedded FLUX model to %s", out_dir)
    return out_dir


def provide_embedded(name_or_path: str) -> None:
    """Make the embedded model if a config's `model.name_or_path` means it and it is not there yet."""
    if Path(name_or_path).name == Path(EMBEDDED_MODEL).name and not Path(name_or_path).exists():
        make_mini_flux(name_or_path)


def _is_complete(folder: Path) -> bool:
    for shipped in MINI_FLUX.rglob("*.*"):
        copied = folder / shipped.relative_to(MINI_FLUX)
        if not (copied.is_file() and filecmp.cmp(shipped, copied, shallow=False)):
            return False
    return (folder / MARKER_NAME).is_file()
