"""Sidecar captions, trigger word, shuffling, and which captions are warned about."""

import random

import pytest

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.captions import inject_trigger, lint_captions, read_caption, shuffle_tokens
from coat_flux.data.preflight import DataReport
from tests.reliability.photos import jpeg, write


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
        (["[trigger], a red hat", "[trigger], a blue shoe", "[trigger], a bag", "[trigger], a belt"], "ohwx"),
        (["product photo, front view, white background"] * 4, "ohwx"),
        (["Señor Muñoz, Fjällräven, Łódź", "café, über, naïve"], "ohwx"),
        (["a blue hat", "blue sky and a hat", "the hat is blue", "hats are blue"], None),
        (["{first} {0} %s"] * 2, "{first}"),
    ],
)
def test_sound_captions_are_left_alone(tmp_path, captions, trigger):
    assert warnings(tmp_path, captions, trigger) == []


def test_captions_in_letters_t5_does_not_know_are_told_by_their_script(tmp_path):
    (line,) = warnings(tmp_path, ["ohwx dress at sea", "ohwx dress 在海边的街上"])
    assert line.startswith("1 captions are 40% in Chinese characters (first: that of 1.jpg)")
    (line,) = warnings(tmp_path / "other", ["فستان أحمر"], None)
    assert line.startswith("1 captions are 100% in Arabic characters")
    caption = {tmp_path / "1.jpg": "ohwx dress 在海边的街上"}
    assert lint_captions(tmp_path, caption, None, None, False) == [], "a model without T5"
