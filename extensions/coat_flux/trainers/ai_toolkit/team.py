"""The processes of one job, started by `accelerate launch run.py`: ai-toolkit starts them, and averages nothing.

    hook_before_model_load   `begin`: waits may be long; what prepares files is done by one process after the other
    hook_add_extra_…         `share`: the adapters begin with the main process's values
    hook_before_train_loop   `unwrapped`: nothing becomes DistributedDataParallel, the lr schedule counts steps once
    a micro-batch            takes every N-th batch of the run's one order (`data_order`), draws by its number (`loop`)
    before clipping          `sum_gradients`, as ai-toolkit sums those of accumulation
    before the update        `agree`: one loss and one answer to stop, save and sample, so the guard decides alike
    sample                   each process draws every N-th prompt; saves are the main process's

A job of one process has none of this: every method does nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import UserError
from ...base.files import link_or_copy
from ..processes import STEP_LIMIT, WAIT_LIMIT, exchange, share_values, sum_gradients
from .common import AIToolkitError

__all__ = ["Team"]

NEEDED = ("train_single_accumulation", "post_process_generate_image_config_list")


class Team:
    """The processes of a job.

    Args:
        accelerator: ai-toolkit's.

    Attributes:
        size: how many they are.
        rank: which one this is.
        is_main: whether it is the one that writes.
    """

    def __init__(self, accelerator: Any):
        self.size = accelerator.num_processes
        self.rank = accelerator.process_index if self.size > 1 else 0
        self.is_main = accelerator.is_main_process
        self._device = accelerator.device if self.size > 1 else None
        self._patient: Any = None

    def begin(self, process_class: type) -> None:
        """Wait for all processes; from here on waits for the main process may be long.

        Args:
            process_class: ai-toolkit's.

        Raises:
            AIToolkitError: it has no place to hook into what several processes need.
            UserError: several were started, and accelerate does not know of the others.
        """
        if self.size == 1:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserError(
                    f"{os.environ['WORLD_SIZE']} processes were started, and each takes itself for the only one; where "
                    "there is no GPU, set ACCELERATE_USE_CPU=true, or start one process"
                )
            return
        missing = [name for name in NEEDED if not hasattr(process_class, name)]
        if missing:
            raise AIToolkitError(f"several processes: {process_class.__name__} has no {', '.join(missing)}")
        self._patient = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)
        _limit_waits(WAIT_LIMIT)  # ai-toolkit's own, while the main process fills the caches
        self.wait()

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            with exchange():
                dist.barrier(self._patient)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """One process after the other runs the block, the main process first."""
        for _ in range(self.rank):
            self.wait()
        yield
        for _ in range(self.size - self.rank if self.size > 1 else 0):
            self.wait()

    def from_main(self, value: Any) -> Any:
        """The main process's value, in all of them."""
        if self.size == 1:
            return value
        box = [value]
        with exchange():
            dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def share(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give every process the main process's values."""
        if self.size > 1:
            share_values(parameters, self._device)

    @contextmanager
    def unwrapped(self, process: Any) -> Iterator[None]:
        """Let ai-toolkit prepare the run inside the block without DistributedDataParallel around what is trained.

        Its reducer would never run, because nothing calls the wrapped forward: accelerate prepares as for one process.
        It would also step an lr schedule once for each process.
        """
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
        process.step_num, process.start_step, process.epoch_num = self.from_main(
            (process.step_num, process.start_step, process.epoch_num)
        )
        _limit_waits(STEP_LIMIT)

    def sum_gradients(self, groups: Sequence[dict[str, Any]]) -> None:
        """Replace every gradient of an optimizer's groups by its sum over all processes."""
        if self.size > 1:
            sum_gradients([parameter for group in groups for parameter in group["params"]])

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all processes."""
        if self.size == 1:
            return value
        total = value.clone()
        with exchange():
            dist.all_reduce(total)
        return total / self.size

    def agree(self, loss: float, asked: Sequence[bool]) -> tuple[float, list[bool]]:
        """The mean loss of all processes, and which flags are set in any of them."""
        if self.size == 1:
            return loss, list(asked)
        numbers = torch.tensor([loss, *asked], dtype=torch.float64 if self._device.type == "cpu" else torch.float32)
        numbers = numbers.to(self._device)
        with exchange():
            dist.all_reduce(numbers)
        total, *flags = numbers.tolist()
        return total / self.size, [flag > 0 for flag in flags]

    def share_of(self, images: list[Any]) -> list[Any]:
        """This process's part of the images to sample, each with the number that it has among all."""
        if self.size == 1:
            return images
        for number, image in enumerate(images):
            count = str(number).zfill(len(str(len(images))))
            image.output_filename_no_ext = image.output_filename_no_ext.replace("[count]", count)
        own = images[self.rank :: self.size]
        for image in own:
            if hasattr(image, "save_image_atomic"):
                image.save_image_atomic = functools.partial(_save_apart, image, f".{self.rank}")
        return own

    @contextmanager
    def all_sample(self, process: Any) -> Iterator[None]:
        """Let every process sample inside the block, where ai-toolkit lets the main one."""
        if self.size == 1:
            yield
            return
        own = process.accelerator
        process.accelerator = _AsMain(own)
        try:
            yield
        finally:
            process.accelerator = own


def _save_apart(image: Any, name: str, *args: Any) -> None:
    """Save an image through a folder of this process: ai-toolkit moves all that is in the one it uses.

    Args:
        image: ai-toolkit's GenerateImageConfig.
        name: of the folder.
        args: of its `save_image_atomic`.
    """
    folder = image.output_folder
    image.output_folder = apart = os.path.join(folder, name)
    try:
        type(image).save_image_atomic(image, *args)
    finally:
        image.output_folder = folder
    for part in (".thumbs", ""):  # as in ai-toolkit: a picture's thumbnail is there before it
        files = os.scandir(os.path.join(apart, part)) if os.path.isdir(os.path.join(apart, part)) else ()
        for file in [file for file in files if file.is_file()]:
            os.makedirs(os.path.join(folder, part), exist_ok=True)
            link_or_copy(Path(file.path), Path(folder, part, file.name))
    shutil.rmtree(apart)


class _AsMain:
    """ai-toolkit's accelerator, of a process that takes itself for the main one."""

    is_main_process = True

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _limit_waits(limit: Any) -> None:
    """Set how long an exchange in the default group may take; ai-toolkit has made it with accelerate's 10 minutes."""
    setter = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # torch has no public one
    if setter is not None:
        setter(limit)
