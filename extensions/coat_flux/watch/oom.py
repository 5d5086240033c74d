"""Out of memory: what happened, what holds the memory, what to change, and one more try with more recomputation.

`explain_oom` reads counters and calls the plan; it allocates nothing on a GPU, and reports what it cannot find out
instead of raising. It is called while the error is being handled: once its traceback is gone, so are the activations.
"""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn

from ..base.errors import UserError
from ..base.text import MB, columns, size_text
from ..blocks.runner import BlockRunner
from .memory_stats import GB, used_bytes

if TYPE_CHECKING:
    from ..config.job import JobConfig
    from ..plan.job import JobFacts
    from ..plan.predict import Prediction
    from .phases import PhaseTracker

__all__ = ["OutOfMemory", "explain_oom", "is_oom", "recompute_more"]

CPU_MESSAGES = ("defaultcpuallocator", "can't allocate memory", "not enough memory", "os error 1455")
MESSAGES = ("out of memory", "alloc_failed", *CPU_MESSAGES)  # cuBLAS's status; Windows' small paging file
CUDA_CONTEXT = 0.6e9  # of a process, outside of torch's allocator
WORTH_A_LINE = 0.02  # of the device's memory: gaps and other processes below it are not the cause
GAPS = {
    "win32": "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512",  # expandable segments are not made on Windows
    "linux": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
}


class OutOfMemory(UserError, RuntimeError):
    """Out of memory; the message is `explain_oom`'s, and needs no traceback."""


