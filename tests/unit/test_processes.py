"""Several processes of one run, as far as one process can tell: what is the same run, and how they may be started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coat_flux.config.job import JobConfig
from coat_flux.config.launch import LaunchError, launch_obstacle, sharing_job
from coat_flux.saves.identity import compare
from coat_flux.trainers.standalone.workers import Workers
from tests.helpers.engine_job import engine_job


def identity(processes: int, accumulation: int, batch_size: int = 1) -> dict[str, Any]:
    return {"world_size": processes, "batch": {"batch_size": batch_size, "gradient_accumulation": accumulation}}


def test_two_processes_are_the_same_run_as_accumulation_two() -> None:
    notes = ["world_size 1 -> 2", "batch.gradient_accumulation 4 -> 2"]
    assert compare(identity(1, 4), identity(2, 2)) == ([], notes)
    refusals, _ = compare(identity(1, 4), identity(2, 4))
    assert len(refusals) == 1
    assert "coat.resume.allow: [world_size]" in refusals[0]
    assert len(compare(identity(1, 4), identity(2, 2, batch_size=2))[0]) == 3
    assert len(compare(identity(1, 2), identity(1, 4), allow=["world_size"])[0]) == 1


def test_deepspeed_is_refused_with_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_obstacle({}) is None
    assert launch_obstacle({"ACCELERATE_USE_DEEPSPEED": "false"}) is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LaunchError, match=r"DeepSpeed: .*ddp\.yaml, or fsdp2\.yaml"):
        Workers("cpu")


def test_fsdp_is_refused_but_for_its_second_version() -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true"}
    assert "only FSDP2 is supported" in str(launch_obstacle(fsdp))
    assert launch_obstacle({**fsdp, "FSDP_VERSION": "2"}) is None


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    place = {"model": tmp_path, "images": tmp_path / "images", "out": tmp_path / "out"}
    job = JobConfig.from_dict(engine_job("shared", **place, coat={}))
    shared = sharing_job(job).coat
    assert (shared.memory.stream_blocks, shared.speed.measure) == ("all", "never")
    with pytest.raises(LaunchError, match=r"set coat\.weight\.use_fp8: true"):
        sharing_job(JobConfig.from_dict(engine_job("plain", **place)))
    with pytest.raises(LaunchError, match=r"transposed_weights='always': .*write auto"):
        sharing_job(JobConfig.from_dict(engine_job("t", **place, coat={"memory": {"transposed_weights": "always"}})))
    whole = engine_job("whole", **place, coat={})
    del whole["config"]["process"][0]["network"]
    with pytest.raises(LaunchError, match="all weights are trained"):
        sharing_job(JobConfig.from_dict(whole))
