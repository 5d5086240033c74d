"""The processes of one job, started by `accelerate launch run.py`.

ai-toolkit starts them and averages nothing. Each takes every N-th batch of one order, gradients are summed before
clipping, and all agree on one loss and on the action after the step. Each samples every N-th prompt; one saves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import UserError
from ..processes import STEP_LIMIT, WAIT_LIMIT, Processes
from .host import patched


class Team(Processes):
    """The processes of a job; UserError if several were started without accelerate's knowledge."""

    def __init__(self, accelerator: Any):
        size = accelerator.num_processes
        if size == 1:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserError(
                    f"{os.environ['WORLD_SIZE']} processes were started, and each takes itself for the only one; where "
                    "there is no GPU, set ACCELERATE_USE_CPU=true, or start one process"
                )
            super().__init__(1, 0, torch.device("cpu"))
            return
        super().__init__(size, accelerator.process_index, accelerator.device)
        _limit_waits(WAIT_LIMIT)  # ai-toolkit's waits, while the main process fills the caches
        self.wait()

    @contextmanager
    def unwrapped(self, process: Any) -> Iterator[None]:
        """Let ai-toolkit prepare the run as for one process: nothing calls DDP's forward, so it would not reduce."""
        if self.size == 1:
            yield
            return
        from accelerate import DistributedType

        state = process.accelerator.state
        kind, state.distributed_type = state.distributed_type, DistributedType.NO
        try:
            yield
        finally:
            state.distributed_type = kind
        if hasattr(process.lr_scheduler, "split_batches"):
            process.lr_scheduler.split_batches = True
        places = (process.step_num, process.start_step, process.epoch_num)
        process.step_num, process.start_step, process.epoch_num = self.from_main(places)
        _limit_waits(STEP_LIMIT)

    def agree_on_loss(self, loss: float, requests: Sequence[bool]) -> tuple[float, list[bool]]:
        """The mean loss of all processes, and the requests of any."""
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        mean, flags = self.agree(torch.tensor([loss], dtype=dtype, device=self.device), requests)
        return float(mean), flags

    def all_sample(self, process: Any) -> Any:
        """In this context every process samples, not only the main one."""
        return nullcontext() if self.size == 1 else patched(process, accelerator=_AsMain(process.accelerator))

    def share_of(self, images: list[Any]) -> list[Any]:
        """This process's images, each with its number among all."""
        if self.size == 1:
            return images
        for number, image in enumerate(images):
            count = str(number).zfill(len(str(len(images))))
            image.output_filename_no_ext = image.output_filename_no_ext.replace("[count]", count)
            image.save_image_atomic = image.save_image  # ai-toolkit would move the other processes' images, too
        return images[self.rank :: self.size]


class _AsMain:
    is_main_process = True

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _limit_waits(limit: Any) -> None:
    setter = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # torch has no public setter
    if setter is not None:
        setter(limit)
