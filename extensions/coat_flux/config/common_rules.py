"""Rules on plain values that hold in both hosts: where a run is written, trigger words, resolutions, captions."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .findings import Findings

BUCKET_STEP = 32  # FLUX.1: 8 (VAE) × 2 (packing) × 2
TRIGGER_TAG = "[trigger]"
MAX_TRIGGER = 200  # characters; CLIP reads 77 tokens, T5 512
FOREIGN_SHARE = 0.1  # of a text's letters, from which on it is told
T5_BLIND = "FLUX's text encoder T5 does not know {} characters and reads <unk> in their place"
_SCRIPTS = {
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "CYRILLIC": "all Cyrillic",
    "GREEK": "all Greek",  # its vocabulary has a part of them
}
HIGH_LR, LOW_LR = 1e-2, 2e-6  # LoRAs of FLUX diverge above the one, and hardly learn below the other
FINDS_LR = ("prodigy", "dadapt", "automagic")  # optimizers that choose their own steps
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
    """Refuse what gets into a path by mistake: `~`, which is not replaced, blanks, escapes, quotes. True if sound."""
    rule = ""
    if value.startswith("~"):
        rule = "~ is not replaced by the home folder; write the whole path, or ${HOME}/…"
    elif re.match(r"\$\w|%\w+%", value):
        rule = "environment variables are replaced only as ${NAME}; write it so, or write the whole path"
    elif re.search(r"[\t\r\n]", value):
        rule = "holds a tab or line break, as \\t and \\n make in double quotes; use single quotes, or / in paths"
    elif value[:1] in ("'", '"'):
        rule = "has quotes within the quotes; remove one pair"
    elif value != value.strip() and not Path(value).exists():
        rule = "starts or ends with a blank, and there is no such file; remove the blank"
    if rule:
        findings.add(path, rule, value)
    return not rule


def check_run(name: str | None, name_path: str, training_folder: str | None, path: str, findings: Findings) -> None:
    """Check name and place of a run; `path` is the process entry's key."""
    check_name(name, name_path, findings)
    at = f"{path}.training_folder"
    if check_folder(training_folder, at, findings) and findings.sound(name_path):
        folder = Path(str(training_folder)) / str(name)
        if folder.exists() and not folder.is_dir():
            findings.add(name_path, f"{folder} is a file, not a run's folder; write another, or move it away", name)


def foreign_script(text: str) -> tuple[float, str]:
    """How much of a text FLUX's T5 cannot read: its vocabulary has Latin letters and a part of the Cyrillic and Greek.

    Returns:
        (share of the letters, name of the most frequent such script), (0.0, "") where all are Latin.
    """
    letters = [unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha()]
    counts = Counter(
        name for name in letters if name not in ("LATIN", "FULLWIDTH", "MODIFIER", "FEMININE", "MASCULINE")
    )
    if not counts:
        return 0.0, ""
    name = counts.most_common(1)[0][0]
    return counts.total() / len(letters), _SCRIPTS.get(name, name.title())


def check_apart(training_folder: Any, name: str, folders: Iterable[Any], path: str, findings: Findings) -> None:
    """Refuse a run's folder below its photos, where samples and charts would be taken for photos.

    Args:
        training_folder: as written.
        name: of the run.
        folders: of photos.
        path: the key of the process entry.
        findings: receives the error.
    """
    key = f"{path}.training_folder"
    if not isinstance(training_folder, str) or not findings.sound(key):
        return
    run = Path(training_folder, name).resolve()
    for folder in folders:
        if isinstance(folder, str) and folder and (run / "x").is_relative_to(Path(folder).resolve()):
            rule = f"is inside the data set {folder}, so samples and charts would be trained on as photos"
            findings.add(key, f"{rule}; write a folder outside", training_folder)
            return


def check_trigger(trigger: str | None, prompts: Iterable[tuple[str, Any]], path: str, findings: Findings) -> None:
    """Refuse what is no trigger word, and warn of sample prompts that do not show what is trained.

    Args:
        trigger: the trigger word.
        prompts: (key, text) of each.
        path: the key of the process entry.
        findings: receives what is found.
    """
    key = f"{path}.trigger_word"
    if trigger and len(trigger) > MAX_TRIGGER:
        rule = f"goes into every caption, so at most {MAX_TRIGGER} characters; write one rare word"
        findings.add(key, rule, trigger)
    elif trigger == TRIGGER_TAG:
        findings.add(key, "is the placeholder for the trigger word; write the word itself", trigger)
    elif trigger and trigger != trigger.strip():
        findings.add(key, "starts or ends with a blank, so it is found in no caption; remove the blank", trigger)
    elif trigger and foreign_script(trigger)[0] > FOREIGN_SHARE:
        rule = f"{T5_BLIND.format(foreign_script(trigger)[1])}; write a rare word in Latin letters"
        findings.warn(key, rule, trigger)
    if not findings.sound(key):
        return
    for where, text in prompts:
        if not isinstance(text, str):
            continue
        share, script = foreign_script(text)
        if share > FOREIGN_SHARE:
            findings.warn(where, f"{T5_BLIND.format(script)}; write the prompt in English", text)
        if trigger and TRIGGER_TAG not in text and trigger not in text:
            rule = f"without the trigger word '{trigger}' a sample does not show the LoRA; write {TRIGGER_TAG} into it"
            findings.warn(where, rule, text)
        elif not trigger and TRIGGER_TAG in text:
            findings.warn(where, f"there is no trigger word for {TRIGGER_TAG}; write {path}.trigger_word", text)


def check_lr(lr: Any, optimizer: str, path: str, findings: Findings, *, given: bool) -> None:
    """Warn of a learning rate at which a LoRA diverges or hardly learns; `path` is the key of `train`."""
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or optimizer.startswith(FINDS_LR):
        return
    if lr > HIGH_LR:
        findings.warn(f"{path}.lr", f"LoRAs diverge with {optimizer} above about {HIGH_LR:g}; write 0.0001", lr)
    elif lr < LOW_LR:
        rule = "a LoRA hardly learns at so low a rate" + ("" if given else ", which is the default")
        findings.warn(f"{path}.lr", f"{rule}; write 0.0001", lr)


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
    elif extension.lower().rpartition(".")[2] in ("json", "jsonl", "csv"):
        rule = "captions are read as plain text, here with all braces and keys; write each one alone into a .txt file"
        findings.add(path, rule, extension)
    elif extension.lower().lstrip(".") in _IMAGES:
        findings.add(path, "is the extension of the images, not of their captions; write txt", extension)
