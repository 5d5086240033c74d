"""Rules on plain values that hold in both hosts: where a run is written, trigger words, resolutions, captions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .findings import Findings

BUCKET_STEP = 32  # FLUX.1: 8 (VAE) × 2 (packing) × 2
TRIGGER_TAG = "[trigger]"
MAX_NAME = 200  # bytes; file systems take 255, and "_000000500.safetensors" is added
_BAD_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\[\]]|^[. ]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)
_CAPTION_EXT = re.compile(r"\.?\w+(\.\w+)*")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")


def check_name(name: str | None, path: str, findings: Findings) -> None:
    """Check the name of a run, which becomes a folder in `training_folder` and the start of its file names."""
    if not name or _BAD_NAME.search(name):
        rule = "names the run's folder, so none of <>:\"/\\|?*[], no dot or space at its ends; write another"
        findings.add(path, rule, name)
    elif len(name.encode()) > MAX_NAME:
        findings.add(path, f"names the run's folder, so at most {MAX_NAME} bytes; shorten it", name)


def check_folder(folder: str | None, path: str, findings: Findings) -> bool:
    """Check that a folder can be made at `folder`: only a folder may stand on the way. True where it can."""
    if not folder or not check_path(folder, path, findings):
        return False
    try:
        place = Path(folder)
        there = next((part for part in (place, *place.parents) if part.exists() or part.is_symlink()), None)
        if there is None or there.is_dir():
            return True
        what = "a file" if there.exists() else "a link to nothing"
        findings.add(path, f"{there} is {what}, not a folder; write another, or move it away", folder)
    except OSError as error:
        findings.add(path, f"cannot be a folder: {error.strerror}; write another", folder)
    return False


def check_path(value: str, path: str, findings: Findings) -> bool:
    """Refuse `~`, which no host replaces: it would be a folder of that name. True where there is none."""
    if not value.startswith("~"):
        return True
    findings.add(path, "~ is not replaced by the home folder; write the whole path, or ${HOME}/…", value)
    return False


def check_run(name: str | None, name_path: str, training_folder: str | None, path: str, findings: Findings) -> None:
    """Check name and place of a run; `path` is the process entry's key."""
    check_name(name, name_path, findings)
    at = f"{path}.training_folder"
    if check_folder(training_folder, at, findings) and findings.sound(name_path):
        folder = Path(str(training_folder)) / str(name)
        if folder.exists() and not folder.is_dir():
            findings.add(name_path, f"{folder} is a file, not a run's folder; write another, or move it away", name)


def check_trigger(trigger: str | None, prompts: Iterable[tuple[str, Any]], path: str, findings: Findings) -> None:
    """Warn of sample prompts that do not show what is trained.

    Args:
        trigger: the trigger word.
        prompts: (key, text) of each.
        path: the key of the process entry.
        findings: receives the warnings.
    """
    for where, text in prompts:
        if not isinstance(text, str):
            continue
        if trigger and TRIGGER_TAG not in text and trigger not in text:
            rule = f"without the trigger word '{trigger}' a sample does not show the LoRA; write {TRIGGER_TAG} into it"
            findings.warn(where, rule, text)
        elif not trigger and TRIGGER_TAG in text:
            findings.warn(where, f"there is no trigger word for {TRIGGER_TAG}; write {path}.trigger_word", text)


def check_resolution(sizes: Iterable[Any], path: str, findings: Findings) -> None:
    """Warn of resolutions that are no multiple of the bucket step: photos are trained smaller than it says."""
    for size in sizes:
        if isinstance(size, int) and size > BUCKET_STEP and size % BUCKET_STEP:
            low = size // BUCKET_STEP * BUCKET_STEP
            rule = f"no multiple of {BUCKET_STEP}, FLUX's bucket step, so a square photo is trained at {low}×{low}"
            findings.warn(path, f"{rule}; write {low} or {low + BUCKET_STEP}", size)


def check_caption_ext(extension: str, path: str, findings: Findings) -> None:
    """Refuse what is no extension of a caption file."""
    if not _CAPTION_EXT.fullmatch(extension):
        findings.add(path, "must be the end of a file name, such as txt; write that", extension)
    elif extension.lower().lstrip(".") in _IMAGES:
        findings.add(path, "is the extension of the images, not of their captions; write txt", extension)
