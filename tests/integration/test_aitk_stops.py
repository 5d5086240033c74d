"""A job that is stopped, at whatever moment and by whom, ends as Ctrl+C ends it: in the stand-in, whole jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coat_flux.saves.interrupts import Interrupts
from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, Patch, Printed, run_whole, standin_host  # noqa: F401

STEPS, AT = 6, 3  # stopped in the fourth step, which saves and samples
ENTRY = {
    "model": COAT_ENTRY["model"],
    "train": {
        **COAT_ENTRY["train"],
        "steps": STEPS,
        "batch_size": 2,
        "ema_config": {"use_ema": True, "ema_decay": 0.9},
    },
    "save": {"save_every": AT, "max_step_saves_to_keep": 1},
    "sample": {"sample_every": AT},
}
MOMENTS = {
    "before forward": ("extensions_built_in.sd_trainer.SDTrainer", "SDTrainer", "hook_train_loop"),
    "in backward": ("jobs.process.BaseSDTrainProcess", "Accelerator", "backward"),
    "in the optimizer": ("coat_core.optim", "FP8AdamW", "step"),
    "in the save": ("toolkit.lora_special", "LoRASpecialNetwork", "save_weights"),
    "while sampling": ("jobs.process.BaseSDTrainProcess", "BaseSDTrainProcess", "sample_step_hook"),
    "between two steps": ("jobs.process.BaseSDTrainProcess", "BaseSDTrainProcess", "end_step_hook"),
}

WAYS = {
    "before forward": "SIGTERM",
    "in backward": "SIGINT",
    "in the optimizer": "SIGHUP",
    "in the save": "stop",
    "while sampling": "stop",
    "between two steps": "return_to_queue",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_whole(tmp_path_factory.mktemp("whole") / "ait", **ENTRY)


def run_stopped(host: Host, moment: str, way: str, at: int = AT) -> Any:
    """Run a job that is stopped, once, when a method is called in a step; returns its process."""
    host.start()
    trainer = host.load("extensions_built_in.sd_trainer.DiffusionTrainer").DiffusionTrainer
    module, kind, method = MOMENTS[moment]
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
            host.run(**ENTRY)
    assert not stops
    assert ended.value.code == 130
    return processes[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_stopped_at_any_moment_of_a_step_ends_as_the_one_that_was_not(
    host: Host, capsys: Printed, whole: Path, moment: str
) -> None:
    way = WAYS[moment]
    before = signal.getsignal(signal.SIGTERM)
    assert run_stopped(host, moment, way).status == ("queued" if way == "return_to_queue" else "stopped")
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"[coat] stopped after {AT + 1} steps, saved in" in capsys.readouterr().out
    host.run(**ENTRY)
    assert_same_end(whole, host.save_folder)


def test_a_stop_while_the_samples_before_training_are_made(host: Host, capsys: Printed, whole: Path) -> None:
    run_stopped(host, "while sampling", "stop", at=0)
    assert "[coat] stopped before the first step" in capsys.readouterr().out
    assert not list(host.save_folder.glob("*.safetensors"))
    host.run(**ENTRY)
    assert_same_end(whole, host.save_folder)


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_hang_up_never_ends_the_save_and_stays_ignored_under_nohup(monkeypatch: Patch) -> None:
    monkeypatch.setattr("coat_flux.saves.interrupts.ONE_PRESS_SECONDS", -1.0)
    monkeypatch.setattr("coat_flux.saves.interrupts.READER_SECONDS", 0.0)
    lines: list[str] = []
    with Interrupts(lines.append) as interrupts:
        signal.raise_signal(signal.SIGINT)  # Ctrl+C, and while the run saves its terminal is closed
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert len(lines) == 1
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lines.append) as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)


PRINTING = """
import signal, sys, time
from coat_flux.saves.interrupts import Interrupts
with Interrupts(print) as interrupts:
    print("ready", flush=True)
    while not interrupts.asked:
        time.sleep(0.05)
    for _ in range(3):
        print("a save is written", flush=True)
        print("and said", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("saved")
sys.exit(130)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_output_that_nobody_reads_any_more_does_not_cost_the_save(tmp_path: Any) -> None:
    """Standard output is a terminal that is closed, standard error a pipe whose reader has ended."""
    import pty

    (terminal, out), (reader, error) = pty.openpty(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING, str(tmp_path / "saved")],
        stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True,
    )  # fmt: skip
    os.close(out), os.close(error)
    said = b""
    while not said.endswith(b"\n"):  # the end of the line is a write of its own: closed before it, `print` fails
        said += os.read(terminal, 16)
    os.close(terminal), os.close(reader)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 130
    assert (tmp_path / "saved").read_text() == "saved"
