"""A real ai-toolkit checkout for tests (AI_TOOLKIT_ROOT, AI_TOOLKIT_PYTHON): jobs run in a folder of links to it."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coat_flux.config.job_file import load_job_yaml
from coat_flux.mini_flux import EMBEDDED_MODEL, make_mini_flux
from coat_flux.trainers.ai_toolkit.install import install
from tests.helpers.aitk_standin.host import REPOSITORY
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.changes import change

STEPS = 6
FIXED = {"HF_HUB_OFFLINE": "1", "SEED": "7", "PYTHONHASHSEED": "0"}
DDP = REPOSITORY / "configs" / "accelerate" / "ddp.yaml"
OWN_FOLDERS = ("extensions", "configs", "datasets_example", "models", "output", ".git")


class Checkout:
    """A folder of links to AI_TOOLKIT_ROOT, with folders of its own for what a job writes, and COAT-FLUX installed."""

    def __init__(self, root: Path):
        self.root = root
        real = Path(os.environ["AI_TOOLKIT_ROOT"]).resolve()
        root.mkdir()
        for path in real.iterdir():
            if path.name in OWN_FOLDERS:
                continue
            if path.is_dir():
                (root / path.name).symlink_to(path, target_is_directory=True)
            else:
                shutil.copy2(path, root / path.name)
        (root / "extensions").mkdir()
        install(root)

    def run(self, name: str, entry: dict[str, Any], processes: int = 1) -> str:
        code, out = self.start(name, entry, processes=processes)
        assert code == 0, f"{name}: {out[-6000:]}"
        return out

    def run_several(self, jobs: list[tuple[str, dict[str, Any]]], *, recover: bool = False) -> str:
        """Run named jobs one after the other in one process; `recover`: go on after one that fails."""
        paths = [self._write(f"{i}_{name}", name, entry, as_json=False) for i, (name, entry) in enumerate(jobs)]
        process = self._begin(paths, {}, *(["--recover"] if recover else []))
        out, _ = process.communicate(timeout=1200)
        assert recover or process.returncode == 0, out[-6000:]
        return out

    def start(
        self,
        name: str,
        entry: dict[str, Any],
        *,
        at: str = "",
        send: signal.Signals | Callable[[Any], None] | None = None,
        environment: dict[str, str] | None = None,
        processes: int = 1,
    ) -> tuple[int, str]:
        """Run a job; when it prints a line with `at`, `send` a signal to it, or call `send` with the process.

        With an `environment` the config is JSON, as the web UI writes it. Returns exit code and output.
        """
        path = self._write(name, name, entry, as_json=bool(environment))
        process = self._begin([path], environment or {}, processes=processes)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if send is not None and at in line:
                send(process) if callable(send) else os.killpg(process.pid, send)
                send = None
        return process.wait(timeout=600), "".join(lines)

    def _write(self, stem: str, name: str, entry: dict[str, Any], *, as_json: bool) -> Path:
        config = {
            "job": "extension",
            "config": {"name": name, "process": [entry]},
            "meta": {"name": name, "version": "1.0"},
        }
        path = self.root / "configs" / f"{stem}.{'json' if as_json else 'yaml'}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config) if as_json else yaml.safe_dump(config), encoding="utf-8")
        return path

    def _begin(
        self, paths: list[Path], environment: dict[str, str], *options: str, processes: int = 1
    ) -> subprocess.Popen[str]:
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(DDP), "--num_processes", str(processes)]
        return subprocess.Popen(
            [
                os.environ.get("AI_TOOLKIT_PYTHON", sys.executable),
                *(launch if processes > 1 else ()),
                "run.py",
                *options,
                *(f"configs/{path.name}" for path in paths),
            ],
            cwd=self.root,
            env={**os.environ, **FIXED, **({"ACCELERATE_USE_CPU": "true"} if processes > 1 else {}), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a signal reaches its loader processes too, as from a terminal
        )

    def folder(self, name: str) -> Path:
        return self.root / "output" / name

    def log(self, name: str) -> str:
        return (self.folder(name) / "coat" / "log.txt").read_text(encoding="utf-8")

    def column(self, name: str, column: str, table: str = "metrics.csv") -> list[float]:
        with (self.folder(name) / "coat" / table).open(encoding="utf-8") as file:
            return [float(row[column]) for row in csv.DictReader(file)]

    def lora(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder(name) / f"{name}.safetensors")

    def assert_same_lora(self, one: str, other: str) -> None:
        left, right = self.lora(one), self.lora(other)
        assert any(value.any() for key, value in left.items() if ".lora_B." in key)
        assert_all_bitwise(left, right)

    def optimizer(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder(name) / "optimizer.pt", weights_only=True)


@pytest.fixture(scope="module", name="checkout")
def real_checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("aitk") / "ait")
    make_mini_flux(checkout.root / EMBEDDED_MODEL)  # jobs of ours would make it
    return checkout


def make_real_entry(changes: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """The process entry of the shortened config, with changes by dotted keys."""
    entry = load_job_yaml(REPOSITORY / "configs" / "flux_clothing_tiny.yaml")["config"]["process"][0]
    entry["train"].update({"steps": STEPS, "batch_size": 1, **train})
    every = dict.fromkeys(("save.save_every", "sample.sample_every", "coat.memory.log_every"), STEPS // 2)
    change(entry, {**every, "sample.sample_steps": 2, **(changes or {})})
    return entry
