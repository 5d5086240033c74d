"""What a run reports while it runs: progress bar, console lines, and files in its folder.

    coat/log.txt, metrics.csv, validation.csv, precision.csv, tensorboard/

Only the main process reports. Console lines go through tqdm, which keeps them from tearing the bar. What the disk
refuses is logged once and tried again later: no file of a report ends a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from ...base.run_log import Lines, bar_options
from ...base.table import METRICS
from ...config.job import JobConfig
from ...watch.precision import CastPrecision
from ...watch.run_tables import RunTables, StepStats
from .boards import TensorBoard, WandbBoard

__all__ = ["RunLog"]

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]"


class RunLog:
    """Progress bar, console, CSV and TensorBoard of one run.

    Args:
        job: says where the files go (`log_dir`, or `coat/tensorboard`) and how often (`logging.log_every`,
            `performance_log_every`); `logging.verbose` shows details on the console, too.
        device: whose peak memory is shown.
        active: False (every process but the main one) reports nothing.
    """

    def __init__(self, job: JobConfig, device: torch.device, *, active: bool):
        self.active = active
        self._job = job
        self._device = device
        self._bar: tqdm | None = None
        self._tables: RunTables | None = None
        self._board: TensorBoard | None = None
        self._wandb: WandbBoard | None = None
        self._seconds: list[float] = []
        self._held_out = ""
        self._lines = Lines(tqdm.write, verbose=job.logging.verbose)
        if active:
            self._lines.listen()

    def info(self, line: str) -> None:
        """Write to the console and to `coat/log.txt`."""
        if self.active:
            self._lines.info(line)

    def detail(self, line: str) -> None:
        """Write to `coat/log.txt`, and to the console with `logging.verbose`."""
        if self.active:
            self._lines.detail(line)

    def record(self, line: str) -> None:
        """Write to `coat/log.txt` alone."""
        if self.active:
            self._lines.record(line)

    def open(self, step: int) -> None:
        """Open the files; what a crashed run wrote after `step` is dropped from them."""
        if not self.active:
            return
        job = self._job
        self._lines.open(job.folder)
        self._tables = RunTables(job.folder, step, self._device, "coat-flux train", self.info)
        board = Path(job.log_dir) / job.name if job.log_dir else job.folder / "coat" / "tensorboard"
        self._board = TensorBoard(board, step, self.info)
        self._wandb = WandbBoard(job, self.info) if job.logging.use_wandb else None

    def start(self, step: int) -> None:
        """Show the bar."""
        if self.active:
            job = self._job
            self._bar = tqdm(
                total=job.train.steps, initial=step, desc=job.name, bar_format=BAR, smoothing=0.1, **bar_options()
            )

    def step(self, stats: StepStats) -> None:
        """Record one optimizer step."""
        if self._bar is None or self._tables is None:
            return
        peak = self._tables.step(stats)
        shown = f"lr: {stats.lr:.1e} loss: {stats.loss:.3e}{self._held_out} peak: {peak:.2f}GB"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(stats.step - self._bar.n)
        every = self._job.performance_log_every
        self._seconds.append(stats.seconds)
        if every and stats.step % every == 0:
            times = self._seconds
            self.info(f"Step {stats.step}: {sum(times) / len(times):.3f} s/it ({min(times):.3f} to {max(times):.3f})")
        if not every or stats.step % every == 0:
            self._seconds = []
        if stats.step % self._job.logging.log_every == 0:
            values = (stats.loss, stats.lr, stats.grad_norm, stats.seconds, peak)
            for tag, value in zip(METRICS[2:-1], values, strict=True):
                self.scalar(tag, value, stats.step)
            if self._wandb is not None:  # names as ai-toolkit's
                self._wandb.log({"learning_rate": stats.lr, "loss/loss": stats.loss}, stats.step)

    def images(self, paths: Sequence[Path], prompts: Sequence[str], step: int) -> None:
        """Record the samples of a step, in W&B only: the files are in `samples`."""
        if self._wandb is not None:
            self._wandb.images(paths, prompts, step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One TensorBoard point."""
        if self._board is not None:
            self._board.scalar(tag, value, step)

    def validation(self, step: int, loss: float) -> None:
        """Record a fixed-noise loss in `coat/validation.csv` and TensorBoard; one of photos held out is in the bar."""
        if self._job.validation.hold_out is not None:
            self._held_out = f" held-out: {loss:.3e}"
            self.info(f"Step {step}: held-out loss {loss:.5f}")
        if self._tables is not None:
            self._tables.validation(step, loss)
            self.scalar("validation_loss", loss, step)
        if self._wandb is not None:
            self._wandb.log({"validation_loss": loss}, step)

    def precision(self, rows: Sequence[CastPrecision]) -> None:
        """Record rows of `coat/precision.csv`; those of the weights only once."""
        if self._tables is not None:
            self._tables.precision(rows)

    def close(self) -> None:
        """Close bar and files; may be called twice."""
        for part in (self._bar, self._tables, self._board, self._wandb, self._lines):
            if part is not None:
                part.close()
        self._bar = self._tables = self._board = self._wandb = None
