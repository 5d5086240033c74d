"""Going on with a run: bit for bit where nothing changed, refused where it would be another run, else said."""

import errno
import json
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from coat_flux.base.table import FIDELITY_FILE
from coat_flux.blocks import formats
from coat_flux.cli.entry import main
from coat_flux.saves.commit import commit, manifest_of, newest_set
from coat_flux.saves.errors import ResumeError
from coat_flux.trainers.standalone import session, trainer
from coat_flux.trainers.standalone.flow_matching import Objective
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.engine_job import FEW_LINEARS, ON_DISK, engine_job, rows, tiny_place
from tests.helpers.engine_job import assert_same_end as same_tensors_and_losses
from tests.helpers.format_clock import FormatClock
from tests.helpers.tiny_flux import make_tiny_flux


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with tiny_place(tmp_path_factory.mktemp("resume"), 3) as place:
        wide = np.random.default_rng(1).integers(0, 255, (48, 80, 3), dtype=np.uint8)  # a second bucket
        Image.fromarray(wide).save(place["images"] / "wide.png")
        (place["images"] / "wide.txt").write_text("a wide [trigger]", encoding="utf-8")
        yield place


def train(name: str, place: dict[str, Path], **blocks: Any) -> Path:
    """Train; the folder of the run."""
    network, cache = FEW_LINEARS | blocks.pop("network", {}), ON_DISK | blocks.pop("dataset", {})
    process, from_step = blocks.pop("process", {}), blocks.pop("from_step", None)
    job = engine_job(name, **{**place, **blocks.pop("other", {})}, network=network, dataset=cache, **blocks)
    job["config"]["process"][0] |= process
    return COATTrainer(job).train(from_step=from_step).parent


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something when a step of the next run begins."""

    def arm(number: int, act: Callable[[], None]) -> None:
        original = trainer.train_step

        def step(session: Any, batches: Any, interrupts: Any) -> Any:
            if session.step + 1 == number:
                monkeypatch.setattr(trainer, "train_step", original)
                act()
            return original(session, batches, interrupts)

        monkeypatch.setattr(trainer, "train_step", step)

    return arm


@pytest.fixture
def killed_at(at_step: Any, place: dict[str, Path]) -> Callable[..., None]:
    """Train until this step begins."""

    def train_until(number: int, name: str, **blocks: Any) -> None:
        at_step(number, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(name, place, **blocks)

    return train_until


def assert_same_end(left: Path, right: Path) -> None:
    """Same weights, averages, losses on the way, and optimizer with all its settings."""
    same_tensors_and_losses(left, right)
    one, other = ((newest_set(run) / "optimizer.pt").read_bytes() for run in (left, right))
    assert one == other


def state_of(run: Path) -> dict[str, Any]:
    """The record of the newest save."""
    return json.loads((newest_set(run) / "state.json").read_text(encoding="utf-8"))


FULL: dict[str, Any] = {
    "train": {
        "gradient_accumulation": 2,
        "gradient_checkpointing": True,
        "ema_config": {"use_ema": True, "ema_decay": 0.8},
    },
    "network": {**FEW_LINEARS, "dropout": 0.1},
    "coat": {"optimizer": {"stochastic_rounding": True, "m2_format": "e5m2"}, "memory": {"checkpointing": "all"}},
}


def test_a_diverged_run_ends_as_the_good_one_by_the_advice_it_prints(place, tmp_path, capsys):
    """Through the command line: it names the learning rate, and the command that goes back."""
    run, config = place["out"] / "diverged", tmp_path / "diverged.yaml"

    def command(steps: int, lr: float = 1e-3) -> list[str]:
        blocks = {**FULL, "train": {"steps": steps, "lr": lr, **FULL["train"]}, "save": {"save_every": 3}}
        config.write_text(yaml.safe_dump(engine_job("diverged", **place, dataset=ON_DISK, **blocks)), encoding="utf-8")
        return ["train", str(config)]

    assert main(command(8)) == 0
    good = shutil.copytree(run, tmp_path / "good")
    assert main(command(12)) == 0
    whole = shutil.move(run, tmp_path / "whole")
    shutil.move(good, run)
    capsys.readouterr()
    assert main(command(12, 1e3)) == 2
    said = capsys.readouterr().err
    assert "lower train.lr" in said
    advice = re.search(r"then resume from step (\d+): coat-flux (.*)", said)
    command(12)
    assert main(shlex.split(advice[2])) == 0
    assert (run / "coat" / f"set-aside-{int(advice[1]):09}").is_dir()
    assert_same_end(whole, run)
    assert len(rows(run)) == 12


def test_an_interrupt_saves_the_step_and_the_run_goes_on_exactly(place, at_step, capsys):
    """With torch's AdamW."""
    settings = {"steps": 3, "lr_scheduler": "cosine", "batch_size": 2}
    whole = train("calm", place, train=settings)
    before = signal.getsignal(signal.SIGINT)
    at_step(2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train("interrupted", place, train=settings)
    assert signal.getsignal(signal.SIGINT) is before
    run = place["out"] / "interrupted"
    saved = run / "interrupted_000000002.safetensors"
    assert f"step 2 of 3, saved as {saved}" in capsys.readouterr().out
    assert saved.exists()
    train("interrupted", place, train=settings)
    assert f"RESUMING FROM {saved}" in capsys.readouterr().out
    assert_same_end(whole, run)


# -- another run -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def base(place: dict[str, Path]) -> Path:
    return train("base", place, coat={}, train={"steps": 2, "gradient_checkpointing": True})


@pytest.fixture
def copied(place: dict[str, Path], base: Path, tmp_path: Path) -> dict[str, Path]:
    """The place with a copy of that run."""
    shutil.copytree(base, tmp_path / "out" / "base")
    return {**place, "out": tmp_path / "out"}


def other_images(place: dict[str, Path], root: Path) -> dict[str, Any]:
    folder = shutil.copytree(place["images"], root / "images")
    (folder / "1.txt").write_text("another caption", encoding="utf-8")
    return {"other": {"images": folder}}


def other_model(place: dict[str, Path], root: Path) -> dict[str, Any]:
    return {"other": {"model": make_tiny_flux(root / "tiny", seed=1)}}


WITH_ALLOW = r".*coat\.resume\.allow: "
REFUSED: dict[str, tuple[Any, str]] = {
    "rank": ({"network": {"linear": 8}}, r"network\.linear 4 -> 8; .*config\.name"),
    "targets": ({"network": {"network_kwargs": {"only_if_contains": ["to_q"]}}}, r"network\.only_if_contains"),
    "seed": ({"process": {"training_seed": 8}}, rf"seed 7 -> 8{WITH_ALLOW}\[seed\]"),
    "batch": ({"train": {"batch_size": 2}}, r"batch\.batch_size 1 -> 2"),
    "repeats": ({"dataset": {"num_repeats": 2}}, r"datasets\[0\]\.num_repeats 1 -> 2"),
    "trigger": ({"process": {"trigger_word": "abc"}}, r'datasets\[0\]\.trigger_word "sks" -> "abc"'),
    "background": ({"coat": {"data": {"background": "black"}}}, r'datasets\[0\]\.background "white" -> "black"'),
    "data": (other_images, rf"data: 1 of 8 .*datasets\[0\] 1\.txt \(changed\){WITH_ALLOW}\[data\]"),
    "model": (other_model, r"model .*tiny -> .*tiny"),
    "fewer steps": ({"train": {"steps": 1}}, r"train\.steps=1: .*base\.safetensors has 2 steps"),
    "optimizer": ({"train": {"optimizer": "adamw"}}, r"coat_fp8_adamw, which train\.optimizer=adamw cannot"),
}


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_encoders", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize("kind", REFUSED)
def test_another_run_is_refused_by_name(place, base, tmp_path, kind):
    change, words = REFUSED[kind]
    change = change(place, tmp_path) if callable(change) else change
    blocks = {"coat": {}, **change}
    blocks["train"] = {"steps": 4, **change.get("train", {})}
    files = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError, match=words):
        train("base", place, **blocks)
    assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == files


