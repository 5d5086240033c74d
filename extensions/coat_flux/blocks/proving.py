"""Proves the kernels that a run launches, before its first step, and keeps the verdicts for the next start.

When a block of a new class is about to run on a GPU, it first runs by references: that records its operators' calls and
gives its gradients. Each kernel is then compared with its reference on those calls, in another process
(`coat_core.ops.proof`), and last the block's gradients by kernels with those by references. What is wrong runs as its
reference from then on. The optimizer's kernel is compared at its first call.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coat_core import ops
from coat_core.ops import dispatch
from coat_core.ops.proof import ADAMW, BUDGET_S, Call, prove, recorded_calls

from ..base.rng import kept_draws
from ..config.coat import COATConfig
from .fused.parts import written_gradients
from .measure import as_leaves, from_first_process, keep_results, kept_results, key_of, key_on

logger = logging.getLogger(__name__)

DEVICE = "cuda"  # where kernels run
# between outputs and gradients by kernels and by references, relative, in norms. A value that rounds to the other bf16
# neighbour may get the next FP8 code, an eighth or a quarter away: about 2 % in all
LARGEST_DIFFERENCE = 0.2

Run = Callable[..., Any]
_spent_s = 0.0  # of BUDGET_S, on all kernels of this run


def prove_block(block: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], config: COATConfig) -> None:
    """Prove the kernels that `run` launches for this block and its coming arguments, unless references run anyway."""
    if dispatch.watched_by is not None:
        return
    device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    key = key_on(device, {**_facts(), "block": key_of((*args, *kwargs.values()), [block], config)})
    once = functools.partial(_results, block, run, args, kwargs)

    def find() -> tuple[dict[str, str], bool]:
        try:
            with recorded_calls() as calls:
                expected = once()
            verdicts = _prove(calls, device)
            for operator, why in verdicts.items():
                if why:
                    dispatch.use_reference(operator, why)
            operators = dict.fromkeys(call.operator for call in calls)
            suspects = [each for each in operators if each not in dispatch.instead]
            for operator in _culprits(once, expected, suspects):
                verdicts[operator] = "the gradients of a block are wrong with it"
        except torch.OutOfMemoryError:
            logger.info("kernels of %s are not proved: out of memory", type(block).__name__)
            return {}, False
        logger.info("kernels of %s: %d of %d proved", type(block).__name__, len(verdicts), len(operators))
        return verdicts, len(verdicts) == len(operators)

    _adopt(key, find)


def prove_step() -> None:
    """Prove the optimizer's kernel at its next call; a run's proofs share `BUDGET_S` from here on."""
    global _spent_s
    _spent_s = 0.0

    def prove_call(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = args[0][0].device
        if device.type != DEVICE:
            return
        call = Call.of(operator, args, kwargs)
        key = key_on(device, {**_facts(), "call": call.signature()})

        def find() -> tuple[dict[str, str], bool]:
            verdicts = _prove([call], device)
            return verdicts, bool(verdicts)

        _adopt(key, find)

    dispatch.show_first_call(ADAMW, prove_call)


def _prove(calls: Sequence[Call], device: torch.device) -> dict[str, str]:
    """`prove` in the time that the run's start has left."""
    global _spent_s
    started = time.monotonic()
    verdicts = prove(calls, device, budget_s=BUDGET_S - _spent_s)
    _spent_s += time.monotonic() - started
    return verdicts


def _adopt(key: str, find: Callable[[], tuple[dict[str, str], bool]]) -> None:
    """Use references as the verdicts of an earlier start have it, or those that `find` returns; kept if complete."""

    def verdicts() -> Mapping[str, str]:
        kept = kept_results().get(key)
        if kept is None:
            torch.cuda.empty_cache()  # the other process needs memory
            kept, complete = find()
            torch.cuda.empty_cache()
            if complete:
                keep_results(key, kept)
        return kept

    for operator, why in from_first_process(verdicts).items():
        if why:
            dispatch.use_reference(operator, why)


@functools.cache
def _facts() -> dict[str, Any]:
    """What a verdict depends on besides device, triton, torch and our version."""
    driver = torch._C._cuda_getDriverVersion() if torch.cuda.is_available() else None
    sources = hashlib.sha256()
    for file in sorted(Path(ops.__path__[0]).glob("*.py")):
        sources.update(file.read_bytes())
    return {"driver": driver, "sources": sources.hexdigest()}


def _culprits(once: Callable[[], list[Tensor]], expected: list[Tensor], operators: list[str]) -> list[str]:
    """The operator whose reference alone makes the block right again; all where none does."""
    if _difference(once(), expected) <= LARGEST_DIFFERENCE:
        return []
    for operator in operators:
        dispatch.instead[operator] = dispatch.launchers[operator]._init_fn
        try:
            if _difference(once(), expected) <= LARGEST_DIFFERENCE:
                return [operator]
        finally:
            del dispatch.instead[operator]
    return operators


def _difference(results: list[Tensor], expected: list[Tensor]) -> float:
    worst = 0.0
    for x, own in zip(results, expected, strict=True):
        size = float(own.norm()) or torch.finfo(torch.float32).tiny
        worst = max(worst, float((x - own).norm().nan_to_num(torch.inf)) / size)
    return worst


def _results(block: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Outputs, and the gradients of inputs and adapters, in fp32."""
    (args, kwargs), wanted = as_leaves(block, (args, kwargs))
    with kept_draws(), torch.enable_grad(), written_gradients(False):
        outputs = [x for x in tree_leaves(run(*args, **kwargs)) if isinstance(x, Tensor)]
        draw = torch.Generator(outputs[0].device).manual_seed(0)
        grads = [torch.randn(x.shape, generator=draw, device=x.device).to(x.dtype) for x in outputs]
        gradients = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [x.detach().to(torch.float32) for x in (*outputs, *gradients) if x is not None]
