"""Out of memory: what happened, what holds the memory, what to change, and one more try with more recomputation.

`explain_oom` allocates nothing on a GPU, and reports what it cannot find out instead of raising. It runs while the
error is being handled: once its traceback is gone, so are the activations.
"""

from __future__ import annotations

import errno
import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch
from torch import nn

from ..base.errors import UserError
from ..base.text import GB, MB, columns, size_text
from ..blocks.held import used_bytes
from ..blocks.runner import BlockRunner
from ..config.job import JobConfig
from ..plan.cards import remedies
from ..plan.job import JobFacts
from ..plan.predict import predict
from .phases import PhaseTracker

CPU_MESSAGES = ("defaultcpuallocator", "can't allocate memory", "not enough memory", "os error 1455")
MESSAGES = ("out of memory", "alloc_failed", *CPU_MESSAGES)  # cuBLAS's status; Windows' small paging file
CUDA_CONTEXT = 0.6e9  # of a process, outside of torch's allocator
WORTH_A_LINE = 0.02  # share of the device's memory below which gaps and other processes are not the cause
GAPS = {"win32": "max_split_size_mb:512"}  # which has no expandable segments


class OutOfMemory(UserError, RuntimeError):
    """Out of memory; the message is `explain_oom`'s, and needs no traceback."""


def is_oom(error: BaseException | None) -> bool:
    """Whether an error or its cause is a lack of memory (torch, cuBLAS, Python); False for `OutOfMemory`."""
    if error is None or isinstance(error, OutOfMemory):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_named = isinstance(error, RuntimeError | OSError) and any(text in str(error).lower() for text in MESSAGES)
    return is_named or is_oom(error.__cause__)


def recompute_more(transformer: nn.Module) -> str | None:
    """Let the next step need less memory under `checkpointing: auto`; a line, or None if it cannot.

    Transposed copies of the weights go first, then every block recomputes. Call it outside the `except` clause.
    """
    runner = BlockRunner.of(transformer)
    line = None if runner is None else runner.recompute_more()
    if line is not None:
        release_memory()
    return line


def release_memory() -> None:
    """Give the memory of freed tensors back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def explain_oom(error: BaseException, phases: PhaseTracker, job: Callable[[], JobConfig]) -> str:
    """What ran out of memory, what holds it, remedies. Never raises."""
    phase = phases.under_way or "step"
    message = next(iter(str(error).splitlines()), type(error).__name__)
    moment = f" ({phases.moment})" if phase == "step" and phases.moment else ""
    lines = [f"Out of memory in the phase {phase}{moment}: {message}"]
    of_the_cpu = isinstance(error, MemoryError | OSError) or any(text in str(error).lower() for text in CPU_MESSAGES)
    explanation = _Explanation(phases, phase, job)
    sections = [explanation.plan, explanation.held, explanation.others, explanation.remedies]
    if phases.device.type != "cpu" and of_the_cpu:
        sections = [explanation.cpu_memory]
    for section in sections:
        try:
            lines += section()
        except Exception as problem:  # the explanation must not replace its error
            reason = next(iter(str(problem).splitlines()), "no message")
            lines.append(f"({section.__name__}: not known, {type(problem).__name__}: {reason})")
    return "\n".join(lines)


class _Explanation:
    """Each section returns its lines, none if there is nothing to report."""

    def __init__(self, phases: PhaseTracker, phase: str, job: Callable[[], JobConfig]) -> None:
        self._phases, self._phase, self._job = phases, phase, job
        self._device = phases.device
        self._where = "this card" if self._device.type == "cuda" else "this machine"
        transformers = phases.held.owners("transformer")
        self._runner = next(filter(None, map(BlockRunner.of, transformers)), None)
        self._recomputed = None if self._runner is None else self._runner.plan.recomputed

    @functools.cached_property
    def _room(self) -> tuple[float, float]:
        """(free, total) bytes of the device."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def cpu_memory(self) -> list[str]:
        """A CPU out of memory during a run on a GPU: all that is known."""
        memory, resident = psutil.virtual_memory(), psutil.Process().memory_info().rss
        needed = predict(self._facts, self._room[1], self._recomputed).ram_bytes
        free = f"{size_text(memory.available)} of {size_text(memory.total)}"
        lines = [
            f"plan: {size_text(needed)} of CPU memory",
            f"CPU memory: this process has {size_text(resident)}, free {free}",
            "close other programs, or enlarge the page file or swap: loading needs it for a moment only",
        ]
        if any(entry.cache_latents for entry in self._facts.job.datasets):
            lines.append("write datasets: cache_latents_to_disk: true in place of cache_latents")
        return lines

    def plan(self) -> list[str]:
        total = self._room[1]
        prediction = predict(self._facts, total, self._recomputed)
        parts = prediction.phases.get(self._phase)
        blocks = f"{len(prediction.recomputed)} of {len(prediction.plan.blocks)} blocks recompute"
        if parts is None:
            peak = size_text(prediction.peak)
            return [f"plan: no figure for this phase; for the run's peak {peak} ({blocks})"]
        share = f"{size_text(sum(parts.values()))} on {self._where} of {size_text(total)} ({blocks})"
        return [f"plan for this phase: {share}: {_listed(parts)}"]

    def held(self) -> list[str]:
        parts = self._phases.held.count()
        (allocated, reserved), (free, total) = used_bytes(self._device), self._room
        rest = allocated - self._phases.baseline - sum(parts.values())
        parts = {**parts, "activations and workspace": max(0, rest)}
        totals = f"allocated {size_text(allocated)}, reserved {size_text(reserved)}, free {size_text(free)}"
        lines = [f"held now: {_listed(parts)}", f"{self._device}: {totals} of {size_text(total)}"]
        gap = reserved - allocated
        if self._device.type == "cuda" and gap >= WORTH_A_LINE * total:
            words = f"fragmentation: {size_text(gap)} are reserved and in no tensor; start the run with"
            lines.append(f"{words} PYTORCH_CUDA_ALLOC_CONF={GAPS.get(sys.platform, 'expandable_segments:True')}")
        return lines

    def others(self) -> list[str]:
        (allocated, reserved), (free, total) = used_bytes(self._device), self._room
        ours = reserved + CUDA_CONTEXT if self._device.type == "cuda" else allocated
        others = max(0.0, total - free - ours)
        if others < WORTH_A_LINE * total:
            return []
        left = (total - others) / GB
        lister = "nvidia-smi lists them" if self._device.type == "cuda" else "the system's task list shows them"
        return [
            f"other processes hold {size_text(others)} of {self._where}: end them ({lister}), or set "
            f"coat.memory.budget_gb below the {left:.1f} GB that are left"
        ]

    def remedies(self) -> list[str]:
        items = remedies(self._facts, self._phase, self._room[1], self._recomputed)
        if not items:
            return ["no change of the YAML frees memory in this phase; a card with more memory is needed"]
        rows = [(f"  {change.text}", f"frees {size / MB:,.1f} MB", f"costs {change.cost}") for change, size in items]
        title = "change one of these, the cheapest first (coat-flux plan shows all):"
        return [title, *columns(rows, left=range(3))]

    @functools.cached_property
    def _facts(self) -> JobFacts:
        """The job on this device, without copies that this run does not keep."""
        job = replace(self._job(), device=str(self._device))
        if self._runner is not None and not self._runner.plan.transposed_bytes:
            memory = replace(job.coat.memory, transposed_weights="never")
            job = replace(job, coat=replace(job.coat, memory=memory))
        return JobFacts(job)


def _listed(parts: dict[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {size_text(size)}" for part, size in ordered if size)
