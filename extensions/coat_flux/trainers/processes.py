"""Cooperation of a run's processes, in both trainers (`Processes`), and detection of one that has ended.

A killed process ends all others: gloo and sockets see the closed connection at the next exchange, the launcher's agent
kills those of its machine. What neither sees, a machine without power, ends by `STEP_LIMIT`. Waits for the main
process, which caches, saves and samples alone, may take `WAIT_LIMIT`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coat_core.optim.sharded import is_sharded

from ..base.errors import UserError
from ..base.names import COAT_OPTIMIZER
from ..config.job import JobConfig

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


ON = ("1", "true")
DDP = "use --config_file configs/accelerate/ddp.yaml"
FSDP_SETTINGS = {  # unsupported settings of its fsdp_config
    "reshard_after_forward": ("false", "gathered weights are always freed after forward; write true"),
    "offload_params": ("true", "weights and moments stay on the GPU; write false"),
    "activation_checkpointing": ("true", "coat.memory.checkpointing decides what is recomputed; write false"),
}


class LaunchError(UserError, RuntimeError):
    """The processes were launched in a mode that cannot train together."""


def require_launch(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if processes launched this way cannot train.

    DeepSpeed's ZeRO flattens all parameters of a process into one partition that its own engine updates: blocks of
    moments would span parameters, and neither guard, saves nor resume would see them.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ON:
        rule = f"its engine, not FP8 AdamW, updates parameters; {DDP}, or fsdp2.yaml where a model does not fit a GPU"
        raise LaunchError(f"accelerate launch with DeepSpeed: {rule}")
    if not shares_weights(environment):
        return
    if environment.get("FSDP_VERSION", "1") != "2":
        rule = "only FSDP2 is supported; use --config_file configs/accelerate/fsdp2.yaml"
        raise LaunchError(f"accelerate launch with FSDP: {rule}")
    for name, (value, why) in FSDP_SETTINGS.items():
        if environment.get(f"FSDP_{name.upper()}", "").lower() == value:
            raise LaunchError(f"accelerate launch with FSDP2, fsdp_{name}: {value}: {why}")


def shares_weights(environment: Mapping[str, str]) -> bool:
    """Whether accelerate's FSDP shards the weights over the processes."""
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ON


def joint_job(job: JobConfig, *, shares: bool) -> JobConfig:
    """Return the job adapted to several processes; raises LaunchError if it cannot run that way.

    With FSDP2 frozen codes are gathered block by block in all processes, so none may run blocks alone, as to measure.
    Trained weights are gathered into reused memory, so their codes cannot be cached.
    """
    coat, optimizer = job.coat, job.train.optimizer
    if job.train.fused_backward:
        raise LaunchError("train.fused_backward: true: is for one process; write false (fsdp2.yaml shares gradients)")
    if not shares:
        return job
    if coat.enabled and coat.memory.transposed_weights == "always":
        raise LaunchError("coat.memory.transposed_weights='always': copies are not shared out with FSDP2; write auto")
    if job.full and optimizer.lower() != COAT_OPTIMIZER:
        rule = f"with FSDP2 only {COAT_OPTIMIZER} updates trained weights; write it, or {DDP}"
        raise LaunchError(f"train.optimizer={optimizer!r}: {rule}")
    if job.full and coat.enabled and coat.optimizer_config(job.train.optimizer_params)[1]["offload"] != "none":
        rule = "with FSDP2 moments are shared out already; write none, or start one process"
        raise LaunchError(f"coat.optimizer.offload='cpu': {rule}")
    if not job.full and not (coat.enabled and coat.weight.use_fp8):
        text = "accelerate launch with FSDP2: shares out FP8 codes"
        raise LaunchError(f"{text}; set coat.weight.use_fp8: true, or {DDP}")
    changed = {"transposed_weights": "never"} if job.full else {"stream_blocks": "all"}
    memory, speed = replace(coat.memory, **changed), replace(coat.speed, measure="never")
    return replace(job, coat=replace(coat, memory=memory, speed=speed))
