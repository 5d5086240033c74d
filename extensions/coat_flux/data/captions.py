"""Captions from sidecar text files, the trigger word, and token shuffling, with ai-toolkit's semantics.

Whatever captions name is not attributed to the trigger word: if all say "blue denim jacket", it stands for nothing
new. So they should name what changes from photo to photo, not the product.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.rules import FOREIGN_SHARE, T5_BLIND, foreign_script
from .files import DatasetError, Listing, counted, printable

SET_TRIGGER = "set trigger_word"
PLACEHOLDERS = ("[trigger]", "[name]")
_NO_CAPTION = "the trigger word alone, or nothing"
TEXT_EXTENSIONS = (".txt", ".caption", ".captions", ".cap", ".md", ".text", ".tag", ".tags", ".prompt")
_LISTS = (".json", ".jsonl", ".csv", ".parquet")  # captions of many photos in one file, as other trainers read them
_FEWEST, SHARED_BY = 4, 0.8  # fewer captions share words by chance; of the captions that say a word
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")  # Thai, Lao, Japanese, Chinese
# English grammar, and the usual subjects of product photos besides the product, which captions should name
_USUAL = frozenset(
    """
    and angle are back backdrop background body both boy camera catalog catalogue close closeup detail facing flat
    floor folded for from front girl hanger hanging has have her high his holding image indoor indoors into its laid
    lay left light lighting looking low lying man mannequin men model natural near not one onto outdoor outdoors
    over people person photo photograph photography picture plain posing product rear right shadow shot side sitting
    soft some standing street studio table that the their this three two under view walking wall wearing wears which
    while white who with without woman women worn
    """.split()  # noqa: SIM905 (a list of words reads better so)
)


def caption_file(image_path: Path | str, caption_ext: str = ".txt") -> Path:
    """The sidecar of an image: same folder and stem, extension `caption_ext` (with or without its dot)."""
    image_path = Path(image_path)
    return image_path.with_name(f"{image_path.stem}.{caption_ext.lstrip('.')}")


def read_caption(image_path: Path | str, caption_ext: str = ".txt") -> str | None:
    """The stripped caption of an image, None without sidecar; raises DatasetError if it is not UTF-8 text."""
    path = caption_file(image_path, caption_ext)
    if not os.path.lexists(path):
        return None
    name = printable(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{name}: byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8; "
            "save the caption as UTF-8 text"
        ) from error
    except OSError as error:
        raise DatasetError(f"{name}: cannot be read ({error.strerror}); make the caption file readable") from error
    if "\0" in text:
        raise DatasetError(f"{name}: contains zero bytes; save the caption as UTF-8 text")
    return text.strip()


def inject_trigger(caption: str, trigger_word: str | None, add_if_missing: bool = True) -> str:
    """Replace placeholders by the trigger word (or nothing); prepend it if missing and `add_if_missing`."""
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
    images, others = [*listing.images, *listing.media], listing.others
    sidecars = {path: caption_file(path, caption_ext) for path in images}
    missing = [path for path, sidecar in sidecars.items() if not os.path.lexists(sidecar)]
    if len(missing) == len(images) and not default_caption:
        stems = {path.with_suffix("") for path in images}
        texts = [path for path in others if path.suffix.lower() in TEXT_EXTENSIONS]
        extensions = Counter(path.suffix for path in texts if path.with_suffix("") in stems)
        if extensions:
            extension, count = extensions.most_common(1)[0]
            text = f"no image has a .{caption_ext} caption, but {count} have one in {extension}"
            return [f"{printable(folder)}: {text}; set caption_ext: {extension.lstrip('.')}"], []
        lists = [path for path in others if path.suffix.lower() in _LISTS]
        if lists:
            text = f"files may hold captions (first: {{first}}); write each caption to its own photo.{caption_ext}"
            return counted(folder, lists, text), []
    instead = "default_caption" if default_caption else _NO_CAPTION
    kind = "files" if listing.media else "images"
    text = f"of {len(images)} {kind} have no .{caption_ext} caption (first: {{first}}); they train with {instead}"
    warnings = counted(folder, missing, text)
    orphans = [path for path in others if path.name.endswith(f".{caption_ext}") and path not in sidecars.values()]
    text = f"caption files belong to no image (first: {{first}}); name them photo.{caption_ext} after photo.jpg"
    return [], warnings + counted(folder, orphans, text)


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
        text = f"captions use [trigger] or [name], which is removed; {SET_TRIGGER}"
        lines += counted(folder, holders, text)
        captions = [caption for caption in raw.values() if caption]
        spaced = not any(_UNSPACED.search(caption) for caption in captions)
        if not holders and spaced and len(captions) >= _FEWEST and not _shared_words(captions):
            text = f"the captions have no word in common, so nothing will call the product up; {SET_TRIGGER}"
            lines.append(f"{printable(folder)}: {text}")
        return lines

    whole = re.compile(rf"(?<!\w){re.escape(trigger_word)}(?!\w)", re.ASCII)  # Chinese has no spaces between words
    unlike = []
    for path, caption in raw.items():
        if trigger_word.lower() in caption.lower() and not whole.search(caption):
            unlike.append(path)
    text = (
        f"captions have the trigger word '{printable(trigger_word)}' only within another word or with other capitals "
        "(first: {first}); write [trigger] in its place, or choose a rarer trigger_word"
    )
    lines += counted(folder, unlike, text)

    captions = []
    for caption in filter(None, raw.values()):
        caption = inject_trigger(caption, trigger_word, add_if_missing=False)
        captions.append(re.sub(rf"{re.escape(trigger_word)}(\s+\w+)?", " ", caption))  # and a noun, as in "ohwx jacket"
    words = _shared_words(captions) if len(captions) >= _FEWEST else []
    if words:
        named = ", ".join(f"'{printable(word)}'" for word in words[:8])
        lines.append(
            f"{printable(folder)}: nearly all captions say {named}; leave out what belongs to the product, or it is "
            "learnt for these words and not for the trigger word"
        )
    return lines


def _shared_words(captions: Sequence[str]) -> list[str]:
    """Words of three letters or more in nearly all captions, the most frequent first."""
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(set(re.findall(r"[^\W\d_]{3,}", caption.lower())) - _USUAL)
    shared = [word for word, count in counts.items() if count >= SHARED_BY * len(captions)]
    return sorted(shared, key=lambda word: (-counts[word], word))
