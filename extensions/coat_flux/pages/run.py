"""The folder of a run: the only reader of its files, from either trainer, during or after training."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..base.table import METRICS_FILE, VALIDATION_FILE
from ..data.captions import inject_trigger

__all__ = ["MEMORY_FILE", "SAMPLE_NAME", "Curve", "RunFolder", "RunFolderError", "Sample", "Saved", "smoothed"]

Curve: TypeAlias = list[tuple[float, float]]

MEMORY_FILE = Path("coat") / "memory.json"
TOOLKIT_LOG = "loss_log.db"  # of ai-toolkit, with COAT or without
TOOLKIT_NAMES = {"learning_rate": "lr", "grad_norm": "grad_norm"}
SIGNS = ("coat", "samples", "optimizer.pt")  # of a run, next to its config
SAMPLE_NAME = re.compile(r"(?P<time>\d+)__(?P<step>\d+)_(?P<number>\d+)\.(?:png|jpe?g|webp)", re.IGNORECASE)
MODEL_PART = "transformer"  # of a saved model
SMOOTHING_SHARE = 50  # one part in so many of a run's steps is averaged over


class RunFolderError(UserError):
    """The folder is not that of a run."""


class Sample(NamedTuple):
    """A sample: steps done, number of its prompt, file."""

    step: int
    number: int
    path: Path


class Saved(NamedTuple):
    """A saved LoRA's file or a whole model's folder; `problem` is "" if it is sound."""

    path: Path
    nbytes: int
    metadata: dict[str, str]
    problem: str

    @property
    def name(self) -> str:
        """The run's name, with the step unless final."""
        return self.path.name.removesuffix(".safetensors")

    @property
    def step(self) -> int | None:
        """Steps done, if recorded in the file."""
        try:
            return int(json.loads(self.metadata["training_info"])["step"])
        except (KeyError, TypeError, ValueError):
            return None


class RunFolder:
    """A run's folder, read once per file: for a live run, make another. RunFolderError names runs inside a non-run."""

    def __init__(self, path: Path):
        _require_run(path)
        self.path = path
        config = path / "config.yaml"
        self.config_text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
        try:
            job = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            job = None
        job = job.get("config") if isinstance(job, dict) else None
        job = job if isinstance(job, dict) else {}
        entry = next(iter(job.get("process") or ()), None)
        self.process: dict[str, Any] = entry if isinstance(entry, dict) else {}
        self.name = str(job.get("name") or path.resolve().name)

    def block(self, name: str) -> dict[str, Any]:
        """A block of the process entry, or {}."""
        block = self.process.get(name)
        return block if isinstance(block, dict) else {}

    def json(self, file: Path) -> dict[str, Any] | None:
        """A JSON file of the run; None if missing, ValueError if damaged."""
        path = self.path / file
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """Column of `coat/metrics.csv`, or of ai-toolkit's log, → curve over steps; OSError, ValueError if damaged."""
        own, theirs = self.path / METRICS_FILE, self.path / TOOLKIT_LOG
        return _columns(own) if own.exists() else _toolkit_log(theirs) if theirs.exists() else {}

    @cached_property
    def validation(self) -> Curve:
        """Validation loss over steps, perhaps empty; errors as of `metrics`."""
        path = self.path / VALIDATION_FILE
        return _columns(path).get("loss", []) if path.exists() else []

    def prompts(self) -> list[str]:
        """Prompts of the samples, in order, with the trigger word filled in."""
        sample, trigger = self.block("sample"), self.process.get("trigger_word")
        items = sample.get("samples") or [{"prompt": prompt} for prompt in sample.get("prompts") or []]
        prompts = [str(item.get("prompt", "")) if isinstance(item, dict) else str(item) for item in items]
        return [inject_trigger(prompt, str(trigger) if trigger else None, add_if_missing=False) for prompt in prompts]

    def samples(self) -> list[Sample]:
        """Samples by step and prompt, the newest of each."""
        found: dict[tuple[int, int], Path] = {}
        for path in sorted((self.path / "samples").glob("*")):
            match = SAMPLE_NAME.fullmatch(path.name)
            if match is not None and not path.is_symlink():
                found[int(match["step"]), int(match["number"])] = path
        return [Sample(step, number, path) for (step, number), path in sorted(found.items())]

    def saves(self) -> list[Saved]:
        """Saved LoRAs, or whole models, oldest first."""
        files = {path: [path] for path in self.path.glob("*.safetensors")}
        for folder in self.path.glob(f"*/{MODEL_PART}"):
            if shards := sorted(folder.glob("*.safetensors")):
                files[folder.parent] = shards
        found = []
        for path in sorted(files, key=lambda path: (files[path][0].stat().st_mtime, path.name)):
            nbytes = sum(file.stat().st_size for file in files[path])
            try:
                with safe_open(files[path][0], "pt") as file:
                    found.append(Saved(path, nbytes, dict(file.metadata() or {}), ""))
            except (OSError, SafetensorError) as error:
                found.append(Saved(path, nbytes, {}, f"cannot be read ({error})"))
        return found

    def guard(self) -> dict[str, Any] | None:
        """Guard counters at the newest save; None if missing, ValueError if damaged."""
        for state in sorted((self.path / "coat").glob("state-*"))[-1:]:
            for file in (state / "state.json", state / "aitk" / "state.json"):
                if file.exists():
                    return json.loads(file.read_text(encoding="utf-8")).get("guard")
        return None


