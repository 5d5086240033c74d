"""Captions from sidecar text files, the trigger word, and token shuffling, with ai-toolkit's meaning of each."""

from __future__ import annotations

import random
from pathlib import Path

from .errors import DatasetError

PLACEHOLDERS = ("[trigger]", "[name]")


def caption_file(image_path: Path | str, caption_ext: str = ".txt") -> Path:
    """The sidecar of an image: same folder and stem, extension `caption_ext` (with or without its dot)."""
    image_path = Path(image_path)
    return image_path.with_name(f"{image_path.stem}.{caption_ext.lstrip('.')}")


def read_caption(image_path: Path | str, caption_ext: str = ".txt", default_caption: str | None = None) -> str:
    """Caption of an image, without surrounding white space.

    A missing or blank sidecar gives `default_caption`, or "" where that is None (as ai-toolkit); `scan` counts and
    reports the missing ones.

    Raises:
        DatasetError: the sidecar is not UTF-8 text or cannot be opened.
    """
    path = caption_file(image_path, caption_ext)
    caption = ""
    if path.is_file():
        try:
            caption = path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{path}: byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8; "
                "save the caption as UTF-8 text"
            ) from error
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read ({error}); make the caption file readable") from error
    return caption or (default_caption or "").strip()


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
