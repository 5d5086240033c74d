"""The usual ways in which a folder of photos and captions is wrong, and what is to be said of each."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.photos import (
    animation,
    broken_link,
    caption,
    caption_folder,
    captions,
    copies,
    cutout,
    emptied,
    encoded,
    extra,
    flipped,
    half,
    image,
    jpeg,
    linked_cache,
    linked_folder,
    noise,
    pipe,
    png,
    removed,
    renamed,
    replaced_by_a_file,
    settings,
    twins,
    wide,
    with_chunk,
)

TRIGGER = "ohwx"
needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="names and files that Windows does not have")


@dataclass(frozen=True)
class Bad:
    """One malformed dataset.

    Attributes:
        name: Of the case.
        make: Spoils a folder that is good; may return settings of the dataset or of the pre-flight to change.
        says: What the finding says; the first is its file.
        error: Whether training is refused.
        trigger: The job's trigger word.
    """

    name: str
    make: Callable[[Path], dict[str, Any] | None]
    says: tuple[str, ...]
    error: bool = True
    trigger: str | None = TRIGGER
    marks: tuple[pytest.MarkDecorator, ...] = ()


def refused(
    name: str, make: Callable[[Path], dict[str, Any] | None], *says: str, marks: tuple[pytest.MarkDecorator, ...] = ()
) -> Bad:
    """A case that training is refused for."""
    return Bad(name, make, says, marks=marks)


def warned(
    name: str,
    make: Callable[[Path], dict[str, Any] | None],
    *says: str,
    trigger: str | None = TRIGGER,
    marks: tuple[pytest.MarkDecorator, ...] = (),
) -> Bad:
    """A case that training goes on with."""
    return Bad(name, make, says, error=False, trigger=trigger, marks=marks)


PLAIN_PNG = encoded(noise(seed=5), "PNG")
BIG_ROWS = b"\0" * 1000
CASES = [
    # files that are no image
    refused("zero bytes", image("bad.jpg", b""), "bad.jpg", "the file is empty", "or remove it"),
    refused("text", image("bad.jpg", "a red dress"), "bad.jpg", "not JPEG, PNG or WebP", "or remove it"),
    refused("web page", image("bad.png", "<!DOCTYPE html><p>403"), "bad.png", "web page", "or remove it"),
    refused("lfs", image("bad.jpg", "version https://git-lfs.github.com/spec/v1"), "bad.jpg", "Git LFS pointer"),
    refused("heic as jpg", image("bad.jpg", b"\0\0\0\x18ftypheic" + bytes(20)), "bad.jpg", "HEIC", "save it again"),
    refused("gif as jpg", image("bad.jpg", encoded(noise(), "GIF")), "bad.jpg", "it is a GIF", "save it again"),
    refused("random bytes", image("bad.webp", b"\x93\x01\xfe" * 50), "bad.webp", "not JPEG, PNG or WebP"),
    # damaged images
    refused("half a jpeg", image("bad.jpg", half(jpeg())), "bad.jpg", "truncated", "or remove it"),
    refused("half a png", image("bad.png", half(PLAIN_PNG)), "bad.png", "truncated", "or remove it"),
    refused("jpeg header", image("bad.jpg", jpeg()[:20]), "bad.jpg", "cannot be read", "or remove it"),
    refused("png pixels", image("bad.png", flipped(PLAIN_PNG, 400)), "bad.png", "cannot be read", "or remove it"),
    refused("png too few rows", image("bad.png", png(64, 64, 8, 2, b"\0" * 400)), "bad.png", "truncated"),
    # images that cannot be trained on
    refused("bomb", image("bad.png", png(30000, 30000, 1, 0, BIG_ROWS)), "bad.png", "too large to be read", "smaller"),
    refused("lying header", image("bad.png", png(9000, 9000, 1, 0, BIG_ROWS)), "bad.png", "truncated", "or remove it"),
    refused(
        "text bomb",
        image("bad.png", with_chunk(PLAIN_PNG, b"zTXt", b"a\0\0" + zlib.compress(bytes(9**8)))),
        "bad.png",
        "cannot be read",
        "save it again",
    ),
    refused("animated png", image("bad.png", animation("PNG")), "bad.png", "animation of 2 frames", "save the frame"),
    refused(
        "animated webp", image("bad.webp", animation("WEBP")), "bad.webp", "animation of 2 frames", "save the frame"
    ),
    refused("tracking pixel", image("bad.png", encoded(noise((1, 1)), "PNG")), "bad.png", "1x1 pixels", "remove it"),
    refused("all transparent", image("bad.png", cutout(0)), "bad.png", "transparent all over", "export it again"),
    # files that are not files
    refused(
        "broken link", broken_link, "bad.jpg", "a link that leads nowhere", "put the image there", marks=(needs_links,)
    ),
    refused("pipe", pipe("bad.jpg"), "bad.jpg", "not a regular file", "remove it", marks=(needs_posix,)),
    refused(
        "cache elsewhere", linked_cache, "_coat_cache", "is a link", "replace it by a folder", marks=(needs_links,)
    ),
    # folders
    refused("no folder", removed, "photos", "there is no such folder", "make it and put images"),
    refused("a file", replaced_by_a_file, "photos", "this is a file, not a folder", "correct the path"),
    refused("empty folder", emptied, "photos", "the folder has no images", "put images"),
    refused(
        "only captions",
        lambda f: [p.unlink() for p in f.glob("*.jpg")] and None,
        "photos",
        "has no images",
        "put images",
    ),
    # captions
    refused(
        "latin-1", caption("robe d'été".encode("latin-1")), "good1.txt", "0xe9 at offset 7", "save the caption as UTF-8"
    ),
    refused("utf-16", caption("ohwx".encode("utf-16")), "good1.txt", "is not UTF-8", "save the caption as UTF-8"),
    refused("utf-16 without mark", caption("ohwx".encode("utf-16-le")), "good1.txt", "zero bytes", "as UTF-8 text"),
    refused("a book as caption", caption("ohwx " * 300_000), "good1.txt", "too large for a caption", "remove it"),
    refused("folder as caption", caption_folder, "good1.txt", "not a file", "remove it, or rename it"),
    refused("all captions .caption", renamed(".caption"), "photos", "3 have one in .caption", "caption_ext: caption"),
    refused("all captions .md", renamed(".md"), "photos", "no image has a .txt caption", "set caption_ext: md"),
    # warnings: training goes on, and says what is doubtful
    warned(
        "no caption",
        lambda f: (f / "good1.txt").unlink(),
        "photos",
        "1 of 3 images have no .txt caption (first: good1.jpg)",
    ),
    warned("empty caption", caption(""), "photos", "1 captions are empty (first: that of good1.jpg)"),
    warned("caption without image", extra("other.txt", "x"), "photos", "belong to no image (first: other.txt)"),
    warned(
        "photo.jpg.txt",
        extra("good1.jpg.txt", "x"),
        "photos",
        "belong to no image (first: good1.jpg.txt)",
    ),
    warned(
        "[trigger] without word",
        captions("a [trigger]", "one [name]"),
        "photos",
        "2 captions use [trigger]",
        "set trigger_word",
        trigger=None,
    ),
    warned(
        "nothing in common",
        captions("red hat", "blue sky", "big tree", "old car"),
        "photos",
        "no word in common",
        "set trigger_word",
        trigger=None,
    ),
    warned(
        "trigger in a word",
        captions("a foxglove", "the fox runs"),
        "photos",
        "only within another word (first: good0.jpg)",
        "rarer trigger_word",
        trigger="fox",
    ),
    warned(
        "other capitals",
        captions("a photo of Ohwx", "ohwx by the sea"),
        "photos",
        "other capitals (first: good0.jpg)",
        "write it alike",
    ),
    warned(
        "captions of the garment",
        captions(*(f"ohwx, blue denim jacket {where}" for where in ("at sea", "in rain", "on snow", "by night"))),
        "photos",
        "'blue', 'denim', 'jacket'",
        "leave it out of the captions",
    ),
    warned("near duplicate", copies, "photos", "nearly the same as another (first: good0.jpg, like copy.png)"),
    warned("same stem", twins, "photos", "good1.jpg and good1.png share one caption", "rename all but one"),
    warned(
        "too small", settings(resolution=(512,)), "photos", "3 images are small for resolution 512", "trains at 64x64"
    ),
    warned("enlarged", settings(resolution=(512,), buckets=False), "photos", "are enlarged", "trains at 512x512"),
    warned("a strip", wide, "photos", "lose more than 25% of their area", "first: bad.jpg"),
    warned("phone photos", extra("IMG_1.HEIC"), "photos", "1 images are not read (first: IMG_1.HEIC)", "save them as"),
    warned(
        "linked folder",
        linked_folder,
        "more",
        "link to a folder, which is not entered",
        "of its own",
        marks=(needs_links,),
    ),
    warned(
        "broken profile",
        image("bad.jpg", jpeg(seed=8, icc_profile=b"x")),
        "bad.jpg",
        "colour profile cannot be used",
        "save it again as sRGB",
    ),
    warned(
        "cmyk",
        image("bad.jpg", encoded(noise(seed=8).convert("CMYK"), "JPEG")),
        "bad.jpg",
        "CMYK without",
        "save it again as sRGB",
    ),
    warned(
        "mask without alpha", settings(transparency="mask"), "coat.data.transparency=mask", "no photo has transparent"
    ),
]
