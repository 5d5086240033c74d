"""The mini-FLUX, a whole FLUX.1 of 9 MB in diffusers layout, copied to where a config names it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path

from ..base.files import replace_folder

logger = logging.getLogger(__name__)

MARKER_NAME = "coat_tiny_flux.json"
EMBEDDED_MODEL = "models/coat_mini_flux"  # how configs name it, below the working directory
MINI_FLUX = Path(__file__).parent / "files"  # made by scripts/pretrain_mini_flux.py


def make_mini_flux(out_dir: Path | str) -> Path:
    """Copy the mini-FLUX unless a complete copy is there, and return the absolute path.

    The copy is made next to `out_dir` and renamed; a marker file names the model, so partial or older copies are
    replaced.

    Raises:
        FileExistsError: `out_dir` exists and was not made here; it is left untouched.
    """
    out_dir, marker = Path(out_dir).resolve(), _marker()
    if _is_complete(out_dir, marker):
        return out_dir
    if out_dir.exists() and not (out_dir / MARKER_NAME).is_file() and (out_dir.is_file() or any(out_dir.iterdir())):
        raise FileExistsError(
            f"out_dir={out_dir}: must be new, empty or a folder made by coat_flux.mini_flux (has no {MARKER_NAME}); "
            "choose another folder or delete this one"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        made = Path(scratch) / out_dir.name
        shutil.copytree(MINI_FLUX, made)
        (made / MARKER_NAME).write_text(marker, encoding="utf-8")
        try:
            if not _is_complete(out_dir, marker):
                replace_folder(made, out_dir, Path(scratch) / "replaced")
        except OSError:
            if not _is_complete(out_dir, marker):  # another process has been faster
                raise
    logger.info("copied the embedded FLUX model to %s", out_dir)
    return out_dir


def provide_embedded(name_or_path: str) -> None:
    """Make the embedded model if a config's `model.name_or_path` means it and it is not there yet."""
    if Path(name_or_path).name == Path(EMBEDDED_MODEL).name and not Path(name_or_path).exists():
        make_mini_flux(name_or_path)


def _marker() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in MINI_FLUX.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return json.dumps({"mini_flux": digest.hexdigest()})


def _is_complete(folder: Path, marker: str) -> bool:
    path = folder / MARKER_NAME
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != marker:
        return False
    for shipped in MINI_FLUX.rglob("*.*"):
        copied = folder / shipped.relative_to(MINI_FLUX)
        if not copied.is_file() or copied.stat().st_size != shipped.stat().st_size:
            return False
    return True
