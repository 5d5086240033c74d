"""The ways blocks can be executed: which GEMMs, and whether compiled or captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..config.coat import COATConfig

GEMMS = ("per_tensor", "per_row", "bf16")  # from coarse to exact
NOT_CAPTURED = "only the stand-alone trainer captures steps"


class ExecutionMode(NamedTuple):
    """One way to run the blocks: a GEMM of `GEMMS`, or the config's own where that is none of them; compile."""

    gemm: str
    compile: str

    def __str__(self) -> str:
        how = {"none": "eager", "blocks": "compiled blocks", "cudagraphs": "steps as CUDA graphs"}
        return f"{self.gemm} GEMM, {how[self.compile]}"


class Picked(NamedTuple):
    """What the first step picked, and why.

    Attributes:
        execution: what is taken.
        milliseconds: of all blocks, forward and backward, by candidate; empty where nothing was measured.
        why: in words.
    """

    execution: ExecutionMode
    milliseconds: dict[ExecutionMode, float]
    why: str

    def describe(self) -> str:
        """One line for the log."""
        others = ", ".join(f"{mode} {ms:.1f} ms" for mode, ms in self.milliseconds.items() if mode != self.execution)
        own = f" {self.milliseconds[self.execution]:.1f} ms" if self.execution in self.milliseconds else ""
        return f"execution: {self.execution}{own} ({self.why}{f'; {others}' if others else ''})"


def candidates(config: COATConfig, graph_obstacle: str = NOT_CAPTURED) -> list[ExecutionMode]:
    """Return the execution modes that are at least as precise as the config asks, what it asks for first.

    Args:
        config: the `coat:` block.
        graph_obstacle: why steps cannot be CUDA graphs; where it is empty, `auto` makes them so and compiles no block.
    """
    asked = config.activation.linear_granularity if config.activation.use_fp8 else "bf16"
    gemms: Iterable[str] = GEMMS[GEMMS.index(asked) :] if asked in GEMMS else (asked,)
    modes: tuple[str, ...] = (config.speed.compile,)
    if config.speed.compile == "auto":
        fused = config.activation.flow == "fused" and config.activation.use_fp8
        modes = ("cudagraphs",) if not graph_obstacle else ("none", "blocks") if fused else ("none",)
    return [ExecutionMode(gemm, mode) for mode in modes for gemm in gemms]
