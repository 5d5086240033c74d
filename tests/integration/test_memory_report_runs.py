"""The memory report of whole runs: the stand-alone engine on the embedded model, our process in the stand-in host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.blocks.held import PARTS
from coat_flux.config.job import JobConfig
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.watch.memory_report import finish
from coat_flux.watch.oom import OutOfMemory
from coat_flux.watch.phases import PhaseTracker
from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, standin_host  # noqa: F401
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux
from tests.tolerances import REPORT_SAVED_RTOL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 48)
        patch.setattr("coat_flux.plan.job.TEXT_TOKENS", 48)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "memory.json").read_text(encoding="utf-8"))


def test_engine_run(place: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    train = {"disable_sampling": False, "ema_config": {"use_ema": True}, "batch_size": 4}
    job = engine_job(
        "whole", **place, coat={"enabled": True}, train=train, save={"save_every": 2}, sample={"sample_every": 2}
    )
    final = COATTrainer(job).train()
    out = capsys.readouterr().out
    record = read(final.parent / "coat")
    phases = record["phases"]
    assert {name: phase["entered"] for name, phase in phases.items()} == {
        "load": 1, "cache": 1, "validate": 2, "sample": 3, "step": 1, "save": 2,
    }  # fmt: skip
    assert not any(phase["open"] for phase in phases.values())
    assert record["peak"] == max(phase["peak"]["allocated"] for phase in phases.values()) > record["baseline"] > 0
    assert set(record["moments"]) == {"before_training", "before_sampling", "after_sampling"}

    saved = torch.load(final.parent / "optimizer.pt", weights_only=True)["state"]
    lora = 4 * sum(state["exp_avg"].numel() for state in saved.values())
    most = phases["step"]["most"]
    assert most["lora"] == most["gradients"] == most["ema"] == lora
    assert 0.5 * lora < most["optimizer"] < 0.75 * lora  # two FP8 moments and their scales, of fp32
    assert most["transformer"] == sum(record["transformer"].values())
    assert record["transformer"]["fp8 codes"] > 0.5 * most["transformer"]
    assert phases["cache"]["most"]["text encoders"] > 0
    assert phases["step"]["most"]["text encoders"] == 0  # gone before the transformer came
    assert phases["sample"]["most"]["vae"] > 0

    predicted = record["prediction"]["phases"]["step"]
    assert (predicted["lora"], predicted["ema"]) == (lora, lora)
    assert predicted["transformer"] == most["transformer"]
    assert most["saved activations"] == pytest.approx(predicted["saved activations"], rel=REPORT_SAVED_RTOL)
    assert "Memory by phase" not in out
    log = (final.parent / "coat" / "log.txt").read_text()
    assert "Memory by phase, MB" in log
    assert "prediction: peak" in log
    assert (final.parent / "coat" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_run_that_fails_leaves_its_phases_and_no_picture(
    place: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("coat_flux.trainers.standalone.trainer.whole_norms", fail)
    with pytest.raises(OutOfMemory):
        COATTrainer(engine_job("broken", **place)).train()
    folder = place["out"] / "broken" / "coat"
    record = read(folder)
    assert {"load", "cache", "step"} <= set(record["phases"])
    assert record["phases"]["step"]["most"]["gradients"] > 0
    assert record["prediction"] is None
    assert not (folder / "memory.png").exists()


def test_prediction_is_for_the_device_that_trained(place: dict[str, Path], tmp_path: Path) -> None:
    raw = engine_job("anywhere", **place, coat={})
    raw["config"]["process"][0]["device"] = None
    job = JobConfig.from_dict(raw)
    finish(PhaseTracker(torch.device("cpu"), tmp_path / "memory.json"), lambda: job, lambda _: None)
    found = read(tmp_path)["prediction"]["peak"]
    assert found == predict(JobFacts(replace(job, device="cpu"))).peak
    assert found != predict(JobFacts(replace(job, device="cuda"))).peak


def test_process_in_ai_toolkit(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    train = {**COAT_ENTRY["train"], "timestep_type": "next_sample"}  # ai-toolkit's own: the plan does not know it
    process = host.start() and host.run(**{**COAT_ENTRY, "train": train})
    out = capsys.readouterr().out
    record = read(host.save_folder / "coat")
    phases = record["phases"]
    assert {name: phase["entered"] for name, phase in phases.items()} == {
        "load": 1, "cache": 1, "sample": 2, "step": 1, "save": 1,
    }  # fmt: skip
    state = torch.load(host.save_folder / "optimizer.pt", weights_only=True)["state"]
    lora = 4 * sum(value["exp_avg"].numel() for value in state.values())
    most = phases["step"]["most"]
    assert most["lora"] == most["gradients"] == lora
    assert set(most) == set(PARTS)
    assert record["transformer"]["fp8 codes"] == 4 * 32 * 32
    assert record["prediction"]["missing"].startswith("ConfigError: ")
    log = (host.save_folder / "coat" / "log.txt").read_text(encoding="utf-8")
    assert log.count("prediction: none for this run (ConfigError: ") == 1
    assert "Traceback" not in out
    assert process.step_num == 3


def test_disabled_process_has_no_report(host: Host) -> None:
    host.start()
    host.run(coat={"enabled": False})
    assert not (host.save_folder / "coat").exists()
