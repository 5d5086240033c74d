"""A job that is stopped, at whatever moment and by whom, ends as Ctrl+C ends it: in the stand-in, whole jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from coat_flux.saves.interrupts import Interrupts
from tests.helpers.aitk_standin.ends import assert_same_end
from tests.helpers.aitk_standin.host import COAT_ENTRY, Host, standin_host  # noqa: F401

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


class Stopped:
    """A stand-in whose job is stopped, once, when a method is called in a step."""

    def __init__(self, host: Host, patch: pytest.MonkeyPatch) -> None:
        self.host, self.patch = host, patch
        host.start()
        self.trainer = host.load("extensions_built_in.sd_trainer.DiffusionTrainer").DiffusionTrainer
        self.process: Any = None

    def run(self, moment: str, stop: Callable[[], Any], folder: str, at: int = AT) -> int:
        """Run the job until it is stopped; returns its exit code."""
        module, kind, method = MOMENTS[moment]
        owner = getattr(self.host.load(module), kind)
        original, init = getattr(owner, method), self.trainer.__init__
        stops = [stop]

        def made(process: Any, *args: Any, **kwargs: Any) -> None:
            init(process, *args, **kwargs)
            self.process = process

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if (
                stops
                and self.process.step_num - (method == "end_step_hook") == at
                and hasattr(self.process, "optimizer")
            ):
                stops.pop()()
            return original(*args, **kwargs)

        with self.patch.context() as patch:
            patch.setattr(self.trainer, "__init__", made)
            patch.setattr(self.trainer, "is_ui_trainer", True)
            patch.setattr(owner, method, stopping)
            with pytest.raises(SystemExit) as ended:
                self.host.run(training_folder=str(self.host.root / folder), **ENTRY)
        self.patch.setattr(self.trainer, "requests", frozenset())
        assert not stops
        return int(ended.value.code)

    def ask(self, what: str) -> Callable[[], None]:
        """As a button of the web UI does."""
        return lambda: self.patch.setattr(self.trainer, "requests", frozenset({what}))

    def resume(self, folder: str) -> None:
        self.host.run(training_folder=str(self.host.root / folder), **ENTRY)
        assert_same_end(*(self.host.root / name / "standin_job" for name in ("whole", folder)))


@pytest.fixture
def stopped(host: Host, monkeypatch: pytest.MonkeyPatch) -> Stopped:
    made = Stopped(host, monkeypatch)
    host.run(training_folder=str(host.root / "whole"), **ENTRY)
    return made


def test_stop_of_the_web_ui_at_every_moment_of_a_step(stopped: Stopped, capsys: pytest.CaptureFixture[str]) -> None:
    for moment in MOMENTS:
        assert stopped.run(moment, stopped.ask("stop"), moment) == 130
        assert stopped.process.status == "stopped"
        assert f"[coat] stopped after {AT + 1} steps, saved in" in capsys.readouterr().out, moment
        stopped.resume(moment)


def test_other_ways_to_stop(stopped: Stopped, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped.run("in the save", stopped.ask("return_to_queue"), "queue") == 130
    assert stopped.process.status == "queued"
    stopped.resume("queue")
    for name, moment in (("SIGINT", "in backward"), ("SIGHUP", "in the save"), ("SIGTERM", "while sampling")):
        number = getattr(signal, name, signal.SIGINT)  # Windows has no SIGHUP
        before = signal.getsignal(number)
        assert stopped.run(moment, lambda number=number: signal.raise_signal(number), name) == 130
        assert signal.getsignal(number) == before
        assert stopped.process.status == "stopped"
        stopped.resume(name)
    capsys.readouterr()
    assert stopped.run("while sampling", stopped.ask("stop"), "first", at=0) == 130  # of the samples before training
    assert "[coat] stopped before the first step" in capsys.readouterr().out
    assert not list((stopped.host.root / "first" / "standin_job").glob("*.safetensors"))
    stopped.resume("first")


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_hang_up_never_ends_the_save_and_stays_ignored_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
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
