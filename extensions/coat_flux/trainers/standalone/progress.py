"""Reports of a live run: progress bar, console lines, files in its folder, TensorBoard, Weights & Biases.

Only the main process reports. Disk errors are logged once and retried later: no report ends a run.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ...base.files import write_file
from ...base.run_log import Lines, bar_options
from ...base.table import METRICS
from ...config.job import JobConfig
from ...data.fidelity import Redrawn
from ...watch.casts import CastPrecision
from ...watch.run_tables import RunTables, StepStats

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]"
WANDB_FILE = Path("coat") / "wandb.json"


class RunLog:
    """Progress bar, console, CSV, TensorBoard and W&B of one run; silent unless `active` (the main process)."""

    def __init__(self, job: JobConfig, device: torch.device, *, active: bool):
        self.active = active
        self._job = job
        self._device = device
        self._bar: tqdm | None = None
        self._tables: RunTables | None = None
        self._board: TensorBoard | None = None
        self._wandb: _Wandb | None = None
        self._seconds: list[float] = []
        self._held_out = ""
        self._lines = Lines(tqdm.write, verbose=job.logging.verbose, active=active)
        self.info, self.detail, self.record = self._lines.info, self._lines.detail, self._lines.record
        if active:
            self._lines.listen()

    def open(self, step: int) -> None:
        """Open the files, dropping rows of a crashed run after `step`."""
        if not self.active:
            return
        job = self._job
        self._lines.open(job.folder)
        self._tables = RunTables(job.folder, step, self._device, "coat-flux train", self.info)
        board = Path(job.log_dir) / job.name if job.log_dir else job.folder / "coat" / "tensorboard"
        self._board = TensorBoard(board, step, self.info)
        self._wandb = _Wandb(job, self.info) if job.logging.use_wandb else None

    def start(self, step: int) -> None:
        """Show the bar."""
        if self.active:
            shown = {"desc": self._job.name, "bar_format": BAR, "smoothing": 0.1, **bar_options()}
            self._bar = tqdm(total=self._job.train.steps, initial=step, **shown)

    def step(self, stats: StepStats) -> None:
        """Record one optimizer step."""
        if self._bar is None or self._tables is None or self._board is None:
            return
        peak = self._tables.step(stats)
        shown = f"lr: {stats.lr:.1e} loss: {stats.loss:.3e}{self._held_out} peak: {peak:.2f}GB"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(stats.step - self._bar.n)
        every = self._job.performance_log_every
        if every:
            self._seconds.append(stats.seconds)
            if stats.step % every == 0:
                times, self._seconds = self._seconds, []
                mean = sum(times) / len(times)
                self.info(f"Step {stats.step}: {mean:.3f} s/it ({min(times):.3f} to {max(times):.3f})")
        if stats.step % self._job.logging.log_every == 0:
            values = (stats.loss, stats.lr, stats.grad_norm, stats.seconds, peak)
            self._board.scalars(dict(zip(METRICS[2:-1], values, strict=True)), stats.step)
            if self._wandb is not None:  # names as ai-toolkit's
                self._wandb.log({"learning_rate": stats.lr, "loss/loss": stats.loss}, stats.step)

    def samples(self, paths: Sequence[Path], prompts: Sequence[str], step: int) -> None:
        """Record the samples of a step, whose files are in `samples`."""
        self.info(f"Samples of step {step} are in {self._job.folder / 'samples'}")
        if self._wandb is not None:
            pictures = enumerate(zip(paths, prompts, strict=True))
            self._wandb.log({f"sample_{i}": picture for i, picture in pictures}, step)

    def validation(self, step: int, loss: float) -> None:
        """Record a fixed-noise loss in `coat/validation.csv` and TensorBoard; a held-out one in the bar."""
        if self._job.validation.hold_out is not None:
            self._held_out = f" held-out: {loss:.3e}"
            self.info(f"Step {step}: held-out loss {loss:.5f}")
        if self._tables is not None and self._board is not None:
            self._tables.validation(step, loss)
            self._board.scalars({"validation_loss": loss}, step)
        if self._wandb is not None:
            self._wandb.log({"validation_loss": loss}, step)

    def fidelity(self, step: int, redrawn: Redrawn) -> None:
        """Record how true the redrawn photos are in `coat/fidelity.csv`, TensorBoard and W&B."""
        self.info(f"{redrawn.describe()} ({redrawn.seconds:.1f} s)")
        named = {f"fidelity/{name}": value for name, value in redrawn.mean()._asdict().items()}
        if self._tables is not None and self._board is not None:
            self._tables.fidelity(redrawn.rows())
            self._board.scalars(named, step)
        if self._wandb is not None:
            self._wandb.log(named, step)

    def precision(self, rows: Sequence[CastPrecision]) -> None:
        """Record rows of `coat/precision.csv`; weights only once."""
        if self._tables is not None:
            self._tables.precision(rows)

    def close(self) -> None:
        """Close bar and files."""
        for part in (self._bar, self._tables, self._board, self._wandb, self._lines):
            if part is not None:
                part.close()


class TensorBoard:
    """Scalars for TensorBoard; a removed folder or a full disk costs points and one log line, never the run."""

    def __init__(self, folder: Path, step: int, log: Callable[[str], None]):
        self._folder = folder
        self._log = log
        self._failed = False
        self._writer: SummaryWriter | None = None
        self.scalars({}, step + 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve; the first failure is logged, and the next call begins with a new writer."""
        try:
            if self._writer is None or not self._folder.is_dir():
                self.close()
                self._writer = SummaryWriter(str(self._folder), purge_step=step)
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
        except OSError as error:
            if not self._failed:
                self._log(f"TensorBoard: {self._folder} cannot be written ({error}); the run goes on")
            self._failed = True
            self.close()

    def close(self) -> None:
        """Close the files; idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()


class _Wandb:
    """One W&B run with ai-toolkit's keys, resumed by its id in `coat/wandb.json`; silent after the first failure."""

    def __init__(self, job: JobConfig, log: Callable[[str], None]):
        self._log: Callable[[str], None] = log
        self._run: Any = None
        with self._guarded():
            import wandb

            path = job.folder / WANDB_FILE
            known = secrets.token_hex(4)
            if path.exists():
                known = json.loads(path.read_text(encoding="utf-8"))["id"]
            self._run = wandb.init(
                project=job.logging.project_name,
                name=job.logging.run_name,
                config=job.written,
                dir=str(job.folder / "coat"),
                id=known,
                resume="allow",
            )
            write_file(path, json.dumps({"id": known}) + "\n")
            log(f"W&B: {self._run.url or self._run.dir}")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers, and pictures as (file, caption)."""
        if self._run is not None:
            with self._guarded():
                from wandb import Image

                logged = {
                    name: Image(str(value[0]), caption=value[1]) if isinstance(value, tuple) else value
                    for name, value in values.items()
                }
                self._run.log(logged, step=step)

    def close(self) -> None:
        if self._run is not None:
            with self._guarded():
                self._run.finish()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # training matters more than any of its errors
            self._run = None
            self._log(f"W&B: {type(error).__name__}: {error}; the run goes on without it")
