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
from typing import Any, TypeAlias

import yaml
from safetensors import SafetensorError, safe_open

from ..base.errors import UserError
from ..base.table import FIDELITY_FILE, METRICS_FILE, VALIDATION_FILE
from ..data.captions import inject_trigger
from ..saves.commit import committed_sets
from ..saves.repair import RECORDS

Curve: TypeAlias = list[tuple[float, float]]

TOOLKIT_LOG = "loss_log.db"  # of ai-toolkit, with COAT or without
TOOLKIT_NAMES = {"loss": "loss", "loss/loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm"}
SIGNS = ("coat", "samples", "optimizer.pt", "*.safetensors")  # of a run, next to its config
SAMPLE_NAME = re.compile(r"(?P<time>\d+)__(?P<step>\d+)_(?P<number>\d+)\.(?:png|jpe?g|webp)", re.IGNORECASE)
MODEL_PART = "transformer"  # of a saved model
SMOOTHING_SHARE = 50  # one part in so many of a run's steps is averaged over


class RunFolderError(UserError):
    """Not the folder of a run."""


class Saved:
    """A saved LoRA's file or a whole model's folder, with all its `files`."""

    def __init__(self, path: Path, files: Sequence[Path]):
        self.path, self.name = path, path.name.removesuffix(".safetensors")  # with the step unless final
        self.nbytes = sum(file.stat().st_size for file in files)
        self.metadata: dict[str, str] = {}
        self.step: int | None = None  # steps done
        self.problem = ""  # none if it is sound
        try:
            with safe_open(files[0], "pt") as file:
                self.metadata = dict(file.metadata() or {})
            self.step = int(json.loads(self.metadata["training_info"])["step"])
        except (OSError, SafetensorError) as error:
            self.problem = f"cannot be read ({error})"
        except (KeyError, TypeError, ValueError):  # of another program: it records no step
            pass


class RunFolder:
    """A run's folder, read once per file: for a live run, make another."""

    def __init__(self, path: Path):
        if not path.is_dir():
            raise RunFolderError(f"RUN_DIR={path}: is not a folder; give that of a run, <training_folder>/<name>")
        if not _is_run(path):
            inside = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and _is_run(folder))
            remedy = "give the folder of a run, <training_folder>/<name>"
            if inside:
                remedy = f"it holds the runs {', '.join(inside[:5])}: give one of them"
            raise RunFolderError(
                f"RUN_DIR={path}: has neither a config.yaml next to files of a run nor {METRICS_FILE}; {remedy}"
            )
        self.path = path
        config = path / "config.yaml"
        self.config_text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
        try:
            job = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            job = None
        job = _mapping(_mapping(job).get("config"))
        self.process = _mapping(next(iter(job.get("process") or ()), None))
        self.name = str(job.get("name") or path.resolve().name)

    def block(self, name: str) -> dict[str, Any]:
        """A block of the process entry, or {}."""
        return _mapping(self.process.get(name))

    def json(self, file: Path) -> dict[str, Any] | None:
        """A JSON file of the run; None if missing, ValueError if damaged."""
        path = self.path / file
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """Column → curve over steps; OSError, ValueError if damaged."""
        return _columns(self.path / METRICS_FILE) or _toolkit_log(self.path / TOOLKIT_LOG)

    @cached_property
    def validation(self) -> Curve:
        """Validation loss over steps, perhaps empty; errors as of `metrics`."""
        return _columns(self.path / VALIDATION_FILE).get("loss", [])

    @cached_property
    def fidelity(self) -> dict[str, Curve]:
        """Column of `coat/fidelity.csv` → curve over steps; errors as of `metrics`."""
        return _columns(self.path / FIDELITY_FILE)

    def prompts(self) -> list[str]:
        """Prompts of the samples, in order, with the trigger word filled in."""
        sample, trigger = self.block("sample"), self.process.get("trigger_word")
        prompts = [_mapping(item).get("prompt", "") for item in sample.get("samples") or []]
        prompts = prompts or sample.get("prompts") or []
        word = str(trigger) if trigger else None
        return [inject_trigger(str(prompt), word, add_if_missing=False) for prompt in prompts]

    def samples(self) -> dict[tuple[int, int], Path]:
        """(Steps done, number of the prompt) → the newest sample, in that order."""
        newest: dict[tuple[int, int], Path] = {}
        for path in sorted((self.path / "samples").glob("*")):
            match = SAMPLE_NAME.fullmatch(path.name)
            if match is not None and not path.is_symlink():
                newest[int(match["step"]), int(match["number"])] = path
        return dict(sorted(newest.items()))

    @cached_property
    def saves(self) -> list[Saved]:
        """Saved LoRAs, or whole models, oldest first."""
        files = {path: [path] for path in self.path.glob("*.safetensors")}
        for folder in self.path.glob(f"*/{MODEL_PART}"):
            shards = sorted(folder.glob("*.safetensors"))
            if shards:
                files[folder.parent] = shards
        order = sorted(files, key=lambda path: (files[path][0].stat().st_mtime, path.name))
        return [Saved(path, files[path]) for path in order]

    def guard(self) -> dict[str, Any] | None:
        """Guard counters at the newest save; None if missing, ValueError if damaged."""
        for newest in committed_sets(self.path)[:1]:
            for file in (newest / record for record in RECORDS):
                if file.exists():
                    return json.loads(file.read_text(encoding="utf-8")).get("guard")
        return None


def _mapping(value: Any) -> dict[str, Any]:
    """A part of somebody's YAML, {} where it is of another kind."""
    return value if isinstance(value, dict) else {}


def _is_run(path: Path) -> bool:
    if (path / METRICS_FILE).exists() or (path / TOOLKIT_LOG).exists():
        return True
    return (path / "config.yaml").exists() and any(any(path.glob(sign)) for sign in SIGNS)


def _columns(path: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    if not path.exists():
        return curves
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
    curves: dict[str, Curve] = {}
    if not path.exists():
        return curves
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as log:
            values = log.execute("SELECT step, key, value_real FROM metrics ORDER BY step")
            for step, key, value in values:
                if key in TOOLKIT_NAMES and value is not None:
                    curves.setdefault(TOOLKIT_NAMES[key], []).append((float(step), float(value)))
            times = log.execute("SELECT step, wall_time FROM steps ORDER BY step").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"{path.name}: {error}") from error
    for (last, before), (step, now) in itertools.pairwise(times):
        curves.setdefault("s_per_it", []).append((float(step), (now - before) / (step - last)))
    return curves


def smoothed(curve: Sequence[tuple[float, float]]) -> Curve:
    """Exponential moving average over about 2 % of the points, bias-corrected; gaps are skipped."""
    weight = 1 / max(1.0, len(curve) / SMOOTHING_SHARE)
    mean, total, smooth = 0.0, 0.0, []
    for step, value in curve:
        if math.isfinite(value):
            mean, total = mean + weight * (value - mean), total + weight * (1 - total)
            smooth.append((step, mean / total))
    return smooth
