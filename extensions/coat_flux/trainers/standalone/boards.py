"""TensorBoard and Weights & Biases: where a run also sends its numbers. Nothing either of them does ends a run."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ...base.files import write_file
from ...config.job import JobConfig

__all__ = ["TensorBoard", "WandbBoard"]

WANDB_FILE = Path("coat") / "wandb.json"


class TensorBoard:
    """Scalars for TensorBoard; a folder that was removed or a full disk costs points, never the run.

    Args:
        folder: of its files; made again where it was removed.
        step: steps done; what a crashed run wrote after them is left out.
        log: takes one line, at the first failure.
    """

    def __init__(self, folder: Path, step: int, log: Callable[[str], None]):
        self._folder, self._log = folder, log
        self._writer: SummaryWriter | None = None
        self._failed = False
        self._hook = threading.excepthook
        threading.excepthook = self._quiet
        with self._kept_going():
            self._open(step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point."""
        with self._kept_going():
            if self._writer is None or not self._folder.is_dir():
                self._close_writer()
                self._open(step - 1)
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._close_writer()
        if threading.excepthook == self._quiet:
            threading.excepthook = self._hook

    def _open(self, step: int) -> None:
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Log the first OSError; the next point begins with a new writer."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._log(f"TensorBoard: {self._folder} cannot be written ({error}); the run goes on")
            self._failed = True
            self._close_writer()

    def _quiet(self, failure: Any) -> None:
        """TensorBoard writes in a thread, whose error comes back with the next point: no traceback for it."""
        if not (type(failure.thread).__module__.startswith("tensorboard.") and isinstance(failure.exc_value, OSError)):
            self._hook(failure)


class WandbBoard:
    """One W&B run: ai-toolkit's keys, `logging.use_wandb`, `project_name`, `run_name`.

    A resumed run continues the same W&B run: its id is kept in `coat/wandb.json`. The first failure is logged in one
    line, and no more is sent.

    Args:
        job: its `logging` block has the names; `written` is sent as the config.
        log: takes a line for where the run is, and for a failure.
    """

    def __init__(self, job: JobConfig, log: Callable[[str], None]):
        self._log = log
        self._run: Any = None
        self._failed = False
        self._guarded(lambda: self._start(job))

    def _start(self, job: JobConfig) -> None:
        import wandb

        path = job.folder / WANDB_FILE
        known = json.loads(path.read_text(encoding="utf-8"))["id"] if path.exists() else secrets.token_hex(4)
        self._run = wandb.init(
            project=job.logging.project_name,
            name=job.logging.run_name,
            config=job.written,
            dir=str(job.folder / "coat"),
            id=known,
            resume="allow",
        )
        write_file(path, json.dumps({"id": known}) + "\n")
        self._log(f"W&B: {self._run.url or self._run.dir}")

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers of a step."""
        self._guarded(lambda: self._run.log(values, step=step))

    def images(self, paths: Sequence[Path], captions: Sequence[str], step: int) -> None:
        """The samples of a step, as `sample_0`, `sample_1` …, as ai-toolkit names them."""

        def send() -> None:
            import wandb

            pairs = enumerate(zip(paths, captions, strict=True))
            self._run.log({f"sample_{i}": wandb.Image(str(path), caption=text) for i, (path, text) in pairs}, step=step)

        self._guarded(send)

    def close(self) -> None:
        """End the W&B run."""
        self._guarded(lambda: self._run.finish())

    def _guarded(self, action: Callable[[], None]) -> None:
        """Do it unless W&B failed before."""
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # whatever it is, training is worth more
            self._failed = True
            self._log(f"W&B: {type(error).__name__}: {error}; the run goes on without it")
