"""Faults in whole runs, and the advice that was printed, followed to the letter.

Every run goes through the command line, in a child process. However it ends, the next command is the one its output
names; after it the run must be at its end with the very bits of the run that nothing happened to.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_flux.cli.entry import main
from coat_flux.saves.commit import newest_set
from tests.helpers.engine_job import FEW_LINEARS, ON_DISK, engine_job, tiny_place
from tests.reliability.forks import content, keep_locks_apart, quick_forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

STEPS, PART, EVERY, LR = 12, 8, 3, 1e-3
RESULTS = ("optimizer.pt", "lora.safetensors", "ema.safetensors")
COAT = {"memory": {"log_memory_stats": False}}


class Runs:
    """Runs of one job below a folder, each with a config of its own."""

    def __init__(self, root: Path, place: dict[str, Path]):
        self.root, self.place, self.out = root, place, place["out"]
        began = time.monotonic()
        assert self.wait(self.start(self.configure("good"))) == 0  # and fills the caches
        self.seconds = time.monotonic() - began
        self.good = self.results("good")

    def configure(self, name: str, lr: float = LR, steps: int = STEPS) -> Path:
        train = {"steps": steps, "lr": lr, "ema_config": {"use_ema": True, "ema_decay": 0.8}}
        save = {"save_every": EVERY, "max_step_saves_to_keep": 2}
        job = engine_job(name, **self.place, coat=COAT, train=train, network=FEW_LINEARS, dataset=ON_DISK, save=save)
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
        return path

    def start(self, *argv: Any) -> int:
        """Start `coat-flux train` in a child; its output is collected in the background."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _be_the_command(["train", *map(str, argv)], writer)
        os.close(writer)
        self.output = b""

        def collect() -> None:
            with os.fdopen(reader, "rb") as pipe:
                self.output = pipe.read()

        self._thread = threading.Thread(target=collect)
        self._thread.start()
        return child

    def wait(self, child: int) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self._thread.join()
        return code

    def results(self, name: str) -> dict[str, Any]:
        folder = newest_set(self.out / name)
        assert folder is not None
        assert folder.name == f"state-{STEPS:09d}"
        return {file: content(folder / file) for file in RESULTS}

    def follow(self, config: Path, name: str, code: int) -> str:
        """Do what the output says until the run is at its end; returns what it said."""
        said = last = self.output.decode()
        for _ in range(3):
            if code == 0:
                return said
            assert "Traceback" not in last, last[-3000:]
            argv: list[Any] = [config]
            if "lower train.lr" in last:
                config = self.configure(name)
            advice = re.search(r"then resume from step \d+: coat-flux train (.*)", last)
            if advice is not None:
                argv = shlex.split(advice[1])
            code = self.wait(self.start(*argv))
            last = self.output.decode()
            said += last
        raise AssertionError(f"exit code {code}: {said[-3000:]}")


def _be_the_command(argv: list[str], writer: int) -> None:
    code = 70
    try:
        keep_locks_apart()
        signal.alarm(240)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    root = tmp_path_factory.mktemp("faults")
    with tiny_place(root, 3) as place, quick_forks():
        yield Runs(root, place)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def killed(runs: Runs, name: str) -> tuple[Path, int]:
    config = runs.configure(name)
    child = runs.start(config)
    time.sleep(0.5 * runs.seconds)
    os.kill(child, signal.SIGTERM)
    return config, runs.wait(child)


def damaged(runs: Runs, name: str) -> tuple[Path, int]:
    """A bit of the newest set of a run that stands at step 8, after its state of step 6."""
    assert runs.wait(runs.start(runs.configure(name, steps=PART))) == 0
    run = runs.out / name
    manifest = run / "coat" / f"state-{PART:09d}" / "commit" / "files.json"
    flip(manifest, random.Random(name))
    changed = manifest.read_bytes()
    config = runs.configure(name)
    code = runs.wait(runs.start(config))
    assert re.search("resumes from step [36]", runs.output.decode())
    assert any(path.read_bytes() == changed for path in run.glob("coat/set-aside-*/**/files.json"))
    return config, code


def diverging(runs: Runs, name: str) -> tuple[Path, int]:
    assert runs.wait(runs.start(runs.configure(name, steps=PART))) == 0
    config = runs.configure(name, lr=1e3)
    code = runs.wait(runs.start(config))
    assert code == 2, runs.output.decode()[-2000:]
    assert "lower train.lr" in runs.output.decode()
    return config, code


@pytest.mark.parametrize("fault", [killed, damaged, diverging])
def test_after_a_fault_the_advice_brings_the_run_to_its_good_end(runs: Runs, fault: Any) -> None:
    config, code = fault(runs, fault.__name__)
    said = runs.follow(config, fault.__name__, code)
    assert runs.results(fault.__name__) == runs.good
    assert "Traceback" not in said
