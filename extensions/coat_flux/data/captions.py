"""Captions from sidecar text files, the trigger word, and token shuffling, with ai-toolkit's semantics."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..config.rules import FOREIGN_SHARE, T5_BLIND, foreign_script
from .files import DatasetError, Listing, counted, printable

PLACEHOLDERS = ("[trigger]", "[name]")
_MAX_BYTES = 1 << 20  # T5 takes 512 tokens, a few thousand characters
_NO_CAPTION = "the trigger word alone, or nothing"
_TEXT_EXTENSIONS = (".txt", ".caption", ".captions", ".cap", ".md", ".text", ".tag", ".tags", ".prompt")
_LISTS = (".json", ".jsonl", ".csv", ".parquet")  # captions of many photos in one file, as other trainers read them


def caption_file(image_path: Path | str, caption_ext: str = ".txt") -> Path:
    """The sidecar of an image: same folder and stem, extension `caption_ext` (with or without its dot)."""
    image_path = Path(image_path)
    return image_path.with_name(f"{image_path.stem}.{caption_ext.lstrip('.')}")


def read_caption(image_path: Path | str, caption_ext: str = ".txt") -> str | None:
    """The stripped caption of an image, None without sidecar; raises DatasetError if it is unreadable or not UTF-8."""
    path = caption_file(image_path, caption_ext)
    if not os.path.lexists(path):
        return None
    name = printable(path)
    if path.exists() and not path.is_file():
        raise DatasetError(f"{name}: is not a file, but has a caption's name; remove it, or rename it")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DatasetError(f"{name}: is too large for a caption ({path.stat().st_size} bytes); remove it")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{name}: byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8; "
            "save the caption as UTF-8 text"
        ) from error
    except OSError as error:
        raise DatasetError(f"{name}: cannot be read ({error.strerror}); make the caption file readable") from error
    if "\0" in text:
        raise DatasetError(f"{name}: contains zero bytes, it is UTF-16 or not text; save the caption as UTF-8 text")
    return text.strip()


def inject_trigger(caption: str, trigger_word: str | None, add_if_missing: bool = True) -> str:
    """Replace `[trigger]` and `[name]` by the trigger word (or nothing); prepend it if missing and `add_if_missing`."""
    trigger = trigger_word or ""
    for placeholder in PLACEHOLDERS:
        caption = caption.replace(placeholder, trigger)
    if add_if_missing and trigger.strip() and trigger not in caption:
        caption = f"{trigger} {caption}"
    return caption.strip()


def shuffle_tokens(caption: str, rng: random.Random) -> str:
    """The comma-separated parts of a caption in random order, each stripped, joined by ", "."""
    tokens = [token.strip() for token in caption.split(",")]
    rng.shuffle(tokens)
    return ", ".join(token for token in tokens if token)


def lint_files(
    folder: Path, listing: Listing, caption_ext: str, default_caption: str | None
) -> tuple[list[str], list[str]]:
    """Errors and warnings about missing or stray captions, one line each; `caption_ext` without its dot."""
    images, others = listing.images, listing.others
    sidecars = {path: caption_file(path, caption_ext) for path in images}
    missing = [path for path, sidecar in sidecars.items() if not os.path.lexists(sidecar)]
    if len(missing) == len(images) and not default_caption:
        stems = {path.with_suffix("") for path in images}
        texts = [path for path in others if path.suffix.lower() in _TEXT_EXTENSIONS]
        extensions = Counter(path.suffix for path in texts if path.with_suffix("") in stems)
        if extensions:
            extension, count = extensions.most_common(1)[0]
            text = f"no image has a .{caption_ext} caption, but {count} have one in {extension}"
            return [f"{printable(folder)}: {text}; set caption_ext: {extension.lstrip('.')}"], []
        lists = [path for path in others if path.suffix.lower() in _LISTS]
        if lists:
            text = f"files may hold captions (first: {{first}}), but only .{caption_ext} is read; write each caption "
            return counted(folder, lists, f"{text}into a text file of its own, photo.{caption_ext}"), []
    instead = "default_caption" if default_caption else _NO_CAPTION
    text = f"of {len(images)} images have no .{caption_ext} caption (first: {{first}}); they train with {instead}"
    warnings = counted(folder, missing, text)
    orphans = [path for path in others if path.name.endswith(f".{caption_ext}") and path not in sidecars.values()]
    text = "caption files belong to no image (first: {first}); rename them after their images (photo.jpg, "
    return [], warnings + counted(folder, orphans, f"{text}photo.{caption_ext}), or remove them")


def lint_captions(
    folder: Path,
    raw: Mapping[Path, str],
    trigger_word: str | None,
    default_caption: str | None,
    reads_t5: bool = True,
) -> list[str]:
    """Warnings about the content of captions, one line each; `reads_t5`: FLUX's T5 encodes them."""
    empty = [path for path, caption in raw.items() if not caption]
    instead = "default_caption" if default_caption else _NO_CAPTION
    lines = counted(folder, empty, f"captions are empty (first: that of {{first}}); they train with {instead}")
    scripts = {path: foreign_script(caption) for path, caption in raw.items()} if reads_t5 else {}
    unread = [path for path, (share, _) in scripts.items() if share > FOREIGN_SHARE]
    if unread:
        script = Counter(scripts[path][1] for path in unread).most_common(1)[0][0]
        mean = sum(scripts[path][0] for path in unread) / len(unread)
        text = f"captions are {mean:.0%} in {script} characters (first: that of {{first}}): {T5_BLIND.format(script)}"
        lines += counted(folder, unread, f"{text}; write them in English")
    if not trigger_word:
        holders = [path for path, caption in raw.items() if any(holder in caption for holder in PLACEHOLDERS)]
        text = "captions use [trigger] or [name] but trigger_word is not set; the placeholder is removed"
        return lines + counted(folder, holders, f"{text}, set trigger_word")

    whole = re.compile(rf"(?<!\w){re.escape(trigger_word)}(?!\w)", re.ASCII)  # Chinese has no spaces between words
    inside, cased = [], []
    for path, caption in raw.items():
        if trigger_word in caption and not whole.search(caption):
            inside.append(path)
        elif trigger_word not in caption and trigger_word.lower() in caption.lower():
            cased.append(path)
    shown = printable(trigger_word)
    lines += counted(
        folder,
        inside,
        f"captions hold the trigger word '{shown}' only within another word (first: {{first}}), so it is not put in "
        "front; choose a rarer trigger_word, or write [trigger] into them",
    )
    return lines + counted(
        folder,
        cased,
        f"captions write the trigger word '{shown}' with other capitals (first: {{first}}) and get it a second time; "
        "write it alike",
    )
