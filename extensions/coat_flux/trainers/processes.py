"""Cooperation of a run's processes, in both trainers (`Processes`), and detection of one that has ended.

A killed process ends all others: gloo and sockets see the closed connection at the next exchange, the launcher's agent
kills those of its machine. What neither sees, a machine without power, ends by `STEP_LIMIT`. Waits for the main
process, which caches, saves and samples alone, may take `WAIT_LIMIT`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import UserError

STEP_LIMIT = timedelta(minutes=30)  # between two exchanges of a step; the first one also measures and compiles
WAIT_LIMIT = timedelta(hours=12)
BUCKET_BYTES = 2**29  # of gradients per exchange: a LoRA's, or a few blocks'
EXIT_OTHER = 2  # of a process that ends because another did


class LostProcessError(UserError, RuntimeError):
    """Another process of the run has ended, or does not answer."""


class Processes:
    """The processes of a run, exchanging on `device`; rank 0 writes. With one process every method returns at once."""

    def __init__(self, size: int, rank: int, device: torch.device) -> None:
        self.size = size
        self.rank = rank
        self.device = device
        self.is_main = rank == 0
        self._patient = dist.new_group(backend="gloo", timeout=WAIT_LIMIT) if size > 1 else None

    def wait(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            with exchange():
                dist.barrier(self._patient)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process runs the block before the others, which then run it concurrently."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Each process in turn runs the block, the main process first."""
        for _ in range(self.rank):
            self.wait()
        yield
        for _ in range(self.size - self.rank):
            self.wait()

    def from_main(self, value: Any) -> Any:
        """The main process's value, in all processes."""
        if self.size == 1:
            return value
        box = [value]
        with exchange():
            dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def mean(self, value: Tensor) -> Tensor:
        """Mean over all processes."""
        if self.size == 1:
            return value
        total = value.clone()
        with exchange():
            dist.all_reduce(total)
        return total / self.size

    def agree(self, numbers: Tensor, asked: Sequence[bool]) -> tuple[Tensor, list[bool]]:
        """The mean of numbers [n] over all processes, on the device, and the flags set in any of them."""
        if self.size == 1:
            return numbers, list(asked)
        means = self.mean(torch.cat([numbers, torch.tensor(asked).to(numbers)]))
        return means[: len(numbers)], [share > 0 for share in means[len(numbers) :].tolist()]

    @torch.no_grad()
    def sum_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Sum every gradient over all processes, in buckets, a missing one being zero; FSDP2 has summed its shards'."""
        if self.size == 1:
            return
        from coat_core.optim.sharded import is_sharded  # ai-toolkit imports this module before coat_core is found

        buckets: list[list[nn.Parameter]] = [[]]
        for param in params:
            if is_sharded(param):
                continue
            if buckets[-1] and sum(held.nbytes for held in buckets[-1]) + param.nbytes > BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(param)
        for bucket in filter(None, buckets):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            with exchange():
                dist.all_reduce(flat)
            for param, part in zip(bucket, flat.split([grad.numel() for grad in grads]), strict=True):
                param.grad = part.view_as(param).clone()

    @torch.no_grad()
    def share(self, params: Iterable[nn.Parameter]) -> None:
        """Copy the main process's unsharded values to every process."""
        if self.size == 1:
            return
        from coat_core.optim.sharded import is_sharded

        with exchange():
            for param in params:
                if not is_sharded(param):
                    values = param.detach().to(self.device, copy=True)
                    dist.broadcast(values, src=0)
                    param.copy_(values)


@contextmanager
def exchange() -> Iterator[None]:
    """A block that exchanges something; LostProcessError if a process has ended."""
    try:
        yield
    except RuntimeError as error:  # gloo has no error class of its own
        if threading.current_thread() is threading.main_thread():
            # by SIGTERM the launcher ends the remaining processes: not until this one has said why; SIGKILL follows
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise LostProcessError(
            "another process of this run has ended or does not answer, so all of them end; the saves are as they were, "
            f"the same command resumes from the newest (process {dist.get_rank()} of {dist.get_world_size()}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def first_to_fail() -> bool:
    """Whether no other process has called this before, so that a common cause is reported once."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("coat_failed", 1) == 1
    except (RuntimeError, ValueError):  # the launcher, which counts, has ended too
        return True
