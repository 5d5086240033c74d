"""`validation:` and the live page's commands in a real ai-toolkit checkout; see test_aitk_real."""

from __future__ import annotations

import csv
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coat_flux.watch.live import give_command, read_status
from tests.helpers.aitk_standin.real import Checkout, make_real_entry, real_checkout  # noqa: F401

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

OUT = ["01_striped_red.jpg", "07_plain_orange.jpg"]
STEPS = 8


def entry(every: int, **train: Any) -> dict[str, Any]:
    made = make_real_entry(steps=STEPS, ema_config={"use_ema": True, "ema_decay": 0.5}, **train)
    made["save"]["save_every"] = 3
    made["sample"].update(sample_every=1000, prompts=made["sample"]["prompts"][:1])
    made["train"]["skip_first_sample"] = True
    made["training_seed"] = 11
    return made | {"validation": {"hold_out": OUT, "every": every}}


def rows(run: Path, name: str) -> list[dict[str, str]]:
    with (run / "coat" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def when_at(run: Path, step: int, *names: str) -> None:
    """Give commands once a run has done so many steps."""
    while not (run / "coat" / "metrics.csv").exists() or len(rows(run, "metrics.csv")) < step:
        time.sleep(0.1)
    for name in names:
        give_command(run, name)


def test_held_out_photos_and_the_live_page(checkout: Checkout) -> None:
    said = checkout.run("seldom", entry(1000))
    assert f"2 photos are held out of training: {', '.join(OUT)}" in said
    assert "Found 14 images" in said
    seldom, often = checkout.folder("seldom"), checkout.folder("often")

    asking = threading.Thread(target=when_at, args=(often, 2, "sample", "save"))
    asking.start()
    asking_to_stop = threading.Thread(target=when_at, args=(often, 5, "stop"))
    asking_to_stop.start()
    code, stopped = checkout.start("often", entry(3))
    asking.join()
    asking_to_stop.join()
    if code != 0:  # else it was done before the command came, on a fast machine
        assert code == 130, stopped[-3000:]
        assert read_status(often).ended == "stopped"
        ended = checkout.run("often", entry(3))
    else:
        ended = stopped
    assert read_status(often).ended == "finished"
    samples = {path.name.split("__")[1][:9] for path in (often / "samples").glob("*.jpg")}
    assert len(samples) == 2, samples  # when asked for, at the end
    checkout.assert_same_lora("seldom", "often")  # measuring, sampling, saving and stopping left no trace
    found = {int(row["step"]): float(row["loss"]) for row in rows(often, "validation.csv")}
    assert sorted(found) == [0, 4, 7, 8]
    assert {int(row["step"]): float(row["loss"]) for row in rows(seldom, "validation.csv")} == {
        0: found[0],
        8: found[8],
    }
    assert len(set(found.values())) == 4
    lowest = min(found, key=found.get)
    assert f"lowest held-out loss {found[lowest]:.6f} at step {lowest} (" in ended
