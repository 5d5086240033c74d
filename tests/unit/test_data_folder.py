"""Captions, trigger word and which captions are warned of; report, contact sheet and exit code of `coat-flux data`."""

import random

import numpy as np
import pytest
import yaml
from PIL import Image

from coat_flux.cli.entry import main
from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.captions import inject_trigger, lint_captions, read_caption, shuffle_tokens
from coat_flux.data.preflight import DataReport
from tests.helpers.engine_job import engine_job
from tests.reliability.photos import good_folder, jpeg, write


def run(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_a_good_folder_is_reported_and_drawn(tmp_path, capsys):
    folder = good_folder(tmp_path / "photos")  # 3 photos, which are few
    sheet = tmp_path / "sheets" / "a.png"
    assert run(folder, "--resolution", 64, "--trigger", "ohwx", "--sheet", sheet) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"datasets[0].folder_path={folder}: 3 images, 3 captions"
    assert [line.split(":")[1] for line in out if line.startswith(("warning", "error"))] == [" datasets"]
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert (pixels == (0, 160, 64)).all(axis=-1).sum() > 3 * 4 * 60  # green frames


def test_errors_are_printed_counted_and_drawn(tmp_path, capsys, monkeypatch):
    folder = good_folder(tmp_path / "photos")
    write(folder / "bad.jpg", b"")
    write(folder / "good1.txt", "a [trigger]")
    monkeypatch.chdir(tmp_path)
    assert run(folder) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {folder / 'bad.jpg'}: cannot be read as an image (it is not JPEG, PNG or WebP")
    assert ("warning: " in captured.out, "trigger_word" in captured.out) == (True, False)  # a YAML may have one
    assert (tmp_path / "output" / "data" / "photos.png").is_file()
    assert run(tmp_path / "nowhere") == 2
    assert "folder not found" in capsys.readouterr().err


def test_a_yaml_says_everything_itself(tmp_path, capsys):
    folder = good_folder(tmp_path / "photos")
    write(folder / "c.jpg", jpeg(seed=4))
    job = engine_job(
        "shirt", model=tmp_path / "m", images=folder, out=tmp_path / "out", coat={"data": {"background": "black"}}
    )
    path = write(tmp_path / "job.yaml", yaml.safe_dump(job))
    sheet = tmp_path / "sheet.png"
    assert run(path, "--sheet", sheet) == 0
    out = capsys.readouterr().out
    assert "4 images, 3 captions" in out
    assert "warning: " in out
    assert sheet.is_file()
    assert run(path, "--resolution", 64) == 2
    assert "error: --resolution: " in capsys.readouterr().err
    assert run(write(tmp_path / "empty.yaml", "")) == 2
    assert run(folder, "--sheet", tmp_path / "sheet.what") == 2
    assert "--sheet" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(folder, "--resolution", "12")
    assert "from 32 to 8192" in capsys.readouterr().err


def test_a_byte_order_mark_is_dropped_and_missing_and_blank_captions_differ(tmp_path):
    for text, caption in (("一条红裙子, robe d'été", "一条红裙子, robe d'été"), ("  \n", "")):
        (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
        assert read_caption(tmp_path / "a.jpg") == caption
    assert read_caption(tmp_path / "b.jpg") is None


def test_inject_trigger():
    for caption, trigger, add, expected in (
        ("[name] and [trigger]", "ohwx", True, "ohwx and ohwx"),
        ("a blue shirt", "ohwx", True, "ohwx a blue shirt"),
        ("a blue shirt", "ohwx", False, "a blue shirt"),
        ("an ohwx shirt", "ohwx", True, "an ohwx shirt"),
        ("", "ohwx", True, "ohwx"),
        ("[trigger] shirt", None, True, "shirt"),
        ("a blue shirt", None, True, "a blue shirt"),
    ):
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
        (["blue denim jacket"] * 3, "ohwx"),
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
