"""Which photos are held out, and what is said about the lowest loss."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coat_flux.data.files import DatasetError
from coat_flux.data.hold_out import choose_hold_out
from coat_flux.data.preflight import check_data
from coat_flux.saves.repair import describe_lowest
from tests.helpers.engine_job import write_images
from tests.reliability.bad_configs import job_with


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("photos")
    return [write_images(root / "a", 12), write_images(root / "b" / "sub", 4).parent]


def names(chosen: tuple[tuple[Path, ...], ...]) -> list[list[str]]:
    return [[path.name for path in paths] for paths in chosen]


def test_a_number_is_spread_over_names_and_folders_and_follows_the_seed(folders: list[Path]) -> None:
    choices = [names(choose_hold_out(folders, 4, seed)) for seed in range(8)]
    assert {tuple(map(len, choice)) for choice in choices} == {(3, 1)}
    assert len({str(choice) for choice in choices}) > 1
    everything = sorted(folders[0].glob("*.png"))
    places = [everything.index(path) for path in choose_hold_out(folders, 4, 0)[0]]
    assert {after - before for before, after in itertools.pairwise(places)} == {4}
    assert names(choose_hold_out(folders, 4, None)) == names(choose_hold_out(folders, 4, 42))
    assert names(choose_hold_out(folders, None, 1)) == [[], []]


def test_names_hold_out_every_photo_of_that_name_and_linked_ones(folders: list[Path], tmp_path: Path) -> None:
    assert names(choose_hold_out(folders, ["3.png"], 0)) == [["3.png"], ["3.png"]]
    assert names(choose_hold_out(folders, ["sub/3.png"], 0)) == [[], ["3.png"]]
    (tmp_path / "linked.png").symlink_to(folders[0] / "7.png")
    shutil.copy(folders[0] / "8.png", tmp_path)
    assert names(choose_hold_out([*folders, tmp_path], ["7.png"], 0)) == [["7.png"], [], ["linked.png"]]


@pytest.mark.parametrize(
    ("hold_out", "message"),
    [
        (16, "at most 15"),
        (["3.pgn"], "'3.pgn' is not a photo of any dataset; did you mean '3.png'"),
        (["0.png", "1.png", "2.png", "3.png"], r"leaves no photo of datasets\[1\]"),
    ],
)
def test_what_cannot_be_held_out_is_said_by_check(hold_out: int | list[str], message: str, folders: list[Path]) -> None:
    with pytest.raises(DatasetError, match=message):
        choose_hold_out(folders, hold_out, 0)
    datasets = [{"folder_path": str(folder)} for folder in folders]
    errors, _ = check_data(job_with({"validation": {"hold_out": hold_out}, "datasets": datasets}))
    assert [line.startswith("validation.hold_out") for line in errors] == [True]


def test_the_lowest_names_the_file_of_its_step_or_the_nearest(tmp_path: Path) -> None:
    curve = [(0, 3.0), (2, 1.0), (4, float("nan")), (6, 2.0)]
    assert "1.000000 at step 2 (nothing is saved)" in describe_lowest(curve, tmp_path, "r")
    for name, step in (("r_000000003", 4), ("r", 6), ("rather_000000002", 2)):
        about = {"training_info": json.dumps({"step": step, "epoch": 0})}
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", about)
    line = "lowest held-out loss 1.000000 at step 2 (not saved; the nearest is r_000000003.safetensors, step 4)"
    assert describe_lowest(curve, tmp_path, "r") == f"{line}; 2.000000 at step 6"
    assert "step 6 (r.safetensors)" in describe_lowest([(0, 3.0), (6, 2.0)], tmp_path, "r")
    (tmp_path / "r_000000001" / "transformer").mkdir(parents=True)  # a whole model
    about = {"training_info": json.dumps({"step": 2, "epoch": 0})}
    save_file({"a": torch.zeros(1)}, tmp_path / "r_000000001" / "transformer" / "model.safetensors", about)
    assert "step 2 (r_000000001)" in describe_lowest(curve, tmp_path, "r")
    assert describe_lowest([(0, float("nan"))], tmp_path, "r") == "the held-out loss was never finite"
