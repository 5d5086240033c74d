"""Sets of files: committed by one rename, published, repaired; identities; random generators; where a run is saved."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coat_core.config import FP8QuantizationConfig
from coat_core.optim import FP8AdamW
from coat_flux.base import files
from coat_flux.base.files import replacing, write_file
from coat_flux.base.rng import rng_state, set_rng_state
from coat_flux.cli.check import check_outputs
from coat_flux.config.job_file import load_job_yaml
from coat_flux.saves.commit import SaveSpace, check_output, commit, committed_sets, damage, newest_set, set_step
from coat_flux.saves.errors import ResumeError, SaveError
from coat_flux.saves.repair import go_back, good_step, repair, run_lock
from coat_flux.saves.state import file_digest, model_identity, require_same_run, run_identity
from tests.architecture.sources import ROOT
from tests.reliability.forks import held_by_another_process

PUBLISH = {"run.safetensors": "lora", "optimizer.pt": "optimizer"}


def writer(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in ("lora", "optimizer"):
            (folder / name).write_text(f"{name} {content}", encoding="utf-8")

    return write


def published(run: Path) -> list[str]:
    return [(run / name).read_text(encoding="utf-8") for name in PUBLISH]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))


def test_a_replaced_file_is_flushed_then_renamed_then_its_folder_flushed_or_stays(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_file(target, "one")
    calls: list[str] = []

    def recorded(name: str, call: Callable[..., None], subject: int) -> Callable[..., None]:
        def record(*args: Path) -> None:
            calls.append(f"{name} {args[subject].name.split('-')[0]}")
            call(*args)

        return record

    for holder, name, subject in ((files, "sync_file", 0), (files, "sync_folder", 0), (os, "replace", 1)):
        monkeypatch.setattr(holder, name, recorded(name, getattr(holder, name), subject))
    with target.open() as reader:
        write_file(target, "two")
        assert reader.read() == "one"
    assert target.read_text() == "two"
    assert calls == ["sync_file .writing", "replace file", f"sync_folder {tmp_path.name}"]
    with suppress(ZeroDivisionError), replacing(target) as temp:
        temp.write_text(str(1 / 0))
    assert target.read_text() == "two"
    assert names(tmp_path) == {"file"}
    with pytest.raises(OSError, match="not a regular file"):
        write_file(tmp_path, "three")


def test_a_save_without_room_or_with_a_mistake_leaves_the_old_set(tmp_path, monkeypatch):
    commit(tmp_path, 1, writer("one"), PUBLISH)
    with pytest.raises(ZeroDivisionError):
        commit(tmp_path, 2, lambda folder: 1 / 0, PUBLISH)
    disk(monkeypatch, 1000)
    with pytest.raises(SaveError, match=r"needs 0\.0 MB"):
        commit(tmp_path, 2, writer("two"), PUBLISH)
    assert published(tmp_path) == ["lora one", "optimizer one"]
    assert names(tmp_path / "coat") == {"state-000000001"}


def test_repair_takes_back_a_set_whose_replacement_never_came_and_puts_back_torn_and_missing_files(tmp_path):
    folder = commit(tmp_path, 1, writer("one"), PUBLISH)
    folder.rename(folder.with_name(f".replaced-{folder.name}"))
    (tmp_path / "run.safetensors").unlink()
    (tmp_path / "optimizer.pt").unlink()
    (tmp_path / "optimizer.pt").write_text("opt", encoding="utf-8")
    assert len(repair(tmp_path)) == 3
    assert newest_set(tmp_path) == folder
    assert published(tmp_path) == ["lora one", "optimizer one"]
    assert (tmp_path / "coat" / "set-aside-000000001" / "optimizer.pt").read_text(encoding="utf-8") == "opt"


def test_repair_leaves_a_damaged_set_and_a_newer_lora_alone(tmp_path):
    folder = commit(tmp_path, 1, writer("one"), PUBLISH)
    (tmp_path / "optimizer.pt").unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "host.safetensors", {"training_info": json.dumps({"step": 2})})
    assert repair(tmp_path) == []
    assert not (tmp_path / "optimizer.pt").exists()
    (tmp_path / "host.safetensors").unlink()
    (folder / "lora").write_text("lora ONE", encoding="utf-8")
    assert repair(tmp_path) == []
    assert damage(folder) == f"{folder / 'lora'}: is not the file that was written (damaged or exchanged)"


def kept(run: Path) -> list[int]:
    return [set_step(folder) for folder in committed_sets(run)]


def test_two_sets_are_kept_the_older_one_some_steps_behind(tmp_path):
    steps = (2, [2]), (2, [2]), (4, [4, 2]), (50, [50, 4]), (53, [53, 4]), (54, [54, 4]), (100, [100, 54])
    for number, (step, expected) in enumerate(steps):
        folder = commit(tmp_path, step, writer(str(number)), PUBLISH, apart=10)
        assert kept(tmp_path) == expected
        assert folder == newest_set(tmp_path)
        assert published(tmp_path) == [f"lora {number}", f"optimizer {number}"]
        assert names(tmp_path / "coat") == {f"state-{each:09d}" for each in expected}
    assert names(tmp_path) == {*PUBLISH, "coat"}


@pytest.mark.parametrize("file", ["lora", "optimizer", "commit/files.json"])
def test_a_damaged_byte_in_any_file_of_the_newest_set_moves_it_aside(tmp_path, file):
    commit(tmp_path, 1, writer("one"), PUBLISH)
    folder = commit(tmp_path, 2, writer("two"), PUBLISH)
    path = folder / file
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)  # in place: the published file is the same one
    line, *_ = repair(tmp_path)
    assert ("the run resumes from step 1" in line, str(path) in line) == (True, True)
    assert kept(tmp_path) == [1]
    assert published(tmp_path) == ["lora one", "optimizer one"]
    assert (tmp_path / "coat" / "set-aside-000000001" / folder.name / file).read_bytes() == damaged
    assert repair(tmp_path) == []


def test_going_back_moves_what_is_newer_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    for step in (3, 6):

        def write(folder: Path, step: int = step) -> None:
            writer(str(step))(folder)
            save_file({"x": torch.full((4,), float(step))}, folder / "lora", {"training_info": f'{{"step": {step}}}'})

        commit(run, step, write, {f"run_{step:09d}.safetensors": "lora", "optimizer.pt": "optimizer"})
    (run / "coat" / "metrics.csv").write_text("step\n6\n", encoding="utf-8")
    save_file({"x": torch.ones(4)}, run / "mine.safetensors")
    with pytest.raises(ResumeError, match=r"step 5: .* has no state of this step; the kept ones are of step 3, 6"):
        go_back(run, 5)
    (line, back) = go_back(run, 3)
    assert ("goes back to step 3; moved to" in line, "optimizer.pt: put back" in back) == (True, True)
    aside = run / "coat" / "set-aside-000000003"
    assert names(aside) == {"state-000000006", "run_000000006.safetensors", "metrics.csv"}
    assert names(run) == {"coat", "mine.safetensors", "run_000000003.safetensors", "optimizer.pt"}
    assert (run / "optimizer.pt").read_text(encoding="utf-8") == "optimizer 3"
    assert (kept(run), repair(run)) == ([3], [])
    assert go_back(run, 3) == [f"{run}: step 3 is its newest state already"]


def test_the_step_to_go_back_to_is_well_before_the_doubt_and_has_small_weights(tmp_path):
    for step, growth in ((10, 1.2), (20, 12.0)):

        def write(folder: Path, growth: float = growth) -> None:
            (folder / "state.json").write_text(json.dumps({"guard": {"growth": growth}}), encoding="utf-8")

        assert good_step(tmp_path, 20, 5) == (10 if step == 20 else None)
        commit(tmp_path, step, write, {})
    assert good_step(tmp_path, 30, 5) == 10  # the newer one has grown too far
    assert good_step(tmp_path, 12, 5) == 10  # too near, but the only one
    assert good_step(tmp_path, 10, 5) is None


def test_nothing_is_published_outside_of_the_run_folder(tmp_path):
    for name in ("../out", "a\\b", "c:d", ".."):
        with pytest.raises(SaveError, match="without a folder"):
            commit(tmp_path / "run", 1, writer("one"), {name: "lora"})
    assert names(tmp_path) == {"run"}


def test_random_generators_go_on_where_they_were(tmp_path):
    def draws() -> list[float]:
        numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]  # noqa: NPY002
        return [*numbers, torch.rand(1).item(), torch.randn(1).item()]

    random.gauss(0, 1)  # half of a pair is kept by the generator
    np.random.randn()  # noqa: NPY002
    save_file(rng_state(), tmp_path / "rng.safetensors")
    first = draws()
    assert draws() != first
    set_rng_state(load_file(tmp_path / "rng.safetensors"))
    assert draws() == first


def identity(root: Path, **changes: Any) -> dict[str, Any]:
    settings = {"model": str(root / "model"), "network": {"linear": 4}, "seed": 7, "world_size": 1}
    settings |= {"batch": {"batch_size": 1}, "coat": {"optimizer": {"block_size": 128}}, "train": {"lr": 1e-4}}
    settings["datasets"] = [{"folder_path": str(root / "images"), "caption_ext": ".txt", "resolution": [64]}]
    return run_identity(**{**settings, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    (tmp_path / "model" / "transformer" / "config.json").write_text("{}", encoding="utf-8")
    save_file({"w": torch.zeros(400_000)}, tmp_path / "model" / "transformer" / "model.safetensors")
    (tmp_path / "images").mkdir()
    for name in "ab":
        (tmp_path / "images" / f"{name}.png").write_bytes(name.encode())
        (tmp_path / "images" / f"{name}.txt").write_text(name, encoding="utf-8")
    return tmp_path


def refused(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    with pytest.raises(ResumeError, match="is a save of another run") as error:
        require_same_run(saved, now, (), "here")
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def test_the_same_run_has_the_same_identity_and_another_is_refused_unless_allowed(root):
    before, now = identity(root), identity(root, world_size=2)
    assert sorted(before["data"]["files"]) == ["0/a.png", "0/a.txt", "0/b.png", "0/b.txt"]
    assert require_same_run(before, identity(root), (), "here") == []
    assert ["coat.resume.allow: [world_size]" in line for line in refused(before, now)] == [True]
    assert require_same_run(before, now, ["world_size"], "here") == ["world_size 1 -> 2"]
    del now["world_size"]  # what one of them does not know is no difference
    assert require_same_run(before, now, (), "here") == []
    now = identity(root, coat={"optimizer": {"block_size": 64}, "new": 1}, train={"lr": 2e-4})
    changes = ["coat.optimizer.block_size 128 -> 64", "train.lr 0.0001 -> 0.0002"]
    assert require_same_run(before, now, (), "here") == changes
    (root / "images" / "b.txt").write_text("another", encoding="utf-8")
    (root / "images" / "c.png").write_bytes(b"c")
    (line,) = refused(before, identity(root))
    assert "2 of 4 images and captions differ, 5 are there now; first: datasets[0] b.txt (changed)" in line
    assert [line[:24] for line in refused(before, identity(root, datasets=[]))] == ["data: 1 -> 0 datasets; r"]


def test_two_processes_are_the_same_run_as_accumulation_two():
    def divided(processes: int, accumulation: int, batch_size: int = 1) -> dict[str, Any]:
        return {"world_size": processes, "batch": {"batch_size": batch_size, "gradient_accumulation": accumulation}}

    notes = ["world_size 1 -> 2", "batch.gradient_accumulation 4 -> 2"]
    assert require_same_run(divided(1, 4), divided(2, 2), (), "here") == notes
    assert len(refused(divided(1, 4), divided(2, 4))) == 1
    assert len(refused(divided(1, 4), divided(2, 2, batch_size=2))) == 3


def test_a_moved_model_is_the_same_and_a_changed_one_is_not(root):
    before = identity(root)
    (root / "model").rename(root / "moved")
    moved = str(root / "moved")
    (note,) = require_same_run(before, identity(root, model=moved), (), "here")
    assert note.endswith("moved, the same files")
    weights = torch.zeros(400_000)
    weights[0] = 1e-3
    save_file({"w": weights}, root / "moved" / "transformer" / "model.safetensors")
    (line,) = refused(before, identity(root, model=moved))
    assert line.startswith(f"model {root / 'model'} -> {moved}; ")
    (root / "moved").rename(root / "model")
    (line,) = refused(before, identity(root))
    assert line.startswith(f"model {root / 'model'}: its files were changed; ")
    unknown = {"model": {"path": "nobody/has-this", "fingerprint": None}}
    assert model_identity("nobody/has-this") == unknown["model"]
    assert model_identity("C:\\none\\has:this")["fingerprint"] is None
    assert require_same_run(unknown, unknown, (), "here") == []
    assert len(refused(unknown, {"model": {"path": "other", "fingerprint": None}})) == 1


def test_a_folder_takes_one_process_at_a_time_and_a_killed_one_leaves_it_free(tmp_path):
    refused = pytest.raises(ResumeError, match=r"another process.* is training in this folder; wait for it")
    with held_by_another_process(tmp_path), refused, run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        assert (tmp_path / "coat" / "lock").read_text() == str(os.getpid())


# -- where a run is saved ----------------------------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_folder_that_cannot_be_written_is_found_and_one_that_can_stays_as_it_was(tmp_path):
    assert check_output(tmp_path / "new" / "run") == ([], [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for folder in (Path("/proc/run"), tmp_path / "file" / "run", tmp_path / "nowhere" / "run"):
        (error,), warnings = check_output(folder)
        assert error.startswith(f"{folder.parent}: the run cannot be saved there (")
        assert warnings == []


def test_the_room_is_told_before_it_runs_out(tmp_path, monkeypatch):
    space = SaveSpace(lora=100_000_000, state=300_000_000, loras=4)
    assert space.most == 1_400_000_000
    disk(monkeypatch, 300_000_000)
    (error,), _ = check_output(tmp_path, space)
    assert "one save takes 400.0 MB, 300.0 MB are free" in error
    disk(monkeypatch, 1_000_000_000)
    errors, (warning,) = check_output(tmp_path, space)
    assert (errors, "takes 1.4 GB (4 LoRAs of 100.0 MB, 2 states" in warning) == ([], True)
    disk(monkeypatch, 1_500_000_000)
    assert check_output(tmp_path, space) == ([], [])


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_inside_a_run_folder_are_refused_or_replaced_and_one_to_it_is_fine(tmp_path):
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


def test_check_finds_moments_that_the_optimizer_cannot_read(tmp_path, capsys):
    raw = load_job_yaml(ROOT / "configs" / "flux_clothing_tiny.yaml")
    process = raw["config"]["process"][0]
    process["training_folder"] = str(tmp_path)
    file = tmp_path / raw["config"]["name"] / "optimizer.pt"
    file.parent.mkdir()
    for quantized in (True, False):
        config = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=quantized)
        torch.save(FP8AdamW([torch.ones(2, requires_grad=True)], fp8_config=config).state_dict(), file)
        for kind, optimizer in (("coat_flux_trainer", "coat_fp8_adamw"), ("sd_trainer", "adamw"), ("sd_trainer", None)):
            process["type"], process["train"]["optimizer"] = kind, optimizer
            refused = quantized and optimizer != "coat_fp8_adamw"
            assert check_outputs(raw, "file") == refused
            assert ("train.optimizer=adamw cannot read" in capsys.readouterr().err) == refused
    for content in (b"", b"damaged", pickle.dumps({"param_groups": []})):
        file.write_bytes(content)
        assert not check_outputs(raw, "file")


def test_large_files_are_told_apart_by_their_ends(tmp_path):
    file, zeros, digests = tmp_path / "file", bytes((1 << 22) - 1), set()
    for content in (zeros + b"0", zeros + b"00", b"1" + zeros, zeros + b"1"):
        file.write_bytes(content)
        digests.add(file_digest(file))
    assert len(digests) == 4


def test_check_prints_it(tmp_path, monkeypatch, capsys):
    raw = load_job_yaml(ROOT / "configs" / "flux_clothing_tiny.yaml")
    raw["config"]["process"][0]["training_folder"] = str(tmp_path)
    raw["config"]["process"][0]["model"]["name_or_path"] = "black-forest-labs/FLUX.1-dev"
    for free, failed, line in ((1_000_000_000, False, "all that the run keeps"), (10_000_000, True, "one save takes")):
        disk(monkeypatch, free)
        assert check_outputs(raw, "file") == failed
        assert line in "".join(capsys.readouterr())