def is_oom(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a lack of memory: torch's on any device, cuBLAS's, Python's own.

    False for `OutOfMemory`, which has been explained.
    """
    if error is None or isinstance(error, OutOfMemory):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    named = isinstance(error, RuntimeError | OSError) and any(message in str(error).lower() for message in MESSAGES)
    return named or is_oom(error.__cause__)


def recompute_more(transformer: nn.Module) -> str | None:
    """Let the next step need less memory than the one that failed, where `memory.checkpointing` is auto.

    Transposed copies of the weights go first, then every block recomputes: either may be worth another try. To be
    called outside of the `except` clause, when nothing refers to the failed step any more.

    Args:
        transformer: as `apply_coat` left it, with or without adapters, wrappers and compilation.

    Returns:
        What changed, in one line; None where nothing is left to be changed, or the config does not allow it.

    Numerics: a step's result does not depend on the copies. A recomputed block has the same forward pass, but its
    gradients are those of its input after a round trip through FP8, or of the exact one where
    `memory.enable_efficient_checkpoint` is false; a kept block's are those of packed tensors.
    """
    runner = BlockRunner.of(transformer)
    line = None if runner is None else runner.recompute_more()
    if line is not None:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return line


def explain_oom(error: BaseException, phases: PhaseTracker, job: Callable[[], JobConfig] | None) -> str:
    """What ran out of memory, what holds it, and what to change, the cheapest first.

    Args:
        error: for which `is_oom` holds.
        phases: of the run, which know its device and the phase under way.
        job: makes the job of the run (its error is reported); None leaves the plan and the remedies out.

    Returns:
        Several lines. Never raises.
    """
    found = _Explanation(error, phases, job)
    sections = (found.head, found.plan, found.held, found.gaps, found.others, found.remedies)
    lines: list[str] = []
    for section in (found.head, found.cpu_memory) if found.lacks_cpu_memory else sections:
        try:
            lines += section()
        except Exception as problem:  # an explanation must not replace the error that it explains
            reason = next(iter(str(problem).splitlines()), "no message")
            lines.append(f"({section.__name__}: not known, {type(problem).__name__}: {reason})")
    return "\n".join(lines)


class _Explanation:
    """The explanation's sections; each gives its lines, none where there is nothing to report."""

    def __init__(self, error: BaseException, phases: PhaseTracker, job: Callable[[], JobConfig] | None) -> None:
        self._error, self._phases, self._job, self._device = error, phases, job, phases.device
        self._phase = phases.under_way or "step"
        self._where = "this card" if self._device.type == "cuda" else "this machine"
        self._facts: JobFacts | None = None

    def head(self) -> list[str]:
        """The phase, and the error's first line."""
        message = next(iter(str(self._error).splitlines()), type(self._error).__name__)
        moment = f" ({self._phases.moment})" if self._phase == "step" and self._phases.moment else ""
        return [f"Out of memory in the phase {self._phase}{moment}: {message}"]

    @property
    def lacks_cpu_memory(self) -> bool:
        """Whether the CPU's memory ran out while the run is on a GPU."""
        named = any(message in str(self._error).lower() for message in CPU_MESSAGES)
        return self._device.type != "cpu" and (named or isinstance(self._error, MemoryError | OSError))

    def cpu_memory(self) -> list[str]:
        """All that is known where it was the CPU's memory."""
        memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
        lines = [
            f"CPU memory: this process has {_size(own)}, free {_size(memory.available)} of {_size(memory.total)}",
            "close other programs, or enlarge the page file or swap: loading needs it for a moment only",
        ]
        if self._job is not None:
            lines.insert(0, f"plan: {_size(self._prediction().ram_bytes)} of CPU memory")
            if any(entry.cache_latents for entry in self._job_facts().job.datasets):
                lines.append("write datasets: cache_latents_to_disk: true in place of cache_latents")
        return lines

    def plan(self) -> list[str]:
        """The prediction of `coat-flux plan` for the phase."""
        if self._job is None:
            return []
        prediction = self._prediction()
        found = prediction.phase(self._phase)
        blocks = f"{len(prediction.recomputed)} of {prediction.blocks} blocks recompute"
        if found is None:
            return [f"plan: no figure for this phase; for the run's peak {_size(prediction.peak)} ({blocks})"]
        parts = _listed(found.parts)
        total = f"{_size(found.total)} on {self._where} of {_size(self._total())} ({blocks})"
        return [f"plan for this phase: {total}: {parts}"]

    def held(self) -> list[str]:
        """The parts that are there now, and what the allocator says."""
        parts = self._phases.held()
        allocated, reserved = used_bytes(self._device)
        rest = allocated - self._phases.baseline - sum(parts.values())
        parts = {**parts, "activations and workspace": max(0, rest)}
        totals = f"allocated {_size(allocated)}, reserved {_size(reserved)}, free {_size(self._free())}"
        return [f"held now: {_listed(parts)}", f"{self._device}: {totals} of {_size(self._total())}"]

    def gaps(self) -> list[str]:
        """Memory that torch holds and cannot use for a larger tensor."""
        allocated, reserved = used_bytes(self._device)
        gap = reserved - allocated
        if self._device.type != "cuda" or gap < WORTH_A_LINE * self._total():
            return []
        setting = GAPS.get(sys.platform, GAPS["linux"])
        return [f"fragmentation: {_megabytes(gap)} are reserved and in no tensor; start the run with {setting}"]

    def others(self) -> list[str]:
        """What other processes have of the device."""
        allocated, reserved = used_bytes(self._device)
        ours = reserved + CUDA_CONTEXT if self._device.type == "cuda" else allocated
        taken = max(0.0, self._total() - self._free() - ours)
        if taken < WORTH_A_LINE * self._total():
            return []
        left = (self._total() - taken) / GB
        list_them = "nvidia-smi lists them" if self._device.type == "cuda" else "the system's task list shows them"
        return [
            f"other processes hold {_megabytes(taken)} of {self._where}: end them ({list_them}), or let "
            f"coat.memory.budget_gb be below the {left:.1f} GB that are left"
        ]

    def remedies(self) -> list[str]:
        """Changes of the YAML with what each alone frees in the phase."""
        if self._job is None:
            return []
        from ..plan.remedies import remedies

        found = remedies(self._job_facts(), self._phase, self._total(), self._recomputed())
        if not found:
            return ["no change of the YAML frees memory in this phase; a card with more memory is needed"]
        changes = [(item.change, _megabytes(item.bytes)) for item in found]
        rows = [(f"  {change.text}", f"frees {freed}", f"costs {change.cost}") for change, freed in changes]
        lines = columns(rows, left=range(3))
        return ["change one of these, the cheapest first (coat-flux plan shows the whole picture):", *lines]

    def _job_facts(self) -> JobFacts:
        """The job as it really runs: on this device, without the copies that this run does not keep."""
        if self._facts is None:
            from ..plan.job import job_facts

            job = replace(self._job(), device=str(self._device))
            runner = self._runner()
            if runner is not None and not runner.plan.copies:
                memory = replace(job.coat.memory, transposed_weights="never")
                job = replace(job, coat=replace(job.coat, memory=memory))
            self._facts = job_facts(job)
        return self._facts

    def _runner(self) -> BlockRunner | None:
        return next(filter(None, map(BlockRunner.of, self._phases.owners("transformer"))), None)

    def _recomputed(self) -> list[int] | None:
        """Indices of the blocks that recompute in this run; None where that is not known yet."""
        runner = self._runner()
        return None if runner is None else runner.plan.recomputed

    def _prediction(self) -> Prediction:
        from ..plan.predict import predict_facts

        return predict_facts(self._job_facts(), self._total(), self._recomputed())

    def _total(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.mem_get_info(self._device)[1])
        return float(psutil.virtual_memory().total)

    def _free(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.mem_get_info(self._device)[0])
        return float(psutil.virtual_memory().available)


def _listed(parts: dict[str, int]) -> str:
    """Parts by size, the largest first; those of no bytes are left out."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {_size(size)}" for part, size in ordered if size)


def _size(size: float) -> str:
    return size_text(size, digits=2, smallest="MB")


def _megabytes(size: float) -> str:
    return f"{size / MB:,.0f} MB" if size >= 10 * MB else f"{size / MB:.2f} MB"
