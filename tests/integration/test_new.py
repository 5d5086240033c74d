"""`coat-flux new`: what it writes passes `check`, fits the card or says that nothing does, and never overwrites."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from coat_flux.cli.entry import main
from coat_flux.data.images import read_photo
from coat_flux.plan.starter import PLACEHOLDER, made_up_word
from tests.reliability.bad_configs import check_job_file
from tests.reliability.photos import noise

PLACES = "door lamp tree shelf car window bench ladder fence chair river wall"
SHAPES = ("long", "short", "wide", "slim")


def photos(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Photos that all look different, with captions."""
    folder.mkdir()
    for i in range(count):
        noise(size, i).save(folder / f"{i}.jpg")
        (folder / f"{i}.txt").write_text(f'a "{SHAPES[i % 4]}" dress --x {i}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("new") / "Red dress: été", 16, (800, 1000))


def process(file: Path) -> dict:
    return yaml.safe_load(file.read_text(encoding="utf-8"))["config"]["process"][0]


@pytest.mark.parametrize(("gb", "origin", "fits"), [(2, "8gb", False), (16, "16gb", True)])
def test_writes_what_check_accepts_and_never_overwrites_it(folder, tmp_path, capsys, monkeypatch, gb, origin, fits):
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
    quoted = shlex.quote(str(out))
    assert [f"  coat-flux {step} {quoted}" for step in ("data", "check", "plan", "train")] == text.splitlines()[-4:]
    made = process(out)
    assert made["datasets"][0]["folder_path"] == folder.as_posix()
    assert made["datasets"][0]["resolution"] == [512, 768, 1024]  # `check` calls no photo of 894 x 894 small
    assert made["train"]["steps"] * made["train"]["batch_size"] in (1600, 2000)  # at least 500 steps
    assert made["trigger_word"] == "rddrss"
    assert made["sample"]["prompts"][0].startswith('[trigger], a "long" dress x')
    assert [item.line() for item in check_job_file(out)] == []
    written = out.read_bytes()
    assert main(["new", str(folder), "--gpu", "24", "--out", str(out)]) == 2
    assert "is there already and is left as it is" in capsys.readouterr().err
    assert out.read_bytes() == written


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--gpu", "24"], "nowhere: folder not found"),
        (["photos", "--gpu", "24"], "photos: has no photos"),
        (["--gpu", "24", "--name", "a/b", "--out", "x.yaml"], "config.name='a/b'"),
        (["--gpu", "cpu", "--out", "no/such/x.yaml"], "--out no/such/x.yaml: cannot be written (No such file"),
        (["--gpu", "nonsense"], "nonsense"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert main(["new", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "photos"]


def test_made_up_words():
    assert made_up_word("dungarees") == "dngrs"
    words = [made_up_word(name) for name in ("a", "été", "裙子", "")]
    assert all(len(word) == 4 and word.isascii() for word in words)
    assert made_up_word("裙子") == made_up_word("裙子") != made_up_word("帽子")
    other = made_up_word("dungarees", ["a Dngrs on a chair"])
    assert (other[:5], len(other)) == ("dngrs", 6)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve captioned photos of a handbag, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = photos(tmp_path / "bag", 12, (900, 1200))
    for i, place in enumerate(PLACES.split()):
        (folder / f"{i}.txt").write_text(f"[trigger], {SHAPES[i % 4]}, by a {place}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("card", "origin", "formats"),
    [
        ("24", "coat.yaml", ("auto", "e4m3", "e5m2")),
        ("5090", "coat.yaml", ("auto", "e4m3", "e5m2")),
        ("H100", "coat_80gb", ("e4m3", "e4m3", "e5m2")),
        ("3060 --ram 16", "coat_16gb", ("nvfp4", "e4m3", "e5m2")),  # coat_12gb takes 15.2 GB of CPU memory
        ("2080 Ti", "coat_12gb", ("auto", "e4m3", "e5m2")),
        ("A100 80GB", "coat_80gb", ("auto", "e4m3", "e5m2")),
        ("cpu", "tiny", ("e4m3", "e4m3", "e5m2")),
    ],
)
def test_the_format_is_one_the_card_multiplies_and_check_has_no_warning(plain, capsys, card, origin, formats):
    assert main(["new", "bag", "--gpu", *card.replace(" --ram", "|--ram").replace("ram ", "ram|").split("|")]) == 0
    text = capsys.readouterr().out
    assert f", from flux_clothing_{origin}" in text
    assert ("warning" in text) == ("capability 7.5" in text) == (card == "2080 Ti")
    made = process(Path("bag.yaml"))
    weight, activation = made["coat"]["weight"], made["coat"]["activation"]
    assert (weight["format"], activation["format"], activation["grad_format"]) == formats
    *of_captions, of_any = made["sample"]["prompts"]
    assert of_any == "[trigger], product photo on a white background"
    assert len(of_captions) == 3
    assert all(prompt.startswith("[trigger], ") for prompt in of_captions)
    assert main(["check", "bag.yaml", "--elsewhere"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_what_is_wrong_with_photos_and_model_is_said_by_new_data_and_check(plain, capsys):
    for i in range(3, 12):
        (plain / f"{i}.jpg").unlink()
        (plain / f"{i}.txt").unlink()
    for command in ("new bag --gpu 24", "data bag", "data bag.yaml", "check bag.yaml --elsewhere"):
        assert main(command.split()) == 0
        out = capsys.readouterr().out
        assert "datasets: 3 photos: " in out, command
        assert "model.name_or_path" not in out
    Path("bag.yaml").write_text(Path("bag.yaml").read_text("utf-8").replace("FLUX.1-dev ", "FLUX.1-schnell "), "utf-8")
    for command in ("data bag.yaml", "check bag.yaml --elsewhere"):
        assert main(command.split()) == 0
        assert "model.name_or_path" in capsys.readouterr().out, command  # a distilled model


HEIC = """
import sys
if sys.argv[1] == "without":
    sys.modules["pillow_heif"] = None
from coat_flux.cli.entry import main
sys.exit(main(["data", "bag"]))
"""


@pytest.mark.parametrize("reader", ["with", "without"])
def test_heic_is_read_with_pillow_heif_and_named_without(plain, reader):
    heif: Any = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    with Image.open(plain / "0.jpg") as photo:
        photo.save(plain / "0.heic", format="HEIF")
        photo.save(plain / "1.jpg", format="HEIF")
    (plain / "0.jpg").unlink()
    done = subprocess.run([sys.executable, "-c", HEIC, reader], capture_output=True, text=True, check=False)
    if reader == "with":
        assert done.returncode == 0, done.stderr
        assert "12 images, 12 captions" in done.stdout
        assert read_photo(plain / "0.heic")[0].size == (900, 1200)
    else:
        assert done.returncode == 2
        assert "(first: 0.heic); save them as one of .jpg, " in done.stdout
        assert "1.jpg: cannot be read as an image (it is HEIC, " in done.stderr


def test_without_photos_check_asks_for_them(tmp_path, capsys):
    out = tmp_path / "empty.yaml"
    assert main(["new", "--gpu", "16", "--trigger", "zxq", "--name", "skirt", "--out", str(out)]) == 0
    assert f"Put your photos' folder in place of {PLACEHOLDER}" in capsys.readouterr().out
    assert (process(out)["trigger_word"], process(out)["train"]["steps"]) == ("zxq", 1500)
    assert process(out)["datasets"][0]["folder_path"] == PLACEHOLDER


def test_a_given_trigger_word_of_the_captions_and_too_little_memory_are_said(plain, capsys):
    assert main(["new", "bag", "--gpu", "8", "--ram", "8", "--trigger", "long"]) == 0
    text = capsys.readouterr().out
    assert "trigger word long: is a word of 3 of 12 captions" in text
    assert "of CPU memory and there are 8.0" in text
