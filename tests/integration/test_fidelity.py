"""A LoRA of a red garment: its colour comes nearer to held-out photos while it trains, and not to a blue one's."""

import importlib
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from coat_flux.cli.entry import main
from coat_flux.data.cache import encode_latents
from coat_flux.data.fidelity import Redrawn
from coat_flux.data.images import to_tensor
from coat_flux.mini_flux import MINI_FLUX
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.trainers.standalone.validation import redraw

STEPS = 30
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def red_garments(folder: Path, pictures: Any, count: int = 8) -> Path:
    """Cut-outs of 64 px, whose captions do not name the colour."""
    folder.mkdir()
    rng, item = random.Random(0), pictures.Item(pictures.HELD_OUT, "red", "plain", "white")
    for number in range(count):
        pictures.draw(item, (64, 64), rng, cut_out=True).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a [trigger], product photo\n", encoding="utf-8")
    return folder


def test_data_says_what_the_vae_can_draw_at_best(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    photos = red_garments(tmp_path / "red", importlib.import_module("mini_flux.pictures"), 4)
    job = importlib.import_module("mini_flux.experiment").make_job(MINI_FLUX, photos, tmp_path, steps=1, coat={})
    job["config"]["process"][0]["validation"] = {"hold_out": ["1.png", "3.png"], "fidelity": True}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    assert main(["check", "job.yaml"]) == 0
    assert "coat-flux data job.yaml says " in capsys.readouterr().out
    assert main(["data", "job.yaml"]) == 0
    found = re.findall(r"  (\d)\.png: ΔE (\S+) \(95 %: \S+\), texture \S+", capsys.readouterr().out)
    assert [name for name, _ in found] == ["1", "3"]
    assert all(0.5 < float(colour) < 15 for _, colour in found)
    job["config"]["process"][0]["model"]["name_or_path"] = "black-forest-labs/FLUX.1-dev"
    Path("job.yaml").write_text(yaml.safe_dump(job))
    assert main(["data", "job.yaml"]) == 0
    assert "black-forest-labs/FLUX.1-dev: its VAE is not here" in capsys.readouterr().out


def differs(worse: list[Any], better: list[Any]) -> bool:
    """Whether colours of the same draws differ by more than twice the standard error of the difference."""
    differences = [one[0] - other[0] for one, other in zip(worse, better, strict=True)]
    return statistics.fmean(differences) > 2 * statistics.stdev(differences) / math.sqrt(len(differences))


def test_colour_comes_nearer_to_the_garment_and_not_to_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    photos = red_garments(tmp_path / "red", importlib.import_module("mini_flux.pictures"))
    job = importlib.import_module("mini_flux.experiment").make_job(
        MINI_FLUX, photos, tmp_path / "out", steps=STEPS, coat={"memory": {"checkpointing": "none"}}, lr=2e-3, batch=2
    )
    job["config"]["process"][0]["validation"] = {"hold_out": 2, "every": 1000, "fidelity": True}
    seen: list[Any] = []
    COATTrainer(job, observer=seen.append).train()
    session = seen[-1]
    red = session.redrawn
    (_, before), (_, after) = red.record["saves"]
    assert all(not subject.mask.all() and subject.mask.any() for subject in red.subjects)
    assert differs(before, after)
    assert statistics.fmean(draw[0] for draw in red.record["vae"]) < red.mean().colour

    subjects = []
    for subject in red.subjects:
        picture = np.ascontiguousarray(subject.picture[..., ::-1])  # blue in place of red
        latents = encode_latents(session.vae, to_tensor(picture)[None])[0]
        subjects.append(subject._replace(picture=picture, inputs={**subject.inputs, "latents": latents}))
    blue = Redrawn(subjects, None)
    session.transformer.eval()
    redraw(blue, STEPS, session.transformer, session.vae, dtype=session.dtype, device=torch.device("cpu"))
    assert differs(blue.record["saves"][-1][1], after)
