"""Faults at random moments of whole runs, and the advice that was printed, followed to the letter.

Every run goes through the command line, in a child process. However it ends, the next command is the one its output
names; after it the run must be at its end with the very bits of the run that nothing happened to. CI takes some of the
faults; COAT_FAULTS=all takes all 32.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_flux.cli.entry import main
from coat_flux.saves.commit import newest_set
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.tiny_flux import make_tiny_flux
from tests.reliability.forks import keep_locks_apart
from tests.reliability.test_kills import FEW_LINEARS, content, quick_forks  # noqa: F401

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

STEPS, PART, EVERY, LR = 12, 8, 3, 1e-3
IN_SETS = ("published.safetensors", "optimizer.pt", "lora.safetensors", "ema.safetensors", "rng.safetensors")
RESULTS = ("optimizer.pt", "lora.safetensors", "ema.safetensors")
COAT = {"memory": {"log_memory_stats": False}}


class Runs:
    """Runs of one job below a folder, each with a config of its own."""

    def __init__(self, root: Path):
        self.root = root
        self.place = {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images", 3)}
        self.out = root / "out"
        assert self.wait(self.start(self.configure("part", steps=PART))) == 0  # and fills the caches
        began = time.monotonic()
        assert self.wait(self.start(self.configure("good"))) == 0
        self.seconds = time.monotonic() - began
        self.good = self.results("good")

    def configure(self, name: str, lr: float = LR, steps: int = STEPS) -> Path:
        train = {"steps": steps, "lr": lr, "ema_config": {"use_ema": True, "ema_decay": 0.8}}
        job = engine_job(
            name,
            **self.place,
            out=self.out,
            coat=COAT,
            train=train,
            network=FEW_LINEARS,
            dataset={"cache_latents": False, "cache_latents_to_disk": True},
            save={"save_every": EVERY, "max_step_saves_to_keep": 2},
        )
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
        return path

    def take_part(self, name: str) -> Path:
        """A run that stands at step 8, with its hard links; its states are of steps 3 and 8."""
        run = self.out / name
        subprocess.run(["cp", "-a", str(self.out / "part"), str(run)], check=True)
        for path in run.glob("part*"):
            path.rename(path.with_name(path.name.replace("part", name)))
        for manifest in run.glob("coat/state-*/commit/files.json"):
            _rename_published(manifest, name)
        return run

    def start(self, *argv: Any, prepare: Callable[[], Any] = lambda: None) -> int:
        """Start `coat-flux train` in a child; its output is collected in the background."""
        reader, writer = os.pipe()
        given = ["train", *map(str, argv)]
        child = os.fork()
        if not child:
            _be_the_command(given, writer, prepare)
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
        said = self.output.decode()
        last = said
        for _ in range(3):
            if code == 0:
                return said
            assert "Traceback" not in last, last[-3000:]
            assert "delete" not in last
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


def _rename_published(manifest: Path, name: str) -> None:
    """Let a copied set publish under the run's name."""
    import json

    from coat_flux.saves.commit import _digest

    found = json.loads(manifest.read_text())
    found["publish"] = {key.replace("part", name): value for key, value in found["publish"].items()}
    found["sha256"] = _digest(found)
    manifest.write_text(json.dumps(found, indent=1) + "\n")


def _be_the_command(given: list[str], writer: int, prepare: Callable[[], Any]) -> None:
    code = 70
    try:
        keep_locks_apart()
        signal.alarm(240)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
        prepare()
        code = main(given)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 16)
        patch.setattr(
            "coat_flux.trainers.standalone.trainer.finish", lambda *a, **k: None
        )  # the picture of the memory report
        yield Runs(tmp_path_factory.mktemp("faults"))


