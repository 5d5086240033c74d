"""Sidecar captions, trigger word, shuffling, and which captions are warned about."""

from __future__ import annotations

import random

import pytest

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.captions import caption_file, inject_trigger, lint_captions, read_caption, shuffle_tokens
from coat_flux.data.preflight import DataReport
from tests.reliability.photos import jpeg, write


@pytest.mark.parametrize("extension", [".txt", "caption"])
def test_sidecar_is_found_beside_the_image(tmp_path, extension):
    sidecar = tmp_path / f"red.dress.{extension.lstrip('.')}"
    sidecar.write_text("a red dress\n", encoding="utf-8")
    assert caption_file(tmp_path / "red.dress.jpg", extension) == sidecar
    assert read_caption(tmp_path / "red.dress.jpg", extension) == "a red dress"


def test_a_byte_order_mark_is_dropped_and_missing_and_blank_captions_differ(tmp_path):
    for text, caption in (("一条红裙子, robe d'été", "一条红裙子, robe d'été"), ("  \n", "")):
        (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
        assert read_caption(tmp_path / "a.jpg") == caption
    assert read_caption(tmp_path / "b.jpg") is None


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


def warnings(folder, captions, trigger="ohwx", **settings) -> list[str]:
    for i, caption in enumerate(captions):
        write(folder / f"{i}.jpg", jpeg(seed=i))
        write(folder / f"{i}.txt", caption)
    report = DataReport([DatasetSection(folder_path=str(folder), resolution=(64,), **settings)], trigger)
    assert report.errors == []
    return [line.removeprefix(f"{folder}: ") for line in report.warnings]


@pytest.mark.parametrize(
    ("captions", "trigger"),
    [
        (["ohwx jacket at sea", "ohwx jacket in rain", "a man in ohwx jacket", "ohwx jacket, night"], "ohwx"),
        (
            ["[trigger], a red hat", "[trigger], a blue shoe", "[trigger], a green bag", "[trigger], a white belt"],
            "ohwx",
        ),
        (["product photo, front view, white background"] * 4, "ohwx"),
        (["Señor Muñoz, Fjällräven, Łódź", "café, über, naïve"], "ohwx"),
        (["a blue hat", "blue sky and a hat", "the hat is blue", "hats are blue"], None),
        (["blue denim jacket"] * 3, "ohwx"),
        (["{first} {0} %s"] * 2, "{first}"),
    ],
)
def test_sound_captions_are_left_alone(tmp_path, captions, trigger):
    assert warnings(tmp_path, captions, trigger) == []


def test_words_that_most_captions_share_are_named_the_most_frequent_first(tmp_path):
    captions = [
        "ohwx, denim coat, sun",
        "ohwx, denim coat, rain",
        "ohwx, denim coat",
        "ohwx, denim coat",
        "ohwx, denim",
    ]
    (line,) = warnings(tmp_path, captions)
    assert line.startswith("nearly all captions say 'denim', 'coat'; ")


def test_a_default_caption_goes_on_without_sidecars(tmp_path):
    assert warnings(tmp_path, ["a", "b"], caption_ext="md", default_caption="a garment") == [
        "2 of 2 images have no .md caption (first: 0.jpg); they train with default_caption"
    ]


@pytest.mark.parametrize(
    ("captions", "script"),
    [
        (["一条红裙", "海边的红裙", "红裙，街上", "雨中红裙"], "Chinese"),
        (["فستان أحمر"], "Arabic"),
    ],
)
def test_captions_in_letters_t5_does_not_know_are_told_by_their_script(tmp_path, captions, script):
    (line,) = warnings(tmp_path, captions, None)
    assert line.startswith(f"{len(captions)} captions are 100% in {script} characters")
    assert f"T5 reads {script} characters as <unk>" in line


def test_only_the_captions_that_suffer_are_counted(tmp_path):
    (line,) = warnings(tmp_path, ["ohwx dress at sea", "ohwx dress 在海边的街上"])
    assert line.startswith("1 captions are 40% in Chinese characters (first: that of 1.jpg)")
    caption = {tmp_path / "1.jpg": "ohwx dress 在海边的街上"}
    assert lint_captions(tmp_path, caption, None, None, False) == [], "a model without T5"
