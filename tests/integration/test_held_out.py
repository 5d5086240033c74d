"""`validation:` in the stand-alone trainer: photos that training never sees, measured without a trace in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from coat_flux.pages.run import RunFolder
from coat_flux.saves.commit import newest_set
from coat_flux.saves.errors import ResumeError
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.engine_job import FEW_LINEARS, engine_job, tiny_place

OUT = ["1.png", "3.png"]
SETTINGS = {
    "coat": {"optimizer": {"stochastic_rounding": True}, "memory": {"log_memory_stats": False}},
    "network": FEW_LINEARS | {"dropout": 0.1},
    "dataset": {"num_repeats": 2, "flip_x": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with tiny_place(tmp_path_factory.mktemp("held_out")) as place:
        yield place


def train(name: str, place: dict[str, Path], from_step: int | None = None, **blocks: Any) -> Path:
    return COATTrainer(engine_job(name, **place, **{**SETTINGS, **blocks})).train(from_step=from_step)


def curve(run: Path) -> list[tuple[float, float]]:
    return RunFolder(run).validation


def test_photos_held_out_are_measured_and_leave_no_trace_in_a_run_or_its_resume(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The run is one without these photos, and resumes from a save as before; the loss is that of the average."""
    average = {"steps": 3, "ema_config": {"use_ema": True, "ema_decay": 0.99}}
    asked = {"hold_out": OUT, "every": 1}
    blocks = {"train": average, "save": {"save_every": 2}}
    held = train("held", place, validation=asked, **blocks)
    said = capsys.readouterr()
    fewer = shutil.copytree(place["images"], tmp_path / "fewer", ignore=shutil.ignore_patterns("1.*", "3.*", "_coat*"))
    lora = load_file(held)
    assert_all_bitwise(load_file(train("fewer", {**place, "images": fewer}, train=average)), lora)

    found = curve(held.parent)
    assert [step for step, _ in found] == [0, 1, 2, 3]
    assert len({loss for _, loss in found}) == 4
    step, loss = min(found, key=lambda point: point[1])
    names = {2: "held_000000002.safetensors", 3: "held.safetensors"}
    file = names.get(int(step), "not saved; the nearest is held_000000002.safetensors, step 2")
    assert f"lowest held-out loss {loss:.6f} at step {int(step)} ({file})" in said.out
    assert f"held-out: {found[2][1]:.3e}" in said.err  # the bar
    record = json.loads((newest_set(held.parent) / "state.json").read_text(encoding="utf-8"))
    assert [settings["held_out"] for settings in record["identity"]["data"]["settings"]] == [OUT]

    assert_all_bitwise(load_file(train("held", place, from_step=2, validation=asked, **blocks)), lora)
    assert curve(held.parent) == found
    with pytest.raises(ResumeError, match="held_out"):
        train("held", place, train={**average, "steps": 4}, validation={"hold_out": ["4.png"]})

    raw = curve(train("raw", place, train={"steps": 1}, validation=asked).parent)
    assert raw[0] == found[0]
    assert 0 < abs(found[1][1] - raw[0][1]) < abs(raw[1][1] - raw[0][1]) / 2  # the raw weights would be 1