@pytest.mark.usefixtures("_no_model")
def test_8_bit_moments_of_a_save_without_our_state_are_for_no_other_optimizer(copied):
    shutil.rmtree(copied["out"] / "base" / "coat")
    with pytest.raises(ResumeError, match=r"coat_fp8_adamw, .*train\.optimizer=adamw cannot"):
        train("base", copied, train={"steps": 4, "optimizer": "adamw"})


CHANGED = {
    "optimizer": {"m2_format": "e5m2", "block_size": 64},
    "activation": {"format": "e5m2", "flow": "generic"},
    "memory": {"checkpointing": "all"},
}


def test_what_may_change_goes_on_and_is_said(copied, tmp_path, capsys):
    """Numerics may, data and seed where `coat.resume.allow` says so."""
    new = {"steps": 3, "gradient_checkpointing": True, "lr": 5e-4, "optimizer_params": {"weight_decay": 0.1}}
    change = {**other_images(copied, tmp_path), "process": {"training_seed": 8}}
    run = train("base", copied, coat={**CHANGED, "resume": {"allow": ["data", "seed"]}}, train=new, **change)
    out = capsys.readouterr().out
    for section, options in CHANGED.items():
        for key, value in options.items():
            assert re.search(rf"^Resume: coat\.{section}\.{key} .* -> {json.dumps(value)}$", out, re.M), key
    assert "Resume: train.lr 0.001 -> 0.0005\n" in out
    assert "Resume: seed 7 -> 8\n" in out
    assert "Resume: data: 1 of 8 images and captions differ" in out
    assert "weight_decay 0.01 -> 0.1" in out
    state = torch.load(run / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["fp8"]["block_size"] == 64
    assert state["state"][0]["exp_avg_sq_codes"].dtype == torch.float8_e5m2
    assert float(state["state"][0]["step"]) == 3
    assert [row["lr"] for row in rows(run)] == ["0.001", "0.001", "0.0005"]


def test_the_measured_path_is_kept(copied):
    """A save that says bf16 GEMMs goes on with them, where a CPU would take the config's own without measuring."""
    run = copied["out"] / "base"
    folder, record = newest_set(run), state_of(run)
    manifest = manifest_of(folder)
    assert record["path"] == {"gemm": "per_row", "recomputed": [], "weight_format": "e4m3"}
    record["path"]["gemm"] = "bf16"

    def write(changed: Path) -> None:
        shutil.copytree(folder, changed, dirs_exist_ok=True, ignore=shutil.ignore_patterns("commit"))
        (changed / "state.json").write_text(json.dumps(record), encoding="utf-8")

    commit(run, 2, write, manifest["publish"])
    train("base", copied, coat={}, train={"steps": 3, "gradient_checkpointing": True})
    assert state_of(run)["path"]["gemm"] == "bf16"


@pytest.mark.parametrize(("ms", "taken"), [(1.0, "int8"), (3.0, "e4m3")])
def test_auto_times_once_and_a_resumed_run_keeps_its_format(ms, taken, place, monkeypatch):
    """A CPU is timed here as a GPU is, by a made-up clock; by the time of the resume the other one is faster."""
    monkeypatch.setattr(formats, "DEVICE", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place["out"] / taken))
    clock = FormatClock(monkeypatch, int8=ms)
    settings: dict[str, Any] = {"coat": {"weight": {"format": "auto"}}, "save": {"save_every": 1}}
    run = train(f"auto_{taken}", place, train={"steps": 1}, **settings)
    assert set(clock.timed) == {"int8", "e4m3"}
    first = state_of(run)["path"]
    assert (first["weight_format"], first["weight_ms"]) == (taken, {"e4m3": 2.0, "int8": ms})
    with safe_open(run / f"auto_{taken}.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["coat"])["weight"]["format"] == taken
    assert " ms" not in metadata["coat.why.weights"]
    shutil.rmtree(place["out"] / taken)
    clock.timed.clear()
    train(f"auto_{taken}", place, train={"steps": 2}, **settings)
    assert (clock.timed, state_of(run)["path"]) == ([], first)


# -- steps that go wrong ---------------------------------------------------------------------------------------------
def test_a_step_that_is_not_finite_is_skipped_and_samples_that_cannot_be_written_do_not_end_the_run(
    place, monkeypatch, capsys
):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("coat_flux.trainers.standalone.validation.ImageSampler.draw", full)
    original = Objective.__call__

    def nan_once(self: Objective, batch: Any, draw: int) -> torch.Tensor:
        return original(self, batch, draw) * (float("nan") if draw == 1 else 1.0)

    monkeypatch.setattr(Objective, "__call__", nan_once)
    settings = {"steps": 2, "lr_scheduler": "cosine", "disable_sampling": False}
    run = train("nan", place, train=settings, save={"save_every": 1})
    for file in ("lora.safetensors", "published.safetensors"):
        left, right = (load_file(run / "coat" / f"state-00000000{step}" / file) for step in (1, 2))
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert [(row["loss"] == "nan", row["skipped"]) for row in rows(run)] == [(False, "0"), (True, "1")]
    assert float(rows(run)[1]["lr"]) < float(rows(run)[0]["lr"])
    assert "samples of step 2" in capsys.readouterr().out


def test_redrawn_photos_have_the_same_fidelity_after_a_kill(place, killed_at, capsys):
    blocks = {
        "process": {"validation": {"hold_out": 2, "every": 10, "fidelity": True}},
        "train": {"steps": 3},
        "save": {"save_every": 1},
    }
    whole = train("redrawn_whole", place, **blocks)
    text = (whole / FIDELITY_FILE).read_text()
    assert [line.split(",")[0] for line in text.splitlines()] == ["step", "0", "1", "2", "3"]
    assert state_of(whole)["fidelity"]["saves"][-1][0] == 2
    assert "colour: the save of step " in capsys.readouterr().out
    killed_at(3, "redrawn", **blocks)
    resumed = train("redrawn", place, **blocks)
    assert (resumed / FIDELITY_FILE).read_text() == text
    assert_same_end(whole, resumed)


# --- masks and regularization ---
def paint_masks(folder: Path, photos: Path) -> Path:
    """A mask for each photo, of its size: a box that differs from photo to photo."""
    folder.mkdir(exist_ok=True)
    for number, photo in enumerate(sorted(photos.glob("*.png"))):
        with Image.open(photo) as image:
            mask = Image.new("L", image.size, 0)
        mask.paste(255, (4 * number, 0, 4 * number + 24, 40))
        mask.save(folder / photo.name)
    return folder


@pytest.fixture
def masked(place: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A masked, mirrored dataset and one of regularization, of which the latter has every second step's batches."""
    masks = paint_masks(tmp_path / "masks", place["images"])
    entry = engine_job("x", **place, dataset=ON_DISK)["config"]["process"][0]["datasets"][0]
    own = {"mask_path": str(masks), "mask_min_value": 0.1, "flip_x": True}
    datasets = [{**entry, **own}, {**entry, "is_reg": True, "caption_dropout_rate": 0}]
    train = {"steps": 6, "batch_size": 2, "reg_weight": 0.5}
    return {"process": {"datasets": datasets}, "train": train, "save": {"save_every": 3}}


def test_masks_and_regularization_go_on_bit_for_bit_and_a_changed_mask_is_another_run(
    place, masked, tmp_path, killed_at, monkeypatch
):
    drawn = []
    original = Objective.draw

    def draw(self: Objective, batch: dict[str, torch.Tensor], number: int) -> Any:
        if number not in [known for known, *_ in drawn]:  # a step may be computed without its LoRA, too
            drawn.append((number, batch["weights"].tolist(), batch["mask"]))
        return original(self, batch, number)

    monkeypatch.setattr(Objective, "draw", draw)
    monkeypatch.setattr("coat_flux.data.masks.BLUR_SHARE", 0.1)  # up to 6 pixels of 64
    whole = train("masked_whole", place, **masked)
    # step 1 is ai-toolkit's step 0, after which it saves; then every second one
    assert [number >> 40 for number, *_ in drawn] == [0, 0, 1, 0, 1, 0]
    assert [number % (1 << 40) for number, *_ in drawn] == [0, 1, 0, 2, 1, 3]
    for number, weights, mask in drawn:
        assert weights == ([0.5, 0.5] if number >> 40 else [1.0, 1.0])
        assert mask.mean().item() == pytest.approx(1)
        assert (mask == 1).all().item() is bool(number >> 40)
    killed_at(5, "masked", **masked)
    assert_same_end(whole, train("masked", place, **masked))
    Image.new("L", (64, 64), 255).save(tmp_path / "masks" / "0.png")
    masked["train"]["steps"] = 8
    with pytest.raises(ResumeError, match=r"first: datasets\[0\] mask_path/0.png \(changed\)"):
        train("masked", place, **masked)
