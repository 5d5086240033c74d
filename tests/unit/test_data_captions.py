"""Sidecar captions, trigger word, shuffling."""

from __future__ import annotations

import random

import pytest

from coat_flux.data.captions import caption_file, inject_trigger, read_caption, shuffle_tokens


@pytest.mark.parametrize("extension", [".txt", "txt", "caption"])
def test_sidecar_is_found_beside_the_image(tmp_path, extension):
    sidecar = tmp_path / f"red.dress.{extension.lstrip('.')}"
    sidecar.write_text("a red dress\n", encoding="utf-8")
    assert caption_file(tmp_path / "red.dress.jpg", extension) == sidecar
    assert read_caption(tmp_path / "red.dress.jpg", extension) == "a red dress"


def test_byte_order_mark_and_other_scripts(tmp_path):
    (tmp_path / "a.txt").write_bytes("一条红裙子, robe d'été".encode("utf-8-sig"))
    assert read_caption(tmp_path / "a.jpg") == "一条红裙子, robe d'été"


@pytest.mark.parametrize(("content", "expected"), [(None, None), ("", ""), ("  \n", "")])
def test_missing_and_blank_captions_differ(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "a.txt").write_text(content)
    assert read_caption(tmp_path / "a.jpg", ".txt") == expected


@pytest.mark.parametrize(
    ("caption", "trigger", "add", "expected"),
    [
        ("a photo of [trigger] shirt", "ohwx", True, "a photo of ohwx shirt"),
        ("[name] and [trigger]", "ohwx", True, "ohwx and ohwx"),
        ("a blue shirt", "ohwx", True, "ohwx a blue shirt"),
        ("a blue shirt", "ohwx", False, "a blue shirt"),
        ("an ohwx shirt", "ohwx", True, "an ohwx shirt"),
        ("", "ohwx", True, "ohwx"),
        ("[trigger] shirt", None, True, "shirt"),
        ("[trigger] shirt", "", True, "shirt"),
        ("a blue shirt", None, True, "a blue shirt"),
    ],
)
def test_inject_trigger(caption, trigger, add, expected):
    assert inject_trigger(caption, trigger, add) == expected


def test_shuffle_keeps_the_tokens_and_follows_the_seed():
    caption = "red, long sleeves ,, studio light, front view"
    first, again, other = (shuffle_tokens(caption, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first.split(", ")) == ["front view", "long sleeves", "red", "studio light"]
