"""The mini-FLUX, a whole FLUX.1 of 9 MB in diffusers layout, copied to where a config names it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from ..base.files import replacing_folder

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = "models/coat_mini_flux"  # how configs name it, below the working directory
MINI_FLUX = Path(__file__).parent / "files"  # made by scripts/pretrain_mini_flux.py


def make_mini_flux(out_dir: Path | str) -> Path:
    """Copy the mini-FLUX unless the folder is there, which is left as it is; returns the absolute path."""
    out_dir = Path(out_dir).resolve()
    if out_dir.exists():
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(out_dir) as made:
        shutil.copytree(MINI_FLUX, made)
    logger.info("copied the embedded FLUX model to %s", out_dir)
    return out_dir


def provide_embedded(name_or_path: str) -> None:
    """Make the embedded model if a config's `model.name_or_path` means it and it is not there yet."""
    if Path(name_or_path).name == Path(EMBEDDED_MODEL).name:
        make_mini_flux(name_or_path)