def _require_run(path: Path) -> None:
    if not path.is_dir():
        raise RunFolderError(f"RUN_DIR={path}: is not a folder; give that of a run, <training_folder>/<name>")
    if _is_run(path):
        return
    inside = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and _is_run(folder))
    remedy = f"it holds the runs {', '.join(inside[:5])}: give one of them"
    remedy = remedy if inside else "give the folder of a run, <training_folder>/<name>"
    raise RunFolderError(
        f"RUN_DIR={path}: has neither a config.yaml next to files of a run nor {METRICS_FILE}; {remedy}"
    )


def _is_run(path: Path) -> bool:
    if (path / METRICS_FILE).exists() or (path / TOOLKIT_LOG).exists():
        return True
    signs = any((path / sign).exists() for sign in SIGNS) or any(path.glob("*.safetensors"))
    return (path / "config.yaml").exists() and signs


def _columns(path: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for cells in reader:
                step = float(cells.pop("step"))
                for name, cell in cells.items():
                    if cell:
                        curves.setdefault(name, []).append((step, float(cell)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: line {reader.line_num} is damaged ({error!r})") from error
    return curves


def _toolkit_log(path: Path) -> dict[str, Curve]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as log:
            values = log.execute("SELECT step, key, value_real FROM metrics WHERE value_real IS NOT NULL ORDER BY step")
            curves: dict[str, Curve] = {}
            for step, key, value in values:
                name = "loss" if key.endswith("/loss") or key == "loss" else TOOLKIT_NAMES.get(key)
                if name is not None:
                    curves.setdefault(name, []).append((float(step), float(value)))
            times = log.execute("SELECT step, wall_time FROM steps ORDER BY step").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"{path.name}: {error}") from error
    pace = [(float(step), (now - before) / (step - last)) for (last, before), (step, now) in itertools.pairwise(times)]
    return curves | ({"s_per_it": pace} if pace else {})


def smoothed(curve: Sequence[tuple[float, float]]) -> Curve:
    """Exponential moving average over about 2 % of the points, bias-corrected; gaps are skipped."""
    weight = 1 / max(1.0, len(curve) / SMOOTHING_SHARE)
    mean, total, found = 0.0, 0.0, []
    for step, value in curve:
        if math.isfinite(value):
            mean, total = mean + weight * (value - mean), total + weight * (1 - total)
            found.append((step, mean / total))
    return found
