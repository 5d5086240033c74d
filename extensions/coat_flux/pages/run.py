"""The folder of a run: what of it there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..base.table import METRICS_FILE
from ..data.captions import inject_trigger
from .logs import HOST_LOG

__all__ = ["LoraFile", "NotARun", "RunFolder", "Sample"]

TRACES = (str(METRICS_FILE), "coat", HOST_LOG, "samples", "optimizer.pt")  # besides its config
SAMPLE_NAME = re.compile(r"(?P<time>\d+)__(?P<step>\d+)_(?P<number>\d+)\.(?:png|jpe?g|webp)", re.IGNORECASE)


class NotARun(UserError):
    """The folder is not that of a run."""


class Sample(NamedTuple):
    """One sample: steps done, number of its prompt, file."""

    step: int
    number: int
    path: Path


class LoraFile(NamedTuple):
    """A saved LoRA: file, its metadata, and what is wrong with it, "" where nothing is."""

    path: Path
    metadata: dict[str, str]
    problem: str

    @property
    def step(self) -> int | None:
        """Steps done, where the file says it."""
        try:
            return int(json.loads(self.metadata["training_info"])["step"])
        except (KeyError, TypeError, ValueError):
            return None


class RunFolder:
    """A run's folder, of either host.

    Args:
        path: the folder.

    Attributes:
        path: as given.
        config_text: of `config.yaml`, "" where there is none.
        process: the process entry of the config, empty where it cannot be read.
        name: of the run.

    Raises:
        NotARun: it is none; names runs inside it.
    """

    def __init__(self, path: Path):
        _require_run(path)
        self.path = path
        config = path / "config.yaml"
        self.config_text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
        job = _parsed(self.config_text)
        self.process: dict[str, Any] = _entry(job)
        name = job.get("config", {}).get("name") if isinstance(job.get("config"), dict) else None
        self.name = str(name or path.resolve().name)

    def block(self, name: str) -> dict[str, Any]:
        """A block of the process entry; empty where it is missing."""
        found = self.process.get(name)
        return found if isinstance(found, dict) else {}

    def json(self, file: Path) -> dict[str, Any] | None:
        """A JSON file of the run; None where it is missing.

        Raises:
            ValueError: it is damaged.
        """
        path = self.path / file
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def prompts(self) -> list[str]:
        """Of the samples, in their order, with the trigger word filled in."""
        sample, trigger = self.block("sample"), self.process.get("trigger_word")
        items = sample.get("samples") or [{"prompt": prompt} for prompt in sample.get("prompts") or []]
        prompts = [str(item.get("prompt", "")) if isinstance(item, dict) else str(item) for item in items]
        return [inject_trigger(prompt, str(trigger) if trigger else None, add_if_missing=False) for prompt in prompts]

    def samples(self) -> list[Sample]:
        """By step and prompt, the newest of each."""
        found: dict[tuple[int, int], Path] = {}
        for path in sorted((self.path / "samples").glob("*")):
            match = SAMPLE_NAME.fullmatch(path.name)
            if match is not None:
                found[int(match["step"]), int(match["number"])] = path
        return [Sample(step, number, path) for (step, number), path in sorted(found.items())]

    def loras(self) -> list[LoraFile]:
        """LoRAs in the folder, the oldest first."""
        paths = sorted(self.path.glob("*.safetensors"), key=lambda path: (path.stat().st_mtime, path.name))
        return [_read_lora(path) for path in paths]

    def guard(self) -> dict[str, Any] | None:
        """Counters of the guard at the newest save; None where there is none.

        Raises:
            ValueError: the save is damaged.
        """
        states = sorted((self.path / "coat").glob("state-*"))
        for file in (Path("state.json"), Path("aitk") / "state.json"):
            if states and (states[-1] / file).exists():
                return self.json(states[-1].relative_to(self.path) / file).get("guard")
        return None


def _require_run(path: Path) -> None:
    if not path.is_dir():
        raise NotARun(f"RUN_DIR={path}: is not a folder; give that of a run, <training_folder>/<name>")
    if _is_run(path):
        return
    inside = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and _is_run(folder))
    remedy = f"; it holds the runs {', '.join(inside[:5])}: give one of them" if inside else ""
    raise NotARun(
        f"RUN_DIR={path}: has neither a config.yaml beside files of a run nor {METRICS_FILE}{remedy or _GIVE}"
    )


_GIVE = "; give the folder of a run, <training_folder>/<name>"


def _is_run(path: Path) -> bool:
    if (path / METRICS_FILE).exists() or (path / HOST_LOG).exists():
        return True
    traces = any((path / trace).exists() for trace in TRACES) or any(path.glob("*.safetensors"))
    return (path / "config.yaml").exists() and traces


def _parsed(text: str) -> dict[str, Any]:
    try:
        job = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return job if isinstance(job, dict) else {}


def _entry(job: dict[str, Any]) -> dict[str, Any]:
    try:
        entry = job["config"]["process"][0]
    except (KeyError, TypeError, IndexError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _read_lora(path: Path) -> LoraFile:
    try:
        with safe_open(path, "pt") as file:
            return LoraFile(path, dict(file.metadata() or {}), "")
    except (OSError, SafetensorError) as error:
        return LoraFile(path, {}, f"cannot be read ({error})")
