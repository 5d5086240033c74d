"""The dry GPU: a training step's own code for CUDA, line by line, on a machine without one.

    with dry_gpu(monkeypatch) as gpu:
        gpu.steps(dry_session(coat, monkeypatch), 2)

Stood in for: what kernels compute, what the host reads (the lists below), weights, photos and captions, the trial
whether Triton works, FlashAttention 3 and 4, and the first step's choice by time (everything takes one millisecond).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coat_core.ops import attention as attention_kernels
from coat_core.ops import dispatch, scaled_mm
from coat_core.optim import offload
from coat_flux.base.interrupts import Interrupts
from coat_flux.blocks import apply, proving, streaming
from coat_flux.trainers.standalone.trainer import train_step

from .card import card_view
from .engine import dry_session
from .launches import check_launch, compiled_for
from .operators import GPUOperators

__all__ = ["COMPARED", "dry_gpu", "dry_session"]

# Where the host may wait inside a step, and the number it reads there.
# In the first step of a process.
FIRST = {
    "coat_core/ops/scaled_mm.py:_random_codes": 0.0,  # codes to try products with
    "coat_core/ops/scaled_mm.py:_is_right": 1.0,  # whether a product is right
    "coat_core/ops/attention.py:__init__": 0.0,  # tensors to try attention with
    "coat_core/ops/attention.py:_error": 0.0,  # how far a kernel is from plain products
    "coat_flux/blocks/measure.py:timed": 0.0,  # how long a block takes
    "coat_flux/blocks/fused/chooser.py:relative_difference": 0.0,  # fused blocks against diffusers' own
    "coat_flux/blocks/streaming.py:to_device": 0.0,  # what the first step finds need not be streamed
    "coat_flux/watch/guard.py:_norm": 1.0,  # of the weights at the start
}
# In steps that look closer: health steps, and the guard's look at the weights.
CLOSER = {
    "coat_flux/trainers/standalone/workers.py:read": 1.0,  # loss and gradient norm, else read a step late
    "coat_flux/watch/casts.py:rows": 0.0,
    "coat_flux/watch/guard.py:_check": 1.0,
    "coat_flux/watch/guard.py:_norm": 1.0,
}
# In the step that is run eagerly and by a replay, which are compared.
COMPARED = {
    "coat_flux/trainers/standalone/step_graph.py:_copied": 0.0,
    "coat_flux/trainers/standalone/step_graph.py:_restore": 0.0,
    "coat_flux/trainers/standalone/step_graph.py:_difference": 1.0,
}
CACHES = (dispatch.triton_obstacle, dispatch.launcher_of, scaled_mm.unsupported_reason)


class DryGPU:
    """A card that is not there."""

    def __init__(self, operators: GPUOperators) -> None:
        self.operators = operators
        self.launches: Counter[str] = Counter()  # of kernels so far, by name
        self.captures = 0  # CUDA graphs so far
        self._captures_now = False

    def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
        """In place of `step_graph.capture`: the host may wait nowhere in it."""
        self.captures += 1
        self._captures_now = True
        try:
            with self.operators.capture():
                return SimpleNamespace(pool=lambda: None, replay=lambda: None), call()
        finally:
            self._captures_now = False

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for x in (*args, *keywords.values()):
            self.operators.memory.read(x)
        self.launches[check_launch(kernel, grid, args, keywords)] += 1

    def steps(self, session: Any, count: int, closer: Mapping[str, float] = CLOSER) -> None:
        """Do whole steps of the engine, from the batch to AdamW and EMA; `closer`: where the host may wait besides."""
        batches = iter(session.sampler)
        for _ in range(count):
            allowed = {**closer, **({} if session.step else FIRST)}
            with Interrupts(lambda _: None) as interrupts, self.operators.step(allowed):
                train_step(session, batches, interrupts)


@contextmanager
def dry_gpu(patch: pytest.MonkeyPatch, attention: str = "cudnn") -> Iterator[DryGPU]:
    """Let all of the `with` block run as on a GPU whose torch chooses `attention`, a key of `operators.ATTENTION`."""
    from coat_core.ops import launch as tables
    from coat_core.ops import quantize_kernel as quantize
    from coat_flux.trainers.standalone import step_graph

    def pin(memory: torch.Tensor, *_: Any) -> None:
        view.pinned.add(memory.untyped_storage())

    compiled_for()
    patch.setattr(quantize, "agrees_with_reference", lambda device: True)
    patch.setattr(scaled_mm, "_sizes", scaled_mm._sizes)  # a run changes them
    patch.setattr(dispatch, "_failures_end_the_run", True)  # an error of a launcher is an error of the test
    patch.setattr(apply, "use_kernels", lambda policy, left_out: None)
    patch.setattr(proving, "DEVICE", None)
    patch.setattr(attention_kernels.registry, "activate_flash_attention_impl", lambda library: None)
    patch.setattr(tables, "_uploaded", OrderedDict())
    patch.setattr(tables, "_spares", {})
    with card_view(patch) as view, GPUOperators(view, attention) as operators:
        gpu = DryGPU(operators)
        patch.setattr(step_graph, "capture", gpu.capture)
        patch.setattr(streaming, "pin", pin)
        patch.setattr(offload, "pin", pin)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu._captures_now)
        patch.setattr(tables, "_copied_by_graphs", {})
        patch.setattr(tables, "_read_by_graphs", {})
        for cached in CACHES:
            cached.cache_clear()
        try:
            with tables.recorded_launches(gpu.launch):
                yield gpu
        finally:
            attention_kernels.use_kernel(None)
            for cached in CACHES:
                cached.cache_clear()
