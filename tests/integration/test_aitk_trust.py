"""Nothing fails late, silently or halfway inside ai-toolkit: in the stand-in, whole jobs."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from coat_flux.blocks import formats
from coat_flux.cli.entry import main
from coat_flux.data.files import DatasetError
from coat_flux.saves.errors import ResumeError, SaveError
from coat_flux.watch.guard import DeadRunError
from coat_flux.watch.live import give_command, read_status
from coat_flux.watch.oom import OutOfMemory
from tests.helpers.aitk_standin.ends import assert_same_end, newest_state
from tests.helpers.aitk_standin.host import (  # noqa: F401
    COAT_ENTRY,
    NEWER_VERSION,
    VERSION,
    Host,
    Patch,
    make_entry,
    run_whole,
    standin_host,
)
from tests.helpers.asserts import assert_bitwise
from tests.helpers.format_clock import FormatClock
from tests.helpers.step_watch import set_limits
from tests.reliability.forks import held_by_another_process

STEPS = 8
ACCUMULATION = 2
AVERAGE = {"use_ema": True, "ema_decay": 0.9}
TRAIN = {"steps": STEPS, "gradient_accumulation": ACCUMULATION, "ema_config": AVERAGE, "batch_size": 2}
TRAIN |= COAT_ENTRY["train"]
SAVE = {"save_every": 3, "max_step_saves_to_keep": 1}


def _entry(**train: Any) -> dict[str, Any]:
    return {"model": COAT_ENTRY["model"], "train": {**TRAIN, **train}, "save": SAVE}


def _at_step(host: Host, monkeypatch: Patch, step: int, act: Callable[[torch.Tensor], Any]) -> None:
    """Let `act` look at the loss of a step (from 1), or replace it, once."""
    host.start()
    trainer = host.load("extensions_built_in.sd_trainer.SDTrainer").SDTrainer
    compute, calls = trainer.calculate_loss, []

    def calculate_loss(self: Any, **args: Any) -> Any:
        loss = compute(self, **args)
        calls.extend([loss] if loss.requires_grad else [])  # the others are of comparisons
        if not loss.requires_grad or len(calls) != (step - 1) * ACCUMULATION + 1:
            return loss
        replaced = act(loss)
        return loss if replaced is None else replaced

    monkeypatch.setattr(trainer, "calculate_loss", calculate_loss)


def _always(host: Host, monkeypatch: Patch, factor: float) -> None:
    """Let every loss be the prediction's sum times `factor`."""
    host.start()
    trainer = host.load("extensions_built_in.sd_trainer.SDTrainer").SDTrainer
    monkeypatch.setattr(trainer, "calculate_loss", lambda self, noise_pred, noise: noise_pred.sum() * factor)


def _fail(loss: torch.Tensor) -> None:
    raise ZeroDivisionError("the power is cut")


