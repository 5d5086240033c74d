"""Weights & Biases in the stand-alone trainer: offline for real, missing, and broken."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coat_flux.config.findings import ConfigError
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.engine_job import FEW_LINEARS, engine_job, tiny_place


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    with tiny_place(tmp_path, 1) as place:
        train = {"steps": 1, "disable_sampling": False}
        made = engine_job("run", **{**place, "out": tmp_path}, train=train, network=FEW_LINEARS)
        logging = {"use_wandb": True, "project_name": "clothes", "run_name": "first", "log_every": 1}
        made["config"]["process"][0]["logging"] = logging
        yield made


def test_offline_run_and_its_resume(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    COATTrainer(job).train()
    known = json.loads((tmp_path / "run" / "coat" / "wandb.json").read_text(encoding="utf-8"))["id"]
    [written] = (tmp_path / "run" / "coat" / "wandb").glob(f"offline-run-*/run-{known}.wandb")
    until = time.monotonic() + 20  # its own process writes
    while b"sample_0" not in (content := written.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    for text in (b"loss/loss", b"learning_rate", b"validation_loss", b"sample_0", b"clothes", b"first"):
        assert text in content
    assert "W&B: " in capsys.readouterr().out
    assert not (tmp_path / "wandb").exists()
    job["config"]["process"][0]["train"] |= {"steps": 2, "disable_sampling": True}
    COATTrainer(job).train()
    assert json.loads((tmp_path / "run" / "coat" / "wandb.json").read_text(encoding="utf-8"))["id"] == known


def test_a_failure_of_wandb_ends_no_run_and_a_missing_one_is_told_before_the_model(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    job["config"]["process"][0]["logging"]["project_name"] = "a/b"  # which W&B refuses
    assert COATTrainer(job).train().is_file()
    assert capsys.readouterr().out.count("; the run goes on without it") == 1
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ConfigError, match="pip install wandb"):
        COATTrainer(job).train()
