"""Several processes in a real ai-toolkit checkout, on a CPU (gloo): see test_aitk_real.py."""

import re
import signal
from typing import Any

import psutil
import pytest
import torch

from tests import tolerances
from tests.helpers.aitk_standin.real import Checkout, make_real_entry, real_checkout  # noqa: F401

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]


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
    for name, processes, accumulation in (("by_one", 1, 2), ("by_three", 3, 1)):
        checkout.run(name, entry_of(1), processes=2)
        checkout.run(name, entry_of(accumulation, steps=6, **allowed), processes=processes)
        assert len(checkout.column(name, "loss")) == 6
    checkout.run("never_stopped", entry_of(2, steps=6))
    assert_same(checkout, "by_one", "never_stopped")


def test_a_stop_of_one_process_ends_all_after_one_save(checkout):
    code, out = checkout.start(
        "stopped", entry_of(1, steps=50), at="[after_backward] Step 3", send=signal.SIGINT, processes=2
    )
    assert code != 0
    assert out.count("[coat] stopped after") == 1
    assert len(list((checkout.folder("stopped") / "coat").glob("state-*"))) >= 1
    assert "[rank" not in out  # with which torch marks a traceback of one of them; the launcher has its own


def test_a_killed_process_ends_all_with_one_message(checkout):
    code, out = checkout.start(
        "killed", entry_of(1, steps=50), at="[after_backward] Step 6", send=kill_second, processes=2
    )
    assert code != 0
    assert out.count("Error running job: another process of this run has ended") <= 1
    assert len(re.findall(r"^(?:\[rank\d\]: )?\S*LostProcessError: another process of this run", out, re.M)) == 1
    checkout.run("killed", entry_of(1, steps=6), processes=2)
    checkout.run("not_killed", entry_of(1, steps=6), processes=2)
    assert_same(checkout, "killed", "not_killed")


def kill_second(process: Any) -> None:
    (victim,) = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
    victim.kill()