def _state(host: Host) -> Path:
    return newest_state(host.save_folder)


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _updates(host: Host) -> set[float]:
    return {float(state["step"]) for state in host.optimizer()["state"].values()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_whole(tmp_path_factory.mktemp("whole") / "ait", **_entry())


# -- resume ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("host", "workers"), [(VERSION, 0), (VERSION, 2), (NEWER_VERSION, 0)], indirect=["host"])
def test_run_that_was_cut_ends_as_the_one_that_was_not(host, monkeypatch, capsys, workers):
    host.run(**_entry(), training_folder=str(host.root / "whole"))
    datasets = [{**make_entry(host.root, "any")["datasets"][0], "num_workers": workers}]
    with monkeypatch.context() as patch:
        _at_step(host, patch, 6, _fail)
        with pytest.raises(ZeroDivisionError):
            host.run(**_entry(), datasets=datasets)
    assert _state(host).name == "state-000000004"  # ai-toolkit's save at step 3 comes after 4 updates
    host.run(**_entry(), datasets=datasets)
    assert "[coat] resume: continues after step 4, epoch 3" in capsys.readouterr().out
    assert_same_end(host.root / "whole" / "standin_job", host.save_folder)


@pytest.mark.parametrize(("ms", "taken"), [(1.0, "int8"), (3.0, "e4m3")])
def test_without_a_seed_the_order_stays_and_auto_times_once(ms, taken, host, monkeypatch, capsys):
    monkeypatch.setattr(formats, "DEVICE", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(host.root / "cache"))
    clock, found, seeds = FormatClock(monkeypatch, int8=ms), [], []
    for steps in (2, 3):
        clock.timed.clear()
        host.run(**_entry(steps=steps), training_seed=None, coat={"weight": {"format": "auto"}})
        record = json.loads((_state(host) / "aitk" / "state.json").read_text())
        seeds.append((record["seed"], record["data"]["data"]["order"]))
        found.append((record["path"]["weight_format"], record["path"]["weight_ms"], bool(clock.timed)))
        out = " ".join(capsys.readouterr().out.split())
        assert f"weights {taken} (asked: auto; " in out
        assert "not bit for bit" not in out
        shutil.rmtree(host.root / "cache", ignore_errors=True)
    times = {"e4m3": 2.0, "int8": ms}
    assert found == [(taken, times, True), (taken, times, False)]
    assert seeds[0] == seeds[1]


def test_a_folder_of_another_process_or_without_room_for_a_save_ends_the_run_before_its_first_step(host, monkeypatch):
    host.start()
    with held_by_another_process(host.save_folder), pytest.raises(ResumeError, match="another process"):
        host.run(**_entry())
    usage = type(shutil.disk_usage("."))(0, 0, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SaveError, match=r"one save takes .* are free"):
        host.run(**_entry())
    assert not list(host.save_folder.glob("*.safetensors"))


def test_another_run_is_not_resumed_and_changed_options_count_and_are_said(host, capsys):
    host.run(**_entry(steps=2))
    for change, message in (
        ({"network": {"type": "lora", "linear": 8}}, r"network\.linear 4 -> 8"),
        ({"training_seed": 8}, r"seed 7 -> 8; .*coat\.resume\.allow: \[seed\]"),
        ({"train": {**TRAIN, "batch_size": 1}}, r"batch\.batch_size 2 -> 1"),
        ({"train": {**TRAIN, "start_step": 0}}, r"train\.start_step=0"),
    ):
        with pytest.raises(ResumeError, match=message):
            host.run(**{**_entry(steps=2), **change})
    params = {"optimizer_params": {"weight_decay": 0.5, "block_size": 32}}
    host.run(**_entry(steps=4, **params), coat={"optimizer": {"m2_format": "e5m2"}, "memory": {"log_every": 7}})
    out = capsys.readouterr().out
    for words in ('coat.optimizer.m2_format "e4m3" -> "e5m2"', "weight_decay 0.01 -> 0.5", "re-quantized"):
        assert words in out
    saved = host.optimizer()
    assert saved["state"][0]["exp_avg_sq_codes"].dtype == torch.float8_e5m2
    assert (saved["param_groups"][0]["weight_decay"], saved["param_groups"][0]["fp8"]["block_size"]) == (0.5, 32)
    assert _state(host).name == "state-000000004"
    (host.root / "photos" / "1.txt").write_text("coatwear, another caption")
    with pytest.raises(ResumeError, match=r"data: 1 of 10 images and captions differ"):
        host.run(**_entry(steps=6))


def test_an_optimizer_that_cannot_read_8_bit_moments_is_refused_before_the_model_loads(host, monkeypatch):
    host.run(**_entry(steps=2))
    before, other = _files(host.save_folder), {**_entry(steps=4, optimizer="AdamW"), "model": {"quantize": False}}
    module = host.load("jobs.process.BaseSDTrainProcess")
    monkeypatch.setattr(module, "FluxTransformer2DModel", lambda: pytest.fail("the model was loaded"))
    for coat in ({}, {"enabled": False}):
        message = r"optimizer\.pt: was written by coat_fp8_adamw, .*train\.optimizer=AdamW .*another config\.name"
        with pytest.raises(ResumeError, match=message):
            host.run(**other, coat=coat)
    after = _files(host.save_folder)
    assert {path: after[path] for path in before if path.suffix in (".pt", ".safetensors")}.items() <= before.items()


def test_average_that_is_new_begins_with_the_raw_lora_and_the_save_of_another_program_is_gone_on_from(host, capsys):
    host.run(**_entry(steps=2, ema_config={}))
    raw = load_file(_state(host) / "aitk" / "lora.safetensors")
    host.run(**_entry(steps=2))  # no step is left: both are as they were resumed
    averages = load_file(_state(host) / "aitk" / "ema.safetensors")
    model = host.load("jobs.process.BaseSDTrainProcess").FluxTransformer2DModel()
    network = host.load("toolkit.lora_special").LoRASpecialNetwork(model, 4, ("blocks",))
    for index, (name, _) in enumerate(network.named_parameters()):
        assert_bitwise(averages[str(index)], raw[name])
    host.run("sd_trainer", **_entry(steps=4))
    host.run(**_entry(steps=6))
    assert "standin_job.safetensors is newer than" in capsys.readouterr().out
    assert _state(host).name == "state-000000006"


@pytest.mark.parametrize(("further", "step"), [({"lr": 1e4}, 4), ({"lr": 0.3, "steps": 20}, 6)])
def test_a_diverged_run_goes_back_by_the_command_it_prints_and_ends_as_the_good_one(host, capsys, whole, further, step):
    host.run(**_entry(steps=6))
    with pytest.raises(DeadRunError, match=rf"lower train\.lr.*then go back to step {step} and") as end:
        host.run(**_entry(**further))
    command = str(end.value).partition("start the job again: ")[2]
    words = shlex.split(command)  # "coat-flux rewind ...", or Python and the path of coat_flux/cli off PATH
    assert main(words[words.index("rewind") :]) == 0
    assert "moved to" in capsys.readouterr().out
    host.run(**_entry())
    assert f"[coat] resume: continues after step {step}" in capsys.readouterr().out
    assert_same_end(whole, host.save_folder)


def test_a_damaged_byte_falls_back_to_the_older_state(host, capsys, whole):
    host.run(**_entry(steps=6))
    file = _state(host) / "aitk" / "rng.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    host.run(**_entry())
    assert "the run resumes from step 4" in capsys.readouterr().out
    aside = host.save_folder / "coat" / "set-aside-000000004" / "state-000000006"
    assert (aside / "aitk" / "rng.safetensors").read_bytes() == damaged
    assert_same_end(whole, host.save_folder)


# -- stops: by whom and whenever, as Ctrl+C ends a run ----------------------------------------------------------------
AT = 3  # stopped in the fourth step, which saves and samples
SAMPLES = {"sample": {"sample_every": AT}}
MOMENTS = {  # moment → module, class, method, and how the run is stopped when it is called
    "before forward": ("extensions_built_in.sd_trainer.SDTrainer", "SDTrainer", "hook_train_loop", "SIGTERM"),
    "in backward": ("jobs.process.BaseSDTrainProcess", "Accelerator", "backward", "SIGINT"),
    "in the optimizer": ("coat_core.optim", "FP8AdamW", "step", "SIGHUP"),
    "in the save": ("toolkit.lora_special", "LoRASpecialNetwork", "save_weights", "stop"),
    "while sampling": ("jobs.process.BaseSDTrainProcess", "BaseSDTrainProcess", "sample_step_hook", "stop"),
    "between two steps": ("jobs.process.BaseSDTrainProcess", "BaseSDTrainProcess", "end_step_hook", "return_to_queue"),
}


def run_stopped(host: Host, moment: str, at: int) -> Any:
    """Run a job that is stopped once; returns its process."""
    host.start()
    trainer = host.load("extensions_built_in.sd_trainer.DiffusionTrainer").DiffusionTrainer
    module, kind, method, way = MOMENTS[moment]
    owner = getattr(host.load(module), kind)
    original, init = getattr(owner, method), trainer.__init__
    processes: list[Any] = []
    stops = [way]

    def made(process: Any, *args: Any, **kwargs: Any) -> None:
        init(process, *args, **kwargs)
        processes.append(process)

    with pytest.MonkeyPatch.context() as patch:

        def stopping(*args: Any, **kwargs: Any) -> Any:
            process = processes[0]
            is_now = process.step_num - (method == "end_step_hook") == at and hasattr(process, "optimizer")
            if is_now and stops:
                stops.clear()
                if way.startswith("SIG"):
                    signal.raise_signal(getattr(signal, way, signal.SIGINT))  # Windows has no SIGHUP
                else:  # as a button of the web UI does
                    patch.setattr(trainer, "requests", frozenset({way}))
            return original(*args, **kwargs)

        patch.setattr(trainer, "__init__", made)
        patch.setattr(trainer, "is_ui_trainer", True)
        patch.setattr(owner, method, stopping)
        with pytest.raises(SystemExit) as ended:
            host.run(**_entry(), **SAMPLES)
    assert not stops
    assert ended.value.code == 130
    return processes[0]


@pytest.mark.parametrize(("moment", "at"), [*((moment, AT) for moment in MOMENTS), ("while sampling", 0)])
def test_a_job_stopped_at_any_moment_ends_as_the_one_that_was_not(host, capsys, whole, moment, at):
    """Samples of step 0 are those before training."""
    before = signal.getsignal(signal.SIGTERM)
    is_queued = MOMENTS[moment][-1] == "return_to_queue"
    assert run_stopped(host, moment, at).status == ("queued" if is_queued else "stopped")
    assert signal.getsignal(signal.SIGTERM) == before
    said = f"after {AT + 1} steps, saved in" if at else "before the first step"
    assert f"[coat] stopped {said}" in capsys.readouterr().out
    assert any(host.save_folder.glob("*.safetensors")) == (at > 0)
    host.run(**_entry(), **SAMPLES)
    assert_same_end(whole, host.save_folder)


# -- saves -----------------------------------------------------------------------------------------------------------
def test_save_that_fails_leaves_the_one_before(host, monkeypatch):
    write, calls = torch.save, []

    def disk_is_full(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*args, **kwargs)

    host.start()
    monkeypatch.setattr(torch, "save", disk_is_full)
    with pytest.raises(SaveError, match=r"the checkpoint of step 7 cannot be saved"):
        host.run(**_entry())
    assert _state(host).name == "state-000000004"
    names = {path.name for path in host.save_folder.iterdir() if path.is_file()}
    assert names == {"config.yaml", "optimizer.pt", "standin_job_000000003.safetensors"}
    for name in ("optimizer.pt", "standin_job_000000003.safetensors"):
        assert (host.save_folder / name).read_bytes() == (_state(host) / name).read_bytes()


def test_old_saves_are_cleaned_up_and_the_newest_is_found(host, capsys):
    host.run(**_entry())
    names = ["standin_job.safetensors", "standin_job_000000006.safetensors"]
    assert sorted(path.name for path in host.save_folder.glob("*.safetensors")) == names
    newest = max(host.save_folder.glob("*.safetensors"), key=lambda path: path.stat().st_ctime_ns)
    assert newest.name == names[0]
    with safe_open(host.save_folder / names[1], framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["training_info"])["step"] == 7
    assert "W e4m3/per_tensor" in metadata["coat.asked.transformer_blocks"]
    assert "FP8AdamW" in metadata["coat.got.optimizer"]
    assert "standin_job.safetensors after 8 steps; loads in: " in capsys.readouterr().out
    os.utime(host.save_folder / names[1])  # ai-toolkit would take this one now
    assert host.run(**_entry()).start_step == STEPS - 1


# -- guard and memory ------------------------------------------------------------------------------------------------
def test_one_nan_is_skipped_and_counted_and_nan_for_good_ends_the_run(host, monkeypatch, capsys):
    _at_step(host, monkeypatch, 2, lambda loss: loss * torch.nan)
    host.run(**_entry(steps=4))
    out = capsys.readouterr().out
    assert "[coat] step 2: loss=nan" in out
    assert "[coat] done: 4 steps, 1 updates skipped" in out
    assert _updates(host) == {3.0}
    set_limits(monkeypatch, nonfinite_steps=2)
    before = _files(_state(host))
    _always(host, monkeypatch, torch.nan)
    with pytest.raises(DeadRunError, match="step 6: loss=nan"):
        host.run(**_entry())
    assert _files(_state(host)) == before


def test_lora_that_never_moves_is_not_saved_as_the_result(host, monkeypatch):
    _always(host, monkeypatch, 1e-38)
    with pytest.raises(DeadRunError):
        host.run(**_entry(lr=1e-30, steps=3))
    assert not (host.save_folder / "standin_job.safetensors").exists()


@pytest.mark.parametrize("checkpointing", ["none", "auto"])
def test_out_of_memory_is_tried_again_with_more_recomputation_or_ends_the_run(host, monkeypatch, capsys, checkpointing):
    def too_large(loss: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    _at_step(host, monkeypatch, 5, too_large)
    monkeypatch.setattr("coat_flux.plan.cards.EDITS", ())
    entry = _entry() | {"coat": {"memory": {"checkpointing": checkpointing}}}
    if checkpointing == "none":
        with pytest.raises(OutOfMemory, match="step 5: out of memory"):
            host.run(**entry)
    else:
        host.run(**entry)
        assert _updates(host) == {float(STEPS)}
    out = capsys.readouterr().out
    assert "Out of memory in the phase step" in out
    assert ("Step 5 is tried again: " in out) == (checkpointing == "auto")
    assert "OOM, skipping batch" not in out
    assert _state(host).name == f"state-{STEPS if checkpointing == 'auto' else 4:09d}"


# -- photos ----------------------------------------------------------------------------------------------------------
def test_misread_photos_are_read_from_copies_and_others_end_the_run(host, monkeypatch):
    folder = Path(make_entry(host.root, "any")["datasets"][0]["folder_path"])
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGBA", (64, 48), (200, 10, 10, 128)).save(folder / "1.png", exif=exif)
    original = (folder / "1.png").read_bytes()
    config = host.run(**_entry(steps=2), coat={"data": {"transparency": "mask"}}).dataset_configs[0]
    read = Path(config.folder_path)
    assert (folder / "1.png").read_bytes() == original
    assert read == host.save_folder / "coat" / "photos" / "0" / "images"
    with Image.open(read / "1.png") as copy, Image.open(Path(config.mask_path) / "1.png") as mask:
        assert (copy.mode, copy.size) == ("RGB", (48, 64))
        assert mask.getpixel((5, 5)) in (127, 128)
    (folder / "2.png").write_bytes(b"not a picture")
    base = host.load("jobs.process.BaseSDTrainProcess").BaseSDTrainProcess
    monkeypatch.setattr(base, "_load_model", lambda self: pytest.fail("the model was loaded"))
    with pytest.raises(DatasetError, match=r"2\.png"):
        host.run(**_entry())


def test_photos_held_out_are_in_no_data_set_and_measured_when_due(host, monkeypatch, capsys):
    measured: list[int] = []

    def measure(photos: Any, done: int) -> float:
        measured.append(done)
        photos.curve.append((done, 1.0 / done if done else 2.0))
        return photos.curve[-1][1]

    host.start()
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.encode", lambda photos: None)
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.measure", measure)
    validation = {"validation": {"hold_out": ["1.png"], "every": 3}}
    trained = Path(host.run(**_entry(steps=5), **validation).dataset_configs[0].folder_path)
    assert sorted(path.name for path in trained.glob("*.png")) == ["0.png", "2.png", "3.png", "4.png"]
    assert [path.name for path in (host.save_folder / "coat" / "held_out" / "0").rglob("*.png")] == ["1.png"]
    host.run(**_entry(steps=8), **validation)
    assert measured == [0, 4, 5, 7, 8]
    table = (host.save_folder / "coat" / "validation.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in table] == ["step", "0", "4", "5", "7", "8"]
    assert "lowest held-out loss 0.125000 at step 8 (" in capsys.readouterr().out
    with pytest.raises(ResumeError, match=r"datasets\[0\]\.held_out"):
        host.run(**_entry(steps=9))


def test_videos_beside_a_photo_that_is_corrected_are_trained_on_and_never_held_out(host, monkeypatch):
    folder, photo = host.root / "clips", Image.new("RGBA", (64, 64), (10, 20, 30, 99))
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.mp4").write_bytes(name.encode())
        photo.save(folder / f"{name}_still.png")
    datasets = {"datasets": [{"folder_path": str(folder), "resolution": [64], "num_frames": 9}]}
    host.start()
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.encode", lambda photos: None)
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.measure", lambda photos, done: 1.0)
    process = host.run(**_entry(steps=2), **datasets, validation={"hold_out": 1})
    trained, held_out = Path(process.dataset_configs[0].folder_path), host.save_folder / "coat" / "held_out" / "0"
    assert [len([*trained.rglob("*.mp4")]), len([*held_out.rglob("*.mp4")])] == [2, 0]
    assert len([*trained.rglob("*.png")]) == 1
    (folder / "two.mp4").write_bytes(b"three")
    with pytest.raises(ResumeError, match=r"two\.mp4"):
        host.run(**_entry(steps=3), **datasets, validation={"hold_out": 1})


def test_a_list_may_be_the_only_data_set_and_is_compared_at_a_resume(host):
    make_entry(host.root, "")
    paths = {str(path): {"caption": "sks"} for path in sorted((host.root / "photos").glob("*.png"))}
    listed = host.root / "list.json"
    listed.write_text(json.dumps(paths))
    datasets = {"datasets": [{"dataset_path": str(listed), "resolution": [64]}]}
    assert len(host.run(**_entry(steps=2), **datasets).losses) == 2
    listed.write_text(json.dumps(dict(list(paths.items())[1:])))
    with pytest.raises(ResumeError, match=r"list\.json"):
        host.run(**_entry(steps=3), **datasets)


# -- the live page ---------------------------------------------------------------------------------------------------
def test_the_live_page_samples_saves_and_stops_between_steps(host, monkeypatch, capsys, whole):
    prompts = {"sample": {"sampler": "flowmatch", "prompts": ["a sks shirt"], "sample_every": 100}}

    def press(*names: str) -> None:
        status = read_status(host.save_folder)
        assert (status["alive"], status["takes"]) == (True, ["sample", "save", "stop"])
        for name in names:
            give_command(host.save_folder, name)

    with monkeypatch.context() as patch:
        _at_step(host, patch, 2, lambda loss: press("sample", "save"))
        assert host.run(**_entry(steps=3), **prompts).drawn_at[-2:] == [2, 3]  # at the button, and the last
    assert "after 2 steps" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        _at_step(host, patch, 3, lambda loss: press("stop"))
        with pytest.raises(SystemExit) as ended:
            host.run(**_entry(), **prompts)
    assert ended.value.code == 130
    assert "the live page asks to stop" in capsys.readouterr().out
    assert (_state(host).name, read_status(host.save_folder)["ended"]) == ("state-000000006", "stopped")
    host.run(**_entry(), **prompts)
    assert read_status(host.save_folder)["ended"] == "finished"
    assert_same_end(whole, host.save_folder)
