"""The processes of a stand-alone run and their devices, over `accelerate`.

Each process holds the whole model and its own micro-batches; after the last one of an optimizer step gradients are
summed, with losses already divided by the micro-batches of all. (DistributedDataParallel would broadcast 12 GB of
frozen codes.) FSDP2 shares out a LoRA's frozen codes (`blocks.streaming`) or the trained weights (`sharding`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from coat_core.optim.sharded import is_sharded, local_values

from ...config.launch import LaunchError, launch_obstacle, shares_weights
from ...watch.guard import tensor_norms
from ..processes import STEP_LIMIT, Processes, exchange

__all__ = ["Reading", "Workers", "not_finite", "whole_norms"]

logger = logging.getLogger(__name__)


class Workers(Processes):
    """The processes of a stand-alone run, as started by accelerate.

    `device` is cpu, mps, cuda, cuda:<n>, or None for the best; a missing one becomes the CPU, with a warning. With
    `shares_weights` (accelerate's FSDP2) all processes run the transformer together or not at all.

    Raises:
        LaunchError: `accelerate launch` was asked for several processes and started one, or for DeepSpeed.
    """

    def __init__(self, device: str | None = None):
        if (obstacle := launch_obstacle(os.environ)) is not None:
            raise LaunchError(obstacle)
        wanted = torch.device(device) if device is not None else None
        missing = wanted is not None and not _available(wanted)
        if missing:
            logger.warning("device=%s: torch finds no such device here; training on the CPU", device)
        on_cpu = missing or (wanted is not None and wanted.type == "cpu")
        patience = InitProcessGroupKwargs(timeout=STEP_LIMIT)
        self._accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[patience])
        size = self._accelerator.num_processes
        _check_launch(size)
        own = torch.device("cpu") if on_cpu else self._accelerator.device
        if wanted is not None and not on_cpu and size == 1:
            own = wanted
        super().__init__(size, self._accelerator.process_index, own)
        self.shares_weights = size > 1 and shares_weights(os.environ)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        """End the process group; accelerate forgets its device, so the next run may use another."""
        self._accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)


def _check_launch(size: int) -> None:
    """Detect `accelerate launch --cpu --num_processes 2`, which leaves that to mpirun and silently starts one."""
    launched_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if launched_on_cpu and "MASTER_ADDR" in os.environ and size == 1:
        raise LaunchError(
            "accelerate launch --cpu with several num_processes starts only one, without mpirun; "
            "use accelerate launch --multi_gpu --num_processes N, which also works without GPUs"
        )


def _available(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu" or torch.backends.mps.is_available()


class Reading:
    """A few numbers, fp32 [n], on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        self._copy, self._copied = values, None
        if values.is_cuda:
            self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._copy.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Wait for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()


def not_finite(values: Tensor) -> Tensor:
    """fp32 [] on the device: 1 if any value is not finite."""
    return 1.0 - values.isfinite().all().to(torch.float32)


@torch.no_grad()
def whole_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each whole tensor, of order 2 or infinity, fp32 [n]; those of shards are exchanged at once.

    Raises:
        LostProcessError: a process has ended.
    """
    own = tensor_norms([local_values(tensor) for tensor in tensors], order)
    sharded = list(map(is_sharded, tensors))
    if not any(sharded):
        return own
    largest = order == math.inf
    # a maximum may lose NaN, so NaN counts as infinite
    total = own.nan_to_num(nan=math.inf, posinf=math.inf) if largest else own.double().square()
    with exchange():
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norms = total if largest else total.sqrt().float()
    return torch.where(torch.tensor(sharded).to(own.device, non_blocking=True), norms, own)
