"""`validation:` in the stand-alone trainer: photos that training never sees, measured without a trace in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from coat_flux.pages.report import write_report
from coat_flux.pages.run import RunFolder
from coat_flux.trainers.standalone.resume import ResumeError
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_bitwise
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux

OUT = ["1.png", "3.png"]
SETTINGS = {
    "coat": {"optimizer": {"stochastic_rounding": True}},
    "network": {"dropout": 0.1},
    "dataset": {"num_repeats": 2, "flip_x": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("held_out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 48)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def train(name: str, place: dict[str, Path], **blocks: Any) -> Path:
    return COATTrainer(engine_job(name, **place, **{**SETTINGS, **blocks})).train()


def same(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert_bitwise(left[name], right[name])


def curve(run: Path) -> list[tuple[float, float]]:
    return RunFolder(run).validation


@pytest.mark.slow
def test_a_run_with_photos_held_out_is_the_run_without_them(
    place: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ema = {"steps": 5, "ema_config": {"use_ema": True, "ema_decay": 0.5}}
    asked = {"hold_out": OUT, "every": 2}
    held = train("held", place, train=ema, save={"save_every": 2}, validation=asked)
    said = capsys.readouterr()
    fewer = shutil.copytree(place["images"], tmp_path / "fewer", ignore=shutil.ignore_patterns("1.*", "3.*", "_coat*"))
    same(held, train("fewer", {**place, "images": fewer}, train=ema, save={"save_every": 2}))
    found = curve(held.parent)
    assert [step for step, _ in found] == [0, 2, 4, 5]
    assert len({loss for _, loss in found}) == 4
    step, loss = min(found, key=lambda point: point[1])
    name = {0: "not saved; the nearest is held_000000002.safetensors, step 2", 5: "held.safetensors"}
    file = name.get(int(step), f"held_{int(step):09d}.safetensors")
    assert f"lowest held-out loss {loss:.6f} at step {int(step)} ({file})" in said.out
    assert f"held-out: {found[2][1]:.3e}" in said.err  # the bar
    page = write_report(held.parent).read_text(encoding="utf-8")
    assert f"Lowest, {loss:.5f}, at step {int(step)}." in page


def test_the_loss_is_that_of_the_average(place: dict[str, Path]) -> None:
    """An average that hardly follows has a loss that hardly moves."""
    asked = {"hold_out": ["2.png"], "every": 1}
    slow = {"steps": 2, "ema_config": {"use_ema": True, "ema_decay": 0.99}}
    raw = [loss for _, loss in curve(train("raw", place, train={"steps": 2}, validation=asked).parent)]
    averaged = [loss for _, loss in curve(train("averaged", place, train=slow, validation=asked).parent)]
    assert averaged[0] == raw[0]
    assert 0 < abs(averaged[1] - raw[0]) < abs(raw[1] - raw[0]) / 10


@pytest.mark.slow
def test_a_resumed_run_holds_out_the_same_photos(place: dict[str, Path]) -> None:
    whole = train("whole", place, train={"steps": 4}, validation={"hold_out": 2, "every": 1})
    train("parts", place, train={"steps": 2}, save={"save_every": 2}, validation={"hold_out": 2, "every": 1})
    parts = train("parts", place, train={"steps": 4}, validation={"hold_out": 2, "every": 1})
    same(whole, parts)
    assert curve(parts.parent) == curve(whole.parent)
    with pytest.raises(ResumeError, match=r'datasets\[0\]\.held_out \["1\.png"'):
        train("parts", place, train={"steps": 5}, validation={"hold_out": ["4.png"]})
    with pytest.raises(ResumeError, match="held_out"):
        train("parts", place, train={"steps": 5})
