"""The FP8 codes of a weight being trained: cast once per version of the weight, or at each use.

Between two optimizer steps all micro-batches, their recomputation and dgrad can read one cast of W: 1 byte per element.
A version is the parameter's storage and autograd's count of in-place changes, plus every optimizer step: fused AdamW
and writes through `param.data` do not count in autograd.

Not counted: other writes through `.data`, replays of a CUDA graph that holds the optimizer's step, and FSDP2, which
gathers a weight into the same storage. Call `forget_codes` after each, or leave `cache_weight` off.
Compiled code and CUDA graphs always cast: they would record no cast and read old codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from coat_core.config import FP8LinearConfig
from coat_core.linear.weight import StoredWeight, quantize_weight


class TrainedCodes:
    """The codes of one weight."""

    def __init__(self) -> None:
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None
        self._made_from: tuple[Any, ...] = ()

    def cast(self, weight: Tensor, config: FP8LinearConfig) -> StoredWeight:
        """Return W [N, K] as FP8 codes and scales, cached while the weight does not change."""
        if not config.cache_weight:
            self.forget()
            return quantize_weight(weight, config)
        if _is_recorded(weight) or torch.is_inference_mode_enabled() or weight.is_inference():
            return quantize_weight(weight, config)  # inference tensors count no changes, and cannot be saved later
        storage = StorageWeakRef(weight.untyped_storage())  # of an address that is not used again while we hold it
        forms = config.weight_format, config.weight_granularity
        made_from = storage, weight.storage_offset(), weight._version, weight.dtype, forms
        if self.codes is None or self.scale is None or self._made_from != made_from:
            _count_optimizer_steps()
            self.forget()  # the old codes first, so that there is never a second copy
            stored = quantize_weight(weight, config)
            self.codes, self.scale, self._made_from = stored.codes, stored.scale, made_from
        return StoredWeight(self.codes, self.scale)

    def forget(self) -> None:
        """Free the codes; the next use casts the weight."""
        self.codes = self.scale = None
        self._made_from = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainedCodes, ()  # a copy or a pickle of a module casts for itself


def forget_codes(model: nn.Module) -> None:
    """Free the codes of a model's trained FP8 linears after uncounted changes (see the module); the next use casts."""
    for module in model.modules():
        kept = vars(module).get("trained_codes")
        if isinstance(kept, TrainedCodes):
            kept.forget()


@functools.cache
def _count_optimizer_steps() -> None:
    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            increment_version([param for param in group["params"] if not param.is_inference()])

    register_optimizer_step_post_hook(count)


def _is_recorded(weight: Tensor) -> bool:
    return torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
