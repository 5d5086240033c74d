"""Where a run is saved: writable, no links inside, room for its saves; asked before a model is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coat_flux.cli.check import check_outputs
from coat_flux.config.job_file import load_job_yaml
from coat_flux.saves.commit import SaveSpace, check_output, commit
from coat_flux.saves.repair import run_lock
from tests.architecture.sources import ROOT

SPACE = SaveSpace(lora=100_000_000, state=300_000_000, loras=4)


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = type(shutil.disk_usage("."))(0, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


def test_a_folder_that_can_be_written_stays_as_it_was(tmp_path: Path) -> None:
    assert check_output(tmp_path / "new" / "run") == ([], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    for folder in (Path("/proc/run"), tmp_path / "file" / "run", tmp_path / "nowhere" / "run"):
        (tmp_path / "file").touch()
        (tmp_path / "nowhere").unlink(missing_ok=True)
        (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
        (error,), warnings = check_output(folder)
        assert error.startswith(f"{folder.parent}: the run cannot be saved there (")
        assert error.endswith("make the folder writable for this user, or set training_folder to one that is")
        assert warnings == []


def test_the_room_is_told_before_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPACE.most == 1_400_000_000
    disk(monkeypatch, 300_000_000)
    (error,), _ = check_output(tmp_path, SPACE)
    assert ": one save takes 400.0 MB, 300.0 MB are free; free some of this disk, or set training_folder" in error
    disk(monkeypatch, 1_000_000_000)
    errors, (warning,) = check_output(tmp_path, SPACE)
    assert errors == []
    assert (
        "all that the run keeps takes 1.4 GB (4 LoRAs of 100.0 MB, 2 states, and a save being written), 1.0 GB are free"
        in warning
    )
    disk(monkeypatch, 1_500_000_000)
    assert check_output(tmp_path, SPACE) == ([], [])


def test_what_a_resumed_run_has_there_already_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "lora").write_bytes(bytes(3_000_000))

    commit(tmp_path, 1, write, {"run.safetensors": "lora"})
    space = SaveSpace(lora=3_000_000, state=0, loras=1)
    disk(monkeypatch, 3_000_000 + (4 << 20))
    _, (warning,) = check_output(tmp_path / "other", SaveSpace(3_000_000, 0, 2))
    assert "takes 9.0 MB" in warning
    assert check_output(tmp_path, space) == ([], [])


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_inside_a_run_folder_are_refused_or_replaced_and_one_to_it_is_fine(tmp_path: Path) -> None:
    real, run, mine = tmp_path / "disk2", tmp_path / "run", tmp_path / "mine"
    for folder in (real, mine):
        folder.mkdir()
    run.symlink_to(real, target_is_directory=True)
    assert check_output(run) == ([], [])
    (run / "coat").mkdir()
    (mine / "notes").write_text("mine", encoding="utf-8")
    (run / "coat" / "lock").symlink_to(mine / "notes")
    assert check_output(run) == ([], [])
    with run_lock(run):
        assert (mine / "notes").read_text(encoding="utf-8") == "mine"
    (run / "samples").symlink_to(mine, target_is_directory=True)
    (error,), _ = check_output(run)
    assert error.startswith(f"{run / 'samples'}: is a link to a folder")


def test_check_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    raw = load_job_yaml(ROOT / "configs" / "flux_clothing_tiny.yaml")
    raw["config"]["process"][0]["training_folder"] = str(tmp_path)
    raw["config"]["process"][0]["model"]["name_or_path"] = "black-forest-labs/FLUX.1-dev"
    for free, failed, line in ((1_000_000_000, False, "all that the run keeps"), (10_000_000, True, "one save takes")):
        disk(monkeypatch, free)
        assert check_outputs(raw, "file") == failed
        assert line in "".join(capsys.readouterr())
