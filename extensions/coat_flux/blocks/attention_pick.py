"""The attention kernel of a run: each candidate is timed at the shape of the first batch.

A kernel that fails or disagrees with plain matrix products (`AttentionTrial`) is rejected. Times are cached across
runs like those of `measure`, so that equal jobs use the same kernel. Without a GPU torch chooses.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coat_core.ops.attention import GPU_KERNELS, TAKES_MASK, chosen_kernel, use_kernel
from coat_core.ops.attention_trial import AttentionTrial

from .measure import from_first_process, key_on, read_times, timed, version_of, write_times

if TYPE_CHECKING:
    from ..config.coat import COATConfig

logger = logging.getLogger(__name__)

DEVICE = "cuda"  # where there is something to choose
REPEATS = 7
TIE = 1.03  # torch's choice is taken where another is not faster by more than this
PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")


@dataclass(frozen=True)
class PickedAttention:
    """The attention kernel of the run, and why; milliseconds per block and kernel, if measured."""

    kernel: str  # as `coat_core.ops.attention` names it
    why: str = "torch's choice"  # in words
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # kernel → why it cannot be used here

    @property
    def row(self) -> tuple[str, str]:
        """Kernel and reason for the start table, without numbers, which differ from run to run."""
        return self.kernel, "the fastest of those that were measured" if self.milliseconds else self.why

    def describe(self) -> str:
        """One line for the log."""
        own = f" {self.milliseconds[self.kernel]:.2f} ms" if self.kernel in self.milliseconds else ""
        others = [f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items() if name != self.kernel]
        others += [f"{name}: {reason}" for name, reason in self.refused.items()]
        return f"attention: {self.kernel}{own} ({'; '.join([self.why, *others])})"


class AttentionPick:
    """Chooses once, at the first training pass."""

    def __init__(self, config: COATConfig) -> None:
        self._forced = None if config.speed.attention == "auto" else config.speed.attention
        self._measures = config.speed.measure != "never"
        self._kept: str | None = None
        self.kernel: str | None = None

    def keep(self, kernel: str) -> None:
        """Take the kernel of the run being resumed, if it can be used: another one rounds otherwise."""
        self._kept = kernel

    def choose(self, like: Tensor, mask: Tensor | None = None) -> PickedAttention:
        """Pick a kernel for q [B, H, S, d] and a mask; RuntimeError if the configured one cannot be used."""
        use_kernel(None)
        own = chosen_kernel(like, like, like, mask)
        if mask is not None and self._forced not in (None, *TAKES_MASK):
            raise _cannot(self._forced, "takes no mask, which this model hands to attention")
        if mask is not None and self._forced is None:
            picked = PickedAttention(own, "torch's choice of those that take this model's mask")
        elif like.device.type == DEVICE:
            picked = self._chosen(like, own)
            self.kernel = picked.kernel
            if self._kept not in (None, picked.kernel):
                changed = f"{self._kept} -> {picked.kernel}", picked.refused.get(self._kept or "", picked.why)
                logger.warning("resume: attention kernel %s (%s); results differ from here on by rounding", *changed)
        elif self._forced is not None:
            raise _cannot(self._forced, f"needs a GPU, this is a {like.device.type}")
        else:
            picked = PickedAttention(own)
        use_kernel(None if picked.why.startswith("torch's choice") else picked.kernel, like)
        logger.info(picked.describe())
        return picked

    def _chosen(self, like: Tensor, own: str) -> PickedAttention:
        wanted, refused = self._forced or self._kept, {}
        if wanted is not None:
            reason = AttentionTrial(like).obstacle(wanted)
            if reason is None:
                why = "as configured: speed.attention" if self._forced else "that of the resumed run"
                return PickedAttention(wanted, why)
            if self._forced:
                raise _cannot(wanted, reason)
            refused = {wanted: reason}
        if not self._measures:
            return PickedAttention(own, refused=refused)
        return from_first_process(lambda: _measured(like, own, refused))


def _cannot(kernel: str, reason: str) -> RuntimeError:
    return RuntimeError(f"coat.speed.attention={kernel!r}: {reason}; set it to auto, or to a kernel that runs here")


def _fastest(times: Mapping[str, float], own: str) -> str:
    best = min(times, key=lambda kernel: times[kernel])
    return own if own in times and times[own] <= TIE * times[best] else best


def _measured(like: Tensor, own: str, refused: Mapping[str, str]) -> PickedAttention:
    facts = {
        "attention": [list(like.shape), str(like.dtype)],
        "cudnn": torch.backends.cudnn.version(),
        "packages": [version_of(package) for package in PACKAGES],
    }
    key, trial, refused = key_on(like.device, facts), AttentionTrial(like), dict(refused)
    times = read_times(key)
    if times and trial.obstacle(_fastest(times, own)) is None:
        return PickedAttention(_fastest(times, own), "measured earlier on this GPU, this shape", times, refused)
    times = {}
    for kernel in dict.fromkeys((own, *GPU_KERNELS)):
        reason = trial.obstacle(kernel)
        if reason is None:
            times[kernel] = statistics.median(timed(trial.run, like.device) for _ in range(REPEATS))
        else:
            refused[kernel] = reason
    if not times:
        return PickedAttention(own, "torch's choice: no kernel passed the trial", {}, refused)
    write_times(key, times)
    return PickedAttention(_fastest(times, own), f"fastest at {like.shape[2]} tokens", times, refused)
