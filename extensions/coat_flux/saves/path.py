"""The path a run measured at its first step, and rounding depends on: kept for its resume, on whatever machine."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..blocks.decide import RunPath
from ..blocks.runner import BlockRunner

__all__ = ["keep_path", "path_of"]


def path_of(transformer: nn.Module) -> dict[str, str]:
    """GEMMs and compilation in force, plain JSON; empty before the first step, and without COAT."""
    policy = BlockRunner.of(transformer)
    return {} if policy is None or policy.picked is None else dict(policy.picked.path._asdict())


def keep_path(transformer: nn.Module, path: Mapping[str, str]) -> None:
    """Let the first step take a saved path instead of measuring, where the config still has it."""
    policy = BlockRunner.of(transformer)
    if policy is not None and "gemm" in path:
        policy.keep_to(RunPath(path["gemm"], path["compile"]))
