"""The processes of a stand-alone run and their devices, over `accelerate`.

Each process holds the whole model and its own micro-batches; after the last one of an optimizer step gradients are
summed, with losses already divided by the micro-batches of all. (DistributedDataParallel would broadcast 12 GB of
frozen codes.) FSDP2 shares out a LoRA's frozen codes (`blocks.streaming`) or, in full fine-tuning, the weights
(`shard`): each process keeps its rows of every weight, and of its gradient and moments.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from coat_core.optim.sharded import cut_parameters, is_sharded, local_values

from ...blocks.models import family_of, listed_blocks
from ...watch.guard import tensor_norms
from ..processes import STEP_LIMIT, LaunchError, Processes, exchange, require_launch, shares_weights

logger = logging.getLogger(__name__)


class Workers(Processes):
    """The processes of a stand-alone run, as started by accelerate.

    `device` is cpu, mps, cuda, cuda:<n>, or None for the best; a missing one becomes the CPU, with a warning. With
    `shares_weights` (accelerate's FSDP2) all processes run the transformer together or not at all. LaunchError for
    DeepSpeed, or if one of several processes was started.
    """

    def __init__(self, device: str | None = None):
        require_launch(os.environ)
        wanted = None if device is None else torch.device(device)
        kind = None if wanted is None else wanted.type
        missing = kind == "mps" and not torch.backends.mps.is_available()
        if kind == "cuda":
            missing = (wanted.index or 0) >= torch.cuda.device_count()
        if missing:
            logger.warning("device=%s: torch finds no such device here; training on the CPU", device)
        on_cpu = missing or kind == "cpu"
        patience = InitProcessGroupKwargs(timeout=STEP_LIMIT)
        self._accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[patience])
        size = self._accelerator.num_processes
        launched_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
        if launched_on_cpu and "MASTER_ADDR" in os.environ and size == 1:  # it leaves the others to mpirun
            raise LaunchError(
                "accelerate launch --cpu with several num_processes starts only one, without mpirun; "
                "use accelerate launch --multi_gpu --num_processes N, which also works without GPUs"
            )
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


def start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a few numbers, fp32 [n], from the device; the result waits for them."""
    if not values.is_cuda:
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return read


def not_finite(values: Tensor) -> Tensor:
    """fp32 [] on the device: 1 if any value is not finite."""
    return 1.0 - values.isfinite().all().to(torch.float32)


@torch.no_grad()
def whole_norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each whole tensor, of order 2 or infinity, fp32 [n]; those of shards are exchanged at once."""
    own = tensor_norms([local_values(tensor) for tensor in tensors], order)
    sharded = list(map(is_sharded, tensors))
    if not any(sharded):
        return own
    with exchange():
        if order == math.inf:
            # a maximum may lose NaN, so NaN counts as infinite
            norms = own.nan_to_num(nan=math.inf, posinf=math.inf)
            dist.all_reduce(norms, dist.ReduceOp.MAX)
        else:
            squares = own.double().square()
            dist.all_reduce(squares, dist.ReduceOp.SUM)
            norms = squares.sqrt().float()
    return torch.where(torch.tensor(sharded).to(own.device, non_blocking=True), norms, own)


def shard(model: nn.Module, trained: Iterable[str], device: torch.device, block_size: int) -> dict[str, nn.Parameter]:
    """Shard a model over all processes, block by block; returns the trained parameters by name, DTensors or whole.

    Weights are gathered block by block, in forward and again in backward, which sums gradients over the processes
    (sums, not means: losses are already divided). Parameters that cannot be split (`cut_parameters`: small biases and
    norms) are whole everywhere, like frozen FP8 codes; the step sums their gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh  # not in every build of torch
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = cut_parameters(model, mesh.size(), block_size)
    blocks = listed_blocks(model, family_of(model).blocks)
    for module in (*blocks.values(), model):
        own = type(module)
        # always freed after forward: gathered copies would miss the EMA put into the shards
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        sharded.set_custom_all_gather(_Exchange("all_gather_single", "all_gather_into_tensor"))
        sharded.set_custom_reduce_scatter(_Exchange("reduce_scatter_single", "reduce_scatter_tensor"))
        # plans, readers and saved configs know the original class by name
        for attribute in ("__name__", "__qualname__", "__module__"):
            setattr(type(module), attribute, getattr(own, attribute))
    params = dict(model.named_parameters())
    return {name: params[name] for name in trained}


class _Exchange:
    """A collective of FSDP2's that detects a process that has ended. It was renamed in torch 2.13."""

    def __init__(self, name: str, before: str) -> None:
        self._run: Any = getattr(dist, name, None) or getattr(dist, before)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> Any:
        with exchange():
            return self._run(output_tensor, input_tensor, group=group, **options)
