"""`coat-flux new`: what it writes passes `check`, fits the card or says that nothing does, and never overwrites."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from coat_flux.cli.entry import main
from coat_flux.plan.starter import PLACEHOLDER, made_up_word
from tests.reliability.bad_configs import check_job_file

SHAPES = ("long", "short", "wide", "slim")


def photos(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Photos that all look different, with captions."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = rng.integers(0, 255, (12, 9, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST).save(folder / f"{i}.jpg")
        (folder / f"{i}.txt").write_text(f'a "{SHAPES[i % 4]}" dress --x {i}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("new") / "Red dress: été", 16, (800, 1000))


def process(file: Path) -> dict:
    return yaml.safe_load(file.read_text(encoding="utf-8"))["config"]["process"][0]


@pytest.mark.parametrize(("gb", "origin", "fits"), [(2, "8gb", False), (16, "16gb", True)])
def test_writes_what_check_accepts(folder, tmp_path, capsys, monkeypatch, gb, origin, fits):
    if not fits:  # without the long search for changes that fit
        candidates = {f"flux_clothing_coat_{gb}gb.yaml": 0 for gb in (16, 8)}
        monkeypatch.setattr("coat_flux.plan.starter.CANDIDATES", candidates)
        monkeypatch.setattr("coat_flux.plan.cards.cheapest_changes", lambda *_: [])
    out = tmp_path / "first one.yaml"
    assert main(["new", str(folder), "--gpu", str(gb), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"flux_clothing_coat_{origin}.yaml" in text
    assert ("It needs " in text) == fits
    assert (f"no ready-made config fits a {gb} GB card" in text) != fits
    assert f"  coat-flux check {shlex.quote(str(out))}\n  coat-flux train {shlex.quote(str(out))}" in text
    made = process(out)
    assert made["datasets"][0]["folder_path"] == folder.as_posix()
    assert made["datasets"][0]["resolution"] == [512, 768]  # the photos are 894 x 894 by area
    assert made["train"]["steps"] * made["train"]["batch_size"] in (1600, 2000)  # at least 500 steps
    assert made["trigger_word"] == "rddrss"
    assert made["sample"]["prompts"][0].startswith('[trigger], a "long" dress x')
    assert [item.line() for item in check_job_file(out) if item.severity == "error"] == []


def test_never_overwrites(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("mine", encoding="utf-8")
    assert main(["new", str(folder), "--gpu", "24", "--out", str(out)]) == 2
    assert "is there already and is left as it is" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"


def test_without_photos_check_asks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "empty.yaml"
    assert main(["new", "--gpu", "16", "--trigger", "zxq", "--name", "skirt", "--out", str(out)]) == 0
    assert f"Put your photos' folder in place of {PLACEHOLDER}" in capsys.readouterr().out
    assert (process(out)["trigger_word"], process(out)["train"]["steps"]) == ("zxq", 1500)
    assert process(out)["datasets"][0]["folder_path"] == PLACEHOLDER


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--gpu", "24"], "nowhere: folder not found"),
        (["photos", "--gpu", "24"], "photos: has no photos"),
        (["--gpu", "24", "--name", "a/b", "--out", "x.yaml"], "config.name='a/b'"),
        (["--gpu", "24", "--out", "no/such/x.yaml"], "--out no/such/x.yaml: cannot be written (No such file"),
        (["--gpu", "nonsense"], "nonsense"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert main(["new", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "photos"]


def test_made_up_words() -> None:
    assert made_up_word("dungarees") == "dngrs"
    words = [made_up_word(name) for name in ("a", "été", "裙子", "")]
    assert all(len(word) == 4 and word.isascii() for word in words)
    assert made_up_word("裙子") == made_up_word("裙子") != made_up_word("帽子")
