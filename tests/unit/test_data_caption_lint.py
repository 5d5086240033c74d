"""When captions are warned about, and when they are left alone."""

from __future__ import annotations

import pytest

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.captions import lint_captions
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
        (["Señor Muñoz, Fjällräven, Łódź", "café, über, naïve"], "ohwx"),
        (["ohwx dress 🌸 “sakura”，2 m²"] * 2, "ohwx"),
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


# -- letters that T5 has no tokens for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captions", "script"),
    [
        (["一条红裙", "海边的红裙", "红裙，街上", "雨中红裙"], "Chinese"),
        (["赤いドレスのモデル", "ベランダのドレス"], "Japanese"),
        (["빨간 드레스", "바닷가"], "Korean"),
        (["красное платье", "на улице"], "all Cyrillic"),
        (["ชุดเดรสสีแดง"], "Thai"),
        (["فستان أحمر"], "Arabic"),
    ],
)
def test_captions_in_letters_t5_does_not_know_are_told_by_their_script(tmp_path, captions, script):
    (line,) = warnings(tmp_path, captions, None)
    assert line.startswith(
        f"{len(captions)} captions are 100% in {script.removeprefix('all ')} characters (first: that of "
    )
    assert f"T5 reads {script} characters as <unk>; write them in English" in line


def test_only_the_captions_that_suffer_are_counted(tmp_path):
    (line,) = warnings(tmp_path, ["ohwx dress at sea", "ohwx dress 在海边的街上"])
    assert line.startswith("1 captions are 40% in Chinese characters (first: that of 1.jpg)")
    caption = {tmp_path / "1.jpg": "ohwx dress 在海边的街上"}
    assert lint_captions(tmp_path, caption, None, None, None) == [], "a model without T5"


# -- captions that are there and not read -----------------------------------------------------------------------------


def errors(folder, **settings) -> list[str]:
    return inspect_datasets([DatasetSection(folder_path=str(folder), resolution=(64,), **settings)], "ohwx").errors


def test_captions_in_json_are_no_captions(tmp_path):
    warnings(tmp_path, ["ohwx a"])
    (tmp_path / "0.txt").unlink()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.jpg", "text": "ohwx a"}')
    (line,) = errors(tmp_path)
    assert "1 files may hold captions (first: metadata.jsonl), but only .txt is read" in line
    assert errors(tmp_path, default_caption="a garment") == []
