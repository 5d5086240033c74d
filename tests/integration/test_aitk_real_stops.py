"""Stops in a real ai-toolkit checkout, on a CPU; see test_aitk_real.py.

Jobs run as the web UI runs them: a JSON config with the path of its database, and the job's id in the environment.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.real import Checkout, make_real_entry, real_checkout  # noqa: F401

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

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
STEPS = len(MOMENTS) + 2  # stopped in the second and in each step after it, but for the last
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


def _entry(checkout: Checkout) -> dict[str, Any]:
    entry = make_real_entry(steps=STEPS, ema_config={"use_ema": True, "ema_decay": 0.9}, skip_first_sample=True)
    entry["sqlite_db_path"] = str(checkout.root / "jobs.db")
    entry["save"]["save_every"], entry["sample"]["sample_every"] = SAVE_EVERY, SAMPLE_EVERY
    entry["sample"].update(prompts=entry["sample"]["prompts"][:2], sample_steps=1)
    photo = min((checkout.root / "datasets_example" / "clothing").glob("*.png"))
    entry["train"]["validation_config"] = {
        "resolution": 64,
        "validate_every_n_steps": VALIDATE_EVERY,
        "validation_items": [{"image_path": str(photo), "prompt": "dungarees"}],
    }
    return entry


def _job(checkout: Checkout, name: str, stop: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run a job as the web UI does, from its start button on; returns exit code, output and the job's row."""
    database = checkout.root / "jobs.db"
    with sqlite3.connect(database) as table:
        table.execute(JOB_TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        table.execute("INSERT OR REPLACE INTO Job (id, name, status) VALUES (?, ?, 'running')", (name, name))
    environment = {"AITK_JOB_ID": name, "DATABASE": str(database)} | ({"STOP": stop} if stop else {})
    code, out = checkout.start(name, _entry(checkout), environment=environment)
    with sqlite3.connect(database) as table:
        table.row_factory = sqlite3.Row
        row = dict(table.execute("SELECT * FROM Job WHERE id = ?", (name,)).fetchone())
    return code, out, row


def test_a_job_stopped_at_every_moment_of_a_step_ends_as_the_one_that_was_not(checkout: Checkout) -> None:
    (checkout.root / "extensions" / "stopper.py").write_text(STOPPER)
    code, out, row = _job(checkout, "whole")
    assert (code, row["status"]) == (0, "completed"), out[-4000:]
    for step, (moment, (where, how)) in enumerate(MOMENTS.items(), start=2):
        code, out, row = _job(checkout, "stopped", f"{where},{how},{step}")
        assert code == 130, f"{moment}: {out[-4000:]}"
        assert f"[coat] stopped after {step} steps, saved in" in out, moment
        assert (row["status"], row["step"]) == ("queued" if how == "queue" else "stopped", step), moment
        if step > 2:
            assert f"[coat] resume: continues after step {step - 1}," in out, moment
    code, out, row = _job(checkout, "stopped")
    assert (code, row["status"]) == (0, "completed"), out[-4000:]
    assert_same_end(checkout.folder("whole"), checkout.folder("stopped"), records=False)
    checkout.assert_same_lora("whole", "stopped")
