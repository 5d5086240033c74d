"""The extension in a real ai-toolkit checkout, on a CPU: `configs/flux_clothing_tiny.yaml`, shortened, through run.py.

docs/ai-toolkit.md says how to make AI_TOOLKIT_ROOT and AI_TOOLKIT_PYTHON without a GPU. The checkout is not written to.
"""

import re
import signal
import sqlite3
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from diffusers import FluxTransformer2DModel

from coat_flux.trainers.ai_toolkit.install import install
from coat_flux.watch.live import give_command, read_status
from tests import tolerances
from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.real import STEPS, Checkout, make_real_entry, real_checkout  # noqa: F401
from tests.tolerances import FLOW_DIRECTION_COSINE

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

EXTENSION = "extensions/coat_flux"
LINEARS = 3 * 14 + 6 * 6  # of the mini-FLUX's blocks
AROUND = 24  # outside of them, and in the text encoder T5, which ai-toolkit's own quantization takes too


@pytest.fixture(scope="module")
def first_run(checkout: Checkout) -> str:
    return checkout.run("coat_job", make_real_entry())


def test_job_runs_from_start_to_samples_and_to_a_lora_that_diffusers_loads(checkout, first_run):
    lora = checkout.lora("coat_job")
    assert len(lora) == 2 * LINEARS
    assert all(key.startswith("transformer.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in lora)
    assert all(value.isfinite().all() for value in lora.values())
    assert any(value.any() for key, value in lora.items() if ".lora_B." in key)
    samples = [path for path in (checkout.folder("coat_job") / "samples").iterdir() if path.suffix == ".jpg"]
    assert len(samples) == 3 * 4  # at the start, in the middle and at the end, of four prompts
    state = checkout.optimizer("coat_job")["state"]
    assert len(state) == 2 * LINEARS
    for key in ("exp_avg_codes", "exp_avg_sq_codes"):
        assert {entry[key].dtype for entry in state.values()} == {torch.float8_e4m3fn}
    assert f"[coat] FP8 weights: {LINEARS} linears at load, 0 after it" in first_run
    assert "[coat] optimizer coat_fp8_adamw: FP8AdamW" in first_run
    log = checkout.log("coat_job")
    assert "outside the blocks: kept in high precision" in log
    for phase in ("before_forward", "after_forward", "after_backward", "after_optimizer_step"):
        assert f"[{phase}] Step {STEPS}: Allocated: " in log
    assert "Allocated: " not in first_run
    model = FluxTransformer2DModel.from_pretrained(checkout.root / "models" / "coat_mini_flux", subfolder="transformer")
    model.load_lora_adapter(dict(checkout.lora("coat_job")), prefix="transformer")
    loaded = {name for name, _ in model.named_parameters() if ".lora_A." in name}
    assert len(loaded) == LINEARS


def test_names_work_in_a_job_of_ai_toolkits_own_type(checkout):
    params = {"weight_decay": 1e-4, "m2_format": "e5m2", "block_size": 64}
    entry = make_real_entry({"coat": ..., "type": "sd_trainer"}, optimizer_params=params)
    out = checkout.run("own_type", entry)
    assert f"[coat] qtype coat_fp8: {AROUND + LINEARS} linears hold FP8, W e4m3/per_tensor, x e4m3/per_row" in out
    assert "[coat] optimizer coat_fp8_adamw: FP8AdamW over" in out
    assert "exp_avg e4m3 (block 64, expanded), exp_avg_sq e5m2 (block 64, expanded)" in out
    state = checkout.optimizer("own_type")["state"][0]
    m, v = state["exp_avg_codes"], state["exp_avg_sq_codes"]
    assert (m.dtype, v.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert state["exp_avg_scale"].numel() == -(-m.numel() // 64)
    assert any(value.any() for key, value in checkout.lora("own_type").items() if ".lora_B." in key)


def test_a_rate_too_high_ends_the_job_and_the_good_state_is_kept(checkout):
    good = make_real_entry({"save.save_every": 6}, lr_scheduler="constant", disable_sampling=True, steps=18)
    checkout.run("ruined", good)
    for name, train in (("ruined", {"lr": 0.3, "steps": 36}), ("ruined_at_once", {"lr": 5e-2, "steps": 12})):
        code, out = checkout.start(name, {**good, "train": {**good["train"], **train}})
        assert code != 0
        assert " times that without it" in out
    states = [path.name for path in (checkout.folder("ruined") / "coat").glob("state-*")]
    assert sorted(states) == ["state-000000018", "state-000000019"]  # saves are one step late
    assert not list((checkout.folder("ruined_at_once") / "coat").glob("state-*"))


def plain_entry(kind: str, **changes: Any) -> dict[str, Any]:
    """Without COAT; who finds a cache of latents draws fewer random numbers."""
    plain = {"type": kind, "model.quantize": False, "model.qtype": ..., "coat": ..., **changes}
    return make_real_entry({**plain, "datasets.0.cache_latents_to_disk": False}, optimizer="adamw")


def test_plain_job_beside_it_is_untouched_and_disabled_is_ai_toolkits_own_run(checkout):
    checkout.run("own", plain_entry("diffusion_trainer"))
    checkout.run("disabled", plain_entry("coat_flux_trainer", coat={"enabled": False}))
    checkout.assert_same_lora("own", "disabled")
    checkout.run("beside", plain_entry("sd_trainer"))
    (checkout.root / EXTENSION).unlink()
    try:
        checkout.run("without", plain_entry("sd_trainer"))
    finally:
        install(checkout.root)
    checkout.assert_same_lora("beside", "without")


FLOWS = {
    "fused": ({}, "none", "9 kept in FP8, fused flow, attention fp8"),
    "fused_bf16_attention": ({"attention": "bf16"}, "none", "9 kept in FP8, fused flow, attention bf16"),
    "generic": ({"flow": "generic"}, "none", "9 kept in FP8, generic flow, attention fp8"),
    "recomputed": ({}, "all", "9 recomputed"),
    "high_precision": ({"use_fp8": False}, "none", "9 kept in high precision"),
}


def test_flows_and_recomputation_from_the_yaml_alone(checkout, first_run):
    """After `first_run`, whose caching of latents draws random numbers, all runs see the same noise."""
    directions = {}
    for name, (activation, checkpointing, got) in FLOWS.items():
        changes = {"coat.activation": activation, "coat.memory": {"checkpointing": checkpointing}}
        out = checkout.run(f"flow_{name}", make_real_entry(changes))
        assert f"  blocks: {got}\n" in checkout.log(f"flow_{name}")
        assert "generic flow in place of" not in out
        lora = checkout.lora(f"flow_{name}")
        directions[name] = torch.cat([lora[key].float().flatten() for key in lora if ".lora_B." in key])
    for name, direction in directions.items():
        similarity = float(torch.nn.functional.cosine_similarity(direction, directions["high_precision"], dim=0))
        assert similarity >= FLOW_DIRECTION_COSINE, f"{name}: {similarity:.4f}"


def test_every_block_is_fused_with_several_images(checkout):
    """ai-toolkit gives the network a multiplier for each image then."""
    changes = {"coat.memory": {"checkpointing": "none"}}
    out = checkout.run("batch", make_real_entry(changes, steps=2, batch_size=2, disable_sampling=True))
    assert "  blocks: 9 kept in FP8, fused flow, attention fp8\n" in checkout.log("batch")
    assert "flow in place of" not in out


# -- kills and stops -------------------------------------------------------------------------------------------------
AVERAGE = {"use_ema": True, "ema_decay": 0.9}


@pytest.fixture(scope="module")
def whole(checkout: Checkout) -> dict[str, Any]:
    """All that has a state: average, schedule, accumulation, captions dropped in two processes, redrawn photos."""
    changes = {
        "datasets.0.caption_dropout_rate": 0.5,
        "datasets.0.num_workers": 2,
        "sample.prompts": ["a plain [trigger]"],
        "sample.sample_steps": 1,
        "validation": {"hold_out": 2, "every": 4, "fidelity": True},
        "logging": {"verbose": True},  # memory lines are printed, too
    }
    entry = make_real_entry(changes, steps=8, gradient_accumulation=2, ema_config=AVERAGE, lr_scheduler="cosine")
    out = checkout.run("whole", entry)
    for measure in ("lowest held-out loss ", "colour: the save of step ", "texture: the save of step "):
        assert f"[coat] {measure}" in out
    return entry


@pytest.mark.parametrize("moment", ["Saving at step 6", "[after_backward] Step 6", "[coat] step 4: 2 held-out photos"])
def test_a_killed_run_ends_as_the_one_that_was_not(checkout, whole, moment):
    name = f"killed_{len(moment)}"
    code, _ = checkout.start(name, whole, at=moment, send=signal.SIGKILL)
    assert code == -signal.SIGKILL
    out = checkout.run(name, whole)
    assert "[coat] resume: continues after step 4" in out or "[coat] resume: continues after step 7" in out
    assert_same_end(checkout.folder("whole"), checkout.folder(name))
    checkout.assert_same_lora("whole", name)
    for column in ("step", "colour", "texture", "vae_colour"):
        expected, measured = (checkout.column(run, column, "fidelity.csv") for run in ("whole", name))
        assert measured == expected, column
        assert len(expected) > 2, column


JOB_TABLE = """CREATE TABLE Job (id TEXT PRIMARY KEY, name TEXT, status TEXT, stop INTEGER DEFAULT 0,
    return_to_queue INTEGER DEFAULT 0, step INTEGER DEFAULT 0, total_steps INTEGER, info TEXT DEFAULT '',
    speed_string TEXT DEFAULT '', save_now INTEGER DEFAULT 0, sample_now INTEGER DEFAULT 0)"""
MOMENTS = {  # moment → class of ai-toolkit or of its libraries, method, and how the run is stopped there
    "before forward": ("toolkit.stable_diffusion_model:StableDiffusion.predict_noise", "button"),
    "in backward": ("accelerate:Accelerator.backward", "button"),
    "in the optimizer": ("accelerate.optimizer:AcceleratedOptimizer.step", "hang-up"),
    "in the save": ("toolkit.network_mixins:ToolkitNetworkMixin.save_weights", "flag"),
    "in the validation": ("jobs.process.BaseSDTrainProcess:BaseSDTrainProcess.validate", "button"),
    "while sampling": ("toolkit.stable_diffusion_model:StableDiffusion._after_sample_image", "button"),
    "between two steps": ("jobs.process.BaseSDTrainProcess:BaseSDTrainProcess.end_step_hook", "queue"),
}
LAST = len(MOMENTS) + 2  # stopped in the second and in each step after it, but for the last
SAVE_EVERY, VALIDATE_EVERY, SAMPLE_EVERY = 4, 5, 6  # ai-toolkit counts from 0: in the fifth, sixth and seventh step
STOPPER = """
import importlib, os, signal, sqlite3

if "STOP" in os.environ:
    where, how, at = os.environ["STOP"].split(",")
    module, _, name = where.partition(":")
    kind, _, method = name.partition(".")
    owner, state = getattr(importlib.import_module(module), kind), {"step": 0, "stops": 1}
    original = getattr(owner, method)
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    train = SDTrainer.hook_train_loop

    def counting(self, batch):
        state["step"] = self.step_num + 1
        return train(self, batch)

    def stopping(*args, **kwargs):
        if state["step"] == int(at) and state["stops"]:
            state["stops"] = 0
            if how != "hang-up":
                with sqlite3.connect(os.environ["DATABASE"]) as table:
                    table.execute("UPDATE Job SET %s = 1" % ("return_to_queue" if how == "queue" else "stop"))
            if how in ("button", "hang-up"):
                os.kill(os.getpid(), signal.SIGINT if how == "button" else signal.SIGHUP)
        return original(*args, **kwargs)

    setattr(owner, method, stopping)
    SDTrainer.hook_train_loop = counting
"""


def stopped_entry(checkout: Checkout) -> dict[str, Any]:
    photo = min((checkout.root / "datasets_example" / "clothing").glob("*.png"))
    photos = [{"image_path": str(photo), "prompt": "dungarees"}]
    validation = {"resolution": 64, "validate_every_n_steps": VALIDATE_EVERY, "validation_items": photos}
    samples = {"sample.sample_every": SAMPLE_EVERY, "sample.prompts": ["a plain [trigger]", "a dotted [trigger]"]}
    changes = {"sqlite_db_path": str(checkout.root / "jobs.db"), "save.save_every": SAVE_EVERY, **samples}
    changes |= {"sample.sample_steps": 1, "train.validation_config": validation}
    return make_real_entry(changes, steps=LAST, ema_config=AVERAGE, skip_first_sample=True)


def run_from_ui(checkout: Checkout, name: str, stop: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run a job as the web UI does: a JSON config with the path of its database, the job's id in the environment.

    Returns exit code, output and the job's row.
    """
    database = checkout.root / "jobs.db"
    with sqlite3.connect(database) as table:
        table.execute(JOB_TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        table.execute("INSERT OR REPLACE INTO Job (id, name, status) VALUES (?, ?, 'running')", (name, name))
    environment = {"AITK_JOB_ID": name, "DATABASE": str(database)} | ({"STOP": stop} if stop else {})
    code, out = checkout.start(name, stopped_entry(checkout), environment=environment)
    with sqlite3.connect(database) as table:
        table.row_factory = sqlite3.Row
        row = dict(table.execute("SELECT * FROM Job WHERE id = ?", (name,)).fetchone())
    return code, out, row


def test_a_job_stopped_at_every_moment_of_a_step_ends_as_the_one_that_was_not(checkout):
    (checkout.root / "extensions" / "stopper.py").write_text(STOPPER)
    code, out, row = run_from_ui(checkout, "never_stopped")
    assert (code, row["status"]) == (0, "completed"), out[-4000:]
    for step, (moment, (where, how)) in enumerate(MOMENTS.items(), start=2):
        code, out, row = run_from_ui(checkout, "stopped", f"{where},{how},{step}")
        assert code == 130, f"{moment}: {out[-4000:]}"
        assert f"[coat] stopped after {step} steps, saved in" in out, moment
        assert (row["status"], row["step"]) == ("queued" if how == "queue" else "stopped", step), moment
        if step > 2:
            assert f"[coat] resume: continues after step {step - 1}," in out, moment
    code, out, row = run_from_ui(checkout, "stopped")
    assert (code, row["status"]) == (0, "completed"), out[-4000:]
    assert_same_end(checkout.folder("never_stopped"), checkout.folder("stopped"), records=False)
    checkout.assert_same_lora("never_stopped", "stopped")


# -- held-out photos and the live page -------------------------------------------------------------------------------
OUT = ["01_striped_red.jpg", "07_plain_orange.jpg"]


def held_out_entry(every: int) -> dict[str, Any]:
    samples = {"sample.sample_every": 1000, "sample.prompts": ["a plain [trigger]"]}
    validation = {"hold_out": OUT, "every": every}
    changes = {"save.save_every": 3, "training_seed": 11, "validation": validation, **samples}
    return make_real_entry(changes, steps=8, ema_config={"use_ema": True, "ema_decay": 0.5}, skip_first_sample=True)


def when_at(checkout: Checkout, name: str, step: int, *commands: str) -> None:
    """Give commands once a run has done so many steps."""
    run = checkout.folder(name)
    while not (run / "coat" / "metrics.csv").exists() or len(checkout.column(name, "step")) < step:
        time.sleep(0.1)
    for command in commands:
        give_command(run, command)


def test_held_out_photos_and_the_live_page(checkout):
    said = checkout.run("seldom", held_out_entry(1000))
    assert f"2 photos are held out of training: {', '.join(OUT)}" in said
    assert "Found 14 images" in said
    often = checkout.folder("often")
    asking = [
        threading.Thread(target=when_at, args=(checkout, "often", *what))
        for what in ((2, "sample", "save"), (5, "stop"))
    ]
    for thread in asking:
        thread.start()
    code, stopped = checkout.start("often", held_out_entry(3))
    for thread in asking:
        thread.join()
    if code != 0:  # else it was done before the command came, on a fast machine
        assert code == 130, stopped[-3000:]
        assert read_status(often)["ended"] == "stopped"
        ended = checkout.run("often", held_out_entry(3))
    else:
        ended = stopped
    assert read_status(often)["ended"] == "finished"
    samples = {path.name.split("__")[1][:9] for path in (often / "samples").glob("*.jpg")}
    assert len(samples) == 2, samples  # when asked for, at the end
    checkout.assert_same_lora("seldom", "often")  # measuring, sampling, saving and stopping left no trace
    found, ends = (
        dict(zip(*(checkout.column(name, column, "validation.csv") for column in ("step", "loss")), strict=True))
        for name in ("often", "seldom")
    )
    assert sorted(found) == [0, 4, 7, 8]
    assert ends == {0: found[0], 8: found[8]}
    assert len(set(found.values())) == 4
    lowest = min(found, key=found.get)
    assert f"lowest held-out loss {found[lowest]:.6f} at step {lowest:.0f} (" in ended


# -- several processes, on a CPU (gloo) -------------------------------------------------------------------------------
def entry_of(accumulation: int, *, steps: int = 4, **changes: Any) -> dict[str, Any]:
    changes = {
        "sample.prompts": [f"a {look} [trigger]" for look in ("plain", "dotted", "striped")],
        "logging": {"verbose": True},  # memory lines are printed, too
        **changes,
    }
    return make_real_entry(changes, gradient_accumulation=accumulation, steps=steps, lr_scheduler="constant")


def assert_same(checkout: Checkout, name: str, other: str) -> None:
    left, right = checkout.lora(name), checkout.lora(other)
    assert left.keys() == right.keys()
    assert any(value.any() for key, value in left.items() if ".lora_B." in key)
    one, two = (torch.cat([lora[key].float().flatten() for key in left]) for lora in (left, right))
    assert (one - two).norm() <= tolerances.PROCESSES_LORA_DISTANCE * two.norm()
    first = slice(tolerances.PROCESSES_FIRST_STEPS)
    ours, theirs = checkout.column(name, "loss")[first], checkout.column(other, "loss")[first]
    assert ours == pytest.approx(theirs, rel=tolerances.PROCESSES_LOSS_RTOL)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_train_as_one_with_accumulation(checkout, processes):
    several, alone = f"p{processes}", f"accumulation_{processes}"
    out = checkout.run(several, entry_of(1), processes=processes)
    assert out.count("[coat] done: 4 steps") == 1
    checkout.run(alone, entry_of(processes))
    assert_same(checkout, several, alone)
    samples = [p.name for p in (checkout.folder(several) / "samples").iterdir() if p.suffix == ".jpg"]
    drawn = sorted(re.fullmatch(r"\d+__(\d{9})_(\d)\.jpg", name).groups() for name in samples)
    assert drawn == [(f"{step:09}", str(prompt)) for step in (0, 3, 4) for prompt in range(3)]


def test_a_run_of_two_is_resumed_by_one_and_by_three(checkout):
    allowed = {"coat.resume.allow": ["world_size"]}
    for name, processes, accumulation in (("p_by_one", 1, 2), ("p_by_three", 3, 1)):
        checkout.run(name, entry_of(1), processes=2)
        checkout.run(name, entry_of(accumulation, steps=6, **allowed), processes=processes)
        assert len(checkout.column(name, "loss")) == 6
    checkout.run("p_never_stopped", entry_of(2, steps=6))
    assert_same(checkout, "p_by_one", "p_never_stopped")


def test_a_stop_of_one_process_ends_all_after_one_save(checkout):
    code, out = checkout.start(
        "p_stopped", entry_of(1, steps=50), at="[after_backward] Step 3", send=signal.SIGINT, processes=2
    )
    assert code != 0
    assert out.count("[coat] stopped after") == 1
    assert len(list((checkout.folder("p_stopped") / "coat").glob("state-*"))) >= 1
    assert "[rank" not in out  # with which torch marks a traceback of one of them; the launcher has its own


def test_a_killed_process_ends_all_with_one_message(checkout):
    code, out = checkout.start(
        "p_killed", entry_of(1, steps=50), at="[after_backward] Step 6", send=kill_second, processes=2
    )
    assert code != 0
    assert out.count("Error running job: another process of this run has ended") <= 1
    assert len(re.findall(r"^(?:\[rank\d\]: )?\S*LostProcessError: another process of this run", out, re.M)) == 1
    checkout.run("p_killed", entry_of(1, steps=6), processes=2)
    checkout.run("p_not_killed", entry_of(1, steps=6), processes=2)
    assert_same(checkout, "p_killed", "p_not_killed")


def kill_second(process: Any) -> None:
    (victim,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    victim.kill()
