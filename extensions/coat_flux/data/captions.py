"""Captions from sidecar text files, the trigger word, and token shuffling, with ai-toolkit's meaning of each."""

from __future__ import annotations

import os
import random
from pathlib import Path

from .errors import DatasetError, printable

PLACEHOLDERS = ("[trigger]", "[name]")
_MAX_BYTES = 1 << 20  # T5 takes 512 tokens, a few thousand characters


def caption_file(image_path: Path | str, caption_ext: str = ".txt") -> Path:
    """The sidecar of an image: same folder and stem, extension `caption_ext` (with or without its dot)."""
    image_path = Path(image_path)
    return image_path.with_name(f"{image_path.stem}.{caption_ext.lstrip('.')}")


def read_caption(image_path: Path | str, caption_ext: str = ".txt") -> str | None:
    """Caption of an image, without surrounding white space; None where there is no sidecar.

    Raises:
        DatasetError: the sidecar is not a text file in UTF-8, or cannot be opened.
    """
    path = caption_file(image_path, caption_ext)
    return _read_text(path).strip() if os.path.lexists(path) else None


def _read_text(path: Path) -> str:
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
    return text


def inject_trigger(caption: str, trigger_word: str | None, add_if_missing: bool = True) -> str:
    """Put the trigger word into a caption.

    Every `[trigger]` and `[name]` becomes the trigger word (nothing, where there is none). If the caption then does not
    contain the trigger word and `add_if_missing`, it is put in front.
    """
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
