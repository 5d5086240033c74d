"""Several processes of one run, as far as one process can tell: what is the same run, and how they may be started."""

from __future__ import annotations

from typing import Any

import pytest

from coat_flux.config.launch import launch_obstacle
from coat_flux.saves.identity import compare
from coat_flux.trainers.standalone.workers import LaunchError, Workers


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
    with pytest.raises(LaunchError, match=r"DeepSpeed: .*configs/accelerate/ddp\.yaml"):
        Workers("cpu")
