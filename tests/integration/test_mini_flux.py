"""The shipped mini-FLUX: small, whole, copied to where configs name it, and it draws what its prompt says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from coat_flux.mini_flux.folder import EMBEDDED_MODEL, MARKER_NAME, MINI_FLUX, make_mini_flux, provide_embedded
from tests.tolerances import MINI_FLUX_ACCURACY, MINI_FLUX_CHANCE

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 25_000_000
PROMPTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_mini_flux(tmp_path_factory.mktemp("models") / "mini")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_small_and_holds_no_pickle():
    files = files_of(MINI_FLUX)
    assert sum(map(len, files.values())) < MOST_BYTES
    assert {Path(name).suffix for name in files} == {".safetensors", ".json", ".txt"}
    assert len([name for name in files if name.endswith(".safetensors")]) == 4


def test_the_copy_is_the_shipped_one_and_is_made_once(folder):
    copied = files_of(folder)
    copied.pop(MARKER_NAME)
    assert copied == files_of(MINI_FLUX)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert make_mini_flux(folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_damaged_copy_is_made_again(tmp_path):
    folder = make_mini_flux(tmp_path / "mini")
    (folder / "vae" / "config.json").unlink()
    make_mini_flux(folder)
    assert (folder / "vae" / "config.json").is_file()


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "model.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another folder"):
        make_mini_flux(tmp_path)
    assert (tmp_path / "model.txt").read_text() == "mine"


def test_a_config_that_names_it_gets_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    provide_embedded("models/another")
    assert not (tmp_path / "models").exists()
    provide_embedded(EMBEDDED_MODEL)
    assert (tmp_path / EMBEDDED_MODEL / "model_index.json").is_file()


def test_it_draws_what_unseen_prompts_say(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        samples, scorer = importlib.import_module("mini_flux.samples"), importlib.import_module("mini_flux.scorer")
    items = samples.unseen_items(PROMPTS, seed=1)
    pixels = samples.draw_prompts(samples.load_pipeline(folder), samples.prompts_of(items, seed=1))
    found = scorer.judge(scorer.load_scorer(), pixels)
    assert scorer.right(found, items).double().mean(0).min() >= MINI_FLUX_ACCURACY
    others = torch.roll(found, 1, dims=0)
    assert scorer.right(others, items).all(1).double().mean() <= MINI_FLUX_CHANCE
