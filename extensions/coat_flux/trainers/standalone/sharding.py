"""Full fine-tuning under FSDP2: each process keeps its rows of every weight, and of its gradient and moments.

Weights are gathered block by block, in forward and again in backward, which sums gradients over the processes (sums,
not means: losses are already divided). Parameters that cannot be split (`cut_parameters`: small biases and norms) are
whole everywhere, like frozen FP8 codes; the step sums their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from coat_core.optim.sharded import cut_parameters

from ...blocks.models import family_of, listed_blocks
from ..processes import exchange

__all__ = ["shard"]


def shard(model: nn.Module, trained: Iterable[str], device: torch.device, block_size: int) -> dict[str, nn.Parameter]:
    """Shard a model over all processes, block by block; returns the trained parameters by name, DTensors or whole."""
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
        kind = type(module)
        kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__
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
