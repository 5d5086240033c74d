"""Weights & Biases beside CSV and TensorBoard: ai-toolkit's keys, `logging.use_wandb`, `project_name`, `run_name`.

A resumed run goes on in the same W&B run: its id is kept in `coat/wandb.json`. Nothing W&B does ends a run: the first
failure is told in one line and no more is sent.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...base.files import write_file
from ...config.job import JobConfig

__all__ = ["WandbBoard"]

FILE = Path("coat") / "wandb.json"


class WandbBoard:
    """One W&B run.

    Args:
        job: its `logging` block says the names; `raw` is sent as the config.
        say: told where the run is, and of a failure.
    """

    def __init__(self, job: JobConfig, say: Callable[[str], None]):
        self._say = say
        self._run: Any = None
        self._failed = False
        self._guarded(lambda: self._start(job))

    def _start(self, job: JobConfig) -> None:
        import wandb

        path = job.folder / FILE
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
        self._say(f"W&B: {self._run.url or self._run.dir}")

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
            self._say(f"W&B: {type(error).__name__}: {error}; the run goes on without it")
