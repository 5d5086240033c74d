"""What a run tells while it runs: progress bar, console lines, `coat/metrics.csv`, `coat/tensorboard/`.

Only the main process reports. Console lines go through tqdm, which keeps them from tearing the bar.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ..config.job_config import JobConfig
from ..memory.stats import GB, peak_bytes
from .saving import replacing

__all__ = ["METRICS", "RunLog", "StepStats"]

METRICS = ("step", "epoch", "loss", "lr", "grad_norm", "s_per_it", "peak_memory_gb")
VALIDATION = ("step", "loss")
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]"


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: steps done with it, epoch, mean loss, lr, gradient norm before clipping, seconds."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float


class RunLog:
    """Progress bar, console, CSV and TensorBoard of one run.

    Args:
        job: says where the files go (`log_dir`, or `coat/tensorboard`) and how often (`logging.log_every`,
            `performance_log_every`).
        device: whose peak memory is shown.
        active: False (every process but the main one) reports nothing.
    """

    def __init__(self, job: JobConfig, device: torch.device, *, active: bool):
        self.active = active
        self._job = job
        self._device = device
        self._folder = job.folder / "coat"
        self._bar: tqdm | None = None
        self._metrics: TextIO | None = None
        self._validations: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._seconds: list[float] = []

    def say(self, line: str) -> None:
        """Write one line to the console."""
        if self.active:
            tqdm.write(line)

    def open(self, step: int) -> None:
        """Open the files; what a crashed run wrote after `step` is dropped from them."""
        if not self.active:
            return
        job = self._job
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _reopen(self._folder / "metrics.csv", METRICS, step)
        self._validations = _reopen(self._folder / "validation.csv", VALIDATION, step)
        board = Path(job.log_dir) / job.name if job.log_dir else self._folder / "tensorboard"
        self._board = SummaryWriter(str(board), purge_step=step + 1)

    def start(self, step: int) -> None:
        """Show the bar."""
        if self.active:
            job = self._job
            self._bar = tqdm(
                total=job.train.steps, initial=step, desc=job.name, bar_format=BAR, dynamic_ncols=True, smoothing=0.1
            )

    def step(self, stats: StepStats) -> None:
        """Record one optimizer step."""
        if self._bar is None or self._metrics is None:
            return
        peak = peak_bytes(self._device) / GB
        self._bar.update(stats.step - self._bar.n)
        self._bar.set_postfix_str(f"lr: {stats.lr:.1e} loss: {stats.loss:.3e} peak: {peak:.2f}GB")
        exact = [repr(value) for value in (stats.loss, stats.lr, stats.grad_norm)]
        _append(self._metrics, [str(stats.step), str(stats.epoch), *exact, f"{stats.seconds:.4f}", f"{peak:.3f}"])
        self._tell_speed(stats)
        if stats.step % self._job.logging.log_every == 0:
            values = (stats.loss, stats.lr, stats.grad_norm, stats.seconds, peak)
            for tag, value in zip(METRICS[2:], values, strict=True):
                self.scalar(tag, value, stats.step)

    def _tell_speed(self, stats: StepStats) -> None:
        every = self._job.performance_log_every
        self._seconds.append(stats.seconds)
        if every and stats.step % every == 0:
            times = self._seconds
            self.say(f"Step {stats.step}: {sum(times) / len(times):.3f} s/it ({min(times):.3f} to {max(times):.3f})")
        if not every or stats.step % every == 0:
            self._seconds = []

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One TensorBoard point."""
        if self._board is not None:
            self._board.add_scalar(tag, value, step)

    def validation(self, step: int, loss: float) -> None:
        """Record a fixed-noise validation loss in `coat/validation.csv` and TensorBoard."""
        if self._validations is not None:
            _append(self._validations, [str(step), repr(loss)])
            self.scalar("validation_loss", loss, step)

    def close(self) -> None:
        """Close bar and files; may be called twice."""
        for part in (self._bar, self._metrics, self._validations, self._board):
            if part is not None:
                part.close()
        self._bar = self._metrics = self._validations = self._board = None


def _reopen(path: Path, columns: Sequence[str], step: int) -> TextIO:
    """A CSV open for further rows, with its rows up to `step` only (none at the start of a run)."""
    kept: list[list[str]] = []
    if path.exists() and step > 0:
        with path.open(newline="", encoding="utf-8") as old:
            kept = [row for row in list(csv.reader(old))[1:] if row and int(row[0]) <= step]
    with replacing(path) as temp, temp.open("w", newline="", encoding="utf-8") as file:
        for row in [list(columns), *kept]:
            _append(file, row)
    return path.open("a", newline="", encoding="utf-8")


def _append(file: TextIO, row: Sequence[str]) -> None:
    file.write(",".join(row) + "\n")
    file.flush()
