"""`coat-flux sweep` with the real trainer: what it leaves is what the ranking reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coat_flux.cli.entry import main
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux


def test_a_trial_of_the_real_trainer_is_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, model = write_images(tmp_path / "images", 3), make_tiny_flux(tmp_path / "tiny")
    job = engine_job("mine", model=model, images=images, out=tmp_path / "out", train={"steps": 9, "batch_size": 4})
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = ["sweep", str(path), "--set", "train.lr=1e-3", "--set", "train.steps=1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "out" / "mine_sweep"
    run = folder / "lr0.001_steps1_seed7"
    steps, losses = zip(
        *(line.split(",") for line in (run / "coat" / "validation.csv").read_text().split()), strict=True
    )
    assert steps == ("step", "0", "1")
    assert f"held-out loss {float(losses[-1]):.6f} at step 1 (1 of 1 finished)" in printed
    assert "Lowest held-out loss" in (folder / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "mine").exists()
    assert main(command) == 0
    assert "1 trials, 1 of them finished" in capsys.readouterr().out
