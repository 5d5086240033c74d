"""When captions are warned about, and when they are left alone."""

from __future__ import annotations

import pytest

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.preflight import inspect_datasets
from tests.reliability.photos import jpeg, write


def warnings(folder, captions, trigger="ohwx", **settings) -> list[str]:
    for i, caption in enumerate(captions):
        write(folder / f"{i}.jpg", jpeg(seed=i))
        write(folder / f"{i}.txt", caption)
    report = inspect_datasets([DatasetSection(folder_path=str(folder), resolution=(64,), **settings)], trigger)
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
        (["一条红裙", "海边的红裙", "红裙，街上", "雨中红裙"], "红裙"),
        (["一条裙子", "街上", "在海边", "雨中"], None),
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