def flip(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        place = rng.randrange(size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


# -- the faults: each gets (runs, name of the run, random numbers) and returns (config, exit code) ---------------------


def killed_by(number: signal.Signals) -> Callable[[Runs, str, random.Random], tuple[Path, int]]:
    def fault(runs: Runs, name: str, rng: random.Random) -> tuple[Path, int]:
        config = runs.configure(name)
        child = runs.start(config)
        time.sleep(rng.uniform(0.0, 0.9) * runs.seconds)
        os.kill(child, number)
        return config, runs.wait(child)

    return fault


def full_disk(runs: Runs, name: str, rng: random.Random) -> tuple[Path, int]:
    config = runs.configure(name)
    if rng.random() < 0.5:
        runs.take_part(name)
    sizes = sorted((newest_set(runs.out / "good") / file).stat().st_size for file in IN_SETS)
    limit = rng.randrange(sizes[-1] // 2, sizes[-1])

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    code = runs.wait(runs.start(config, prepare=prepare))
    assert code == 2, runs.output.decode()[-2000:]
    assert "free some of this disk" in runs.output.decode()
    return config, code


def damaged(file: str, links: bool = True) -> Callable[[Runs, str, random.Random], tuple[Path, int]]:
    def fault(runs: Runs, name: str, rng: random.Random) -> tuple[Path, int]:
        run = runs.take_part(name)
        path = run / file.replace("RUN", name)
        if not links:
            inside = path.read_bytes()
            path.unlink()
            path.write_bytes(inside)
        before = path.read_bytes()
        flip(path, rng)
        after = path.read_bytes()
        assert before != after
        config = runs.configure(name)
        code = runs.wait(runs.start(config))
        if "state-" in file or "RUN" in file:
            out = runs.output.decode()
            assert ("resumes from step 3" if links else "is not the file that was written") in out
            assert any(found.read_bytes() == after for found in run.glob("coat/set-aside-*/**/*") if found.is_file())
        return config, code

    return fault


def diverging(lr: float, steps: int = STEPS) -> Callable[[Runs, str, random.Random], tuple[Path, int]]:
    def fault(runs: Runs, name: str, rng: random.Random) -> tuple[Path, int]:
        if rng.random() < 0.7:
            runs.take_part(name)
        config = runs.configure(name, lr=lr, steps=steps)
        code = runs.wait(runs.start(config))
        out = runs.output.decode()
        assert code == 2, out[-2000:]
        assert "lower train.lr" in out
        return config, code

    return fault


def removed(folder: str) -> Callable[[Runs, str, random.Random], tuple[Path, int]]:
    def fault(runs: Runs, name: str, rng: random.Random) -> tuple[Path, int]:
        config = runs.configure(name)
        child = runs.start(config)
        time.sleep(rng.uniform(0.3, 0.9) * runs.seconds)
        shutil.rmtree(runs.out / name / folder, ignore_errors=True)
        return config, runs.wait(child)

    return fault


STATE = f"coat/state-{PART:09d}"
FAULTS: dict[str, Callable[[Runs, str, random.Random], tuple[Path, int]]] = {
    **{f"{number.name}-{i}": killed_by(number) for i in range(2) for number in (signal.SIGINT, signal.SIGTERM)},
    **{f"{number.name}-{i}": killed_by(number) for i in range(3) for number in (signal.SIGHUP, signal.SIGKILL)},
    **{f"full-disk-{i}": full_disk for i in range(4)},
    **{f"damaged-{file}": damaged(f"{STATE}/{file}") for file in (*IN_SETS, "state.json", "commit/files.json")},
    "damaged-lora-of-the-folder": damaged("RUN.safetensors"),
    "damaged-copy-of-the-folder": damaged("RUN.safetensors", links=False),
    "damaged-copy-of-the-moments": damaged("optimizer.pt", links=False),
    "damaged-table": damaged("coat/metrics.csv"),
    "exploding-1e3": diverging(1e3),
    "exploding-1e6": diverging(1e6, steps=3 * STEPS),
    "exploding-1e30": diverging(1e30, steps=3 * STEPS),
    "exploding-1e30-late": diverging(1e30),
    **{f"removed-{name}": removed(name) for name in ("coat", "coat/tensorboard", ".")},
}
IN_CI = ("SIGTERM-1", "damaged-commit/files.json", "exploding-1e3")
CHOSEN = FAULTS if os.environ.get("COAT_FAULTS") == "all" else IN_CI


@pytest.mark.parametrize("kind", CHOSEN)
def test_after_a_fault_the_advice_brings_the_run_to_its_good_end(runs: Runs, kind: str) -> None:
    rng = random.Random(kind + os.environ.get("COAT_FAULTS_SEED", ""))
    name = re.sub(r"\W", "_", kind)
    config, code = FAULTS[kind](runs, name, rng)
    said = runs.follow(config, name, code)
    assert runs.results(name) == runs.good
    assert "Traceback" not in said
    ways = r"goes back to step \d+|resumes from step \d+|was changed by another program|not the file that was written"
    found = re.search(ways + r"|RESUMING FROM", said)
    print(f"| {kind} | exit code {code} | {found[0] if found else 'ran to its end'} |", file=sys.__stderr__)
