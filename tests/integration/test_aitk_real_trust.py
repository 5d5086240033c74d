"""Kill, resume, guard and refusals in a real ai-toolkit checkout, on a CPU; see test_aitk_real.py."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from coat_flux.trainers.ai_toolkit.install import install
from tests.helpers.aitk_standin.ends import assert_same_end, newest_state
from tests.helpers.aitk_standin.real import Checkout, make_real_entry
from tests.helpers.asserts import assert_bitwise

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

STEPS = 9
WHOLE = "whole"


def _entry(**train: Any) -> dict[str, Any]:
    """All that has a state: average, schedule, accumulation, dropped captions in two loader processes."""
    entry = make_real_entry(
        steps=STEPS,
        gradient_accumulation=2,
        ema_config={"use_ema": True, "ema_decay": 0.9},
        lr_scheduler="cosine",
        **train,
    )
    entry["datasets"][0].update(caption_dropout_rate=0.5, num_workers=2)
    entry["logging"] = {**entry.get("logging", {}), "verbose": True}  # memory lines are printed, too
    return entry


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("aitk_trust") / "ait")
    install(checkout.root)
    checkout.run(WHOLE, _entry())
    return checkout


def _assert_same_end(checkout: Checkout, name: str) -> None:
    assert_same_end(checkout.folder(WHOLE), checkout.folder(name))
    for key, value in checkout.lora(WHOLE).items():
        assert_bitwise(checkout.lora(name)[key], value)


@pytest.mark.parametrize("moment", ["Saving at step 6", "[after_backward] Step 6"])
def test_killed_run_ends_as_the_one_that_was_not(checkout: Checkout, moment: str) -> None:
    name = f"killed_{len(moment)}"
    code, _ = checkout.start(name, _entry(), at=moment, send=signal.SIGKILL)
    assert code == -signal.SIGKILL
    out = checkout.run(name, _entry())
    assert "[coat] resume: continues after step 4" in out or "[coat] resume: continues after step 7" in out
    _assert_same_end(checkout, name)


def test_run_that_becomes_nan_ends_with_its_last_save_kept(checkout: Checkout) -> None:
    checkout.run("diverged", _entry() | {"train": {**_entry()["train"], "steps": 2}})
    folder = newest_state(checkout.folder("diverged"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    entry = _entry(lr=1e30)
    entry["train"]["steps"] = 16
    entry["save"]["save_every"] = 16  # an earlier save would be refused by the export check: fp16 overflows
    code, out = checkout.start("diverged", entry)
    assert code == 1, out[-3000:]
    assert "not finite for 10 steps in a row" in out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert (checkout.folder("diverged") / "diverged.safetensors").read_bytes() == before[
        folder / "diverged.safetensors"
    ]
