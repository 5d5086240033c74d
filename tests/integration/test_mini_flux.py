"""The shipped mini-FLUX: small, whole, and it draws what its prompt says."""

import importlib
from pathlib import Path

import torch

from coat_flux.mini_flux import EMBEDDED_MODEL, MINI_FLUX, provide_embedded
from tests.tolerances import MINI_FLUX_ACCURACY, MINI_FLUX_CHANCE

ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_made_where_a_config_means_it_and_a_folder_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    provide_embedded("models/another")
    assert not (tmp_path / "models").exists()
    provide_embedded(EMBEDDED_MODEL)
    folder = tmp_path / EMBEDDED_MODEL
    copied = files_of(folder)
    assert copied == files_of(MINI_FLUX)
    assert sum(map(len, copied.values())) < 25_000_000
    assert {Path(name).suffix for name in copied} == {".safetensors", ".json", ".txt"}  # no pickles
    assert list(folder.parent.iterdir()) == [folder]
    (folder / "model_index.json").write_text("mine")
    provide_embedded(EMBEDDED_MODEL)
    assert (folder / "model_index.json").read_text() == "mine"


def test_it_draws_what_unseen_prompts_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    samples, scorer = (importlib.import_module(f"mini_flux.{name}") for name in ("samples", "scorer"))
    items = samples.unseen_items(12, seed=1)
    pixels = samples.draw_prompts(samples.load_pipeline(MINI_FLUX), samples.prompts_of(items, seed=1))
    found = scorer.judge(scorer.load_scorer(), pixels)
    assert scorer.right(found, items).double().mean(0).min() >= MINI_FLUX_ACCURACY
    assert scorer.right(torch.roll(found, 1, dims=0), items).all(1).double().mean() <= MINI_FLUX_CHANCE
