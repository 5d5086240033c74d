"""`coat-flux sweep` with the real trainer: what it leaves is what the ranking reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coat_flux.cli.entry import main
from tests.helpers.engine_job import engine_job


def test_a_trial_of_the_real_trainer_is_ranked(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    job = engine_job("mine", **place, train={"steps": 9, "batch_size": 4})
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = ["sweep", str(path), "--set", "train.lr=1e-3", "--set", "train.steps=1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    folder = place["out"] / "mine_sweep"
    run = folder / "lr0.001_steps1_seed7"
    rows = [line.split(",") for line in (run / "coat" / "validation.csv").read_text().split()]
    assert [row[0] for row in rows] == ["step", "0", "1"]
    assert f"held-out loss {float(rows[-1][1]):.6f} at step 1 (1 of 1 finished)" in printed
    assert "Lowest held-out loss" in (folder / "report.html").read_text(encoding="utf-8")
    assert not (place["out"] / "mine").exists()
    assert main(command) == 0
    assert "1 trials, 1 of them finished" in capsys.readouterr().out
