"""Watches a run from the outside: what happens around backward, losses that died, adapters that died.

ai-toolkit turns a NaN loss into 0 and goes on, and saves whatever the adapters hold. A run must not end well with a
dead LoRA, so these end it with what to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LossWatch", "around_backward", "dead_adapters"]

DEAD_STEPS = 10
REMEDY = "lower train.lr, or set coat.activation.linear_granularity: per_row"


@contextmanager
def around_backward(accelerator: Any, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call `before` and `after` around each `accelerator.backward` inside the block.

    Patches the instance only for the block: ai-toolkit shares one accelerator between all jobs of a command.
    """
    backward = accelerator.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        before()
        backward(*args, **kwargs)
        after()

    accelerator.backward = watched
    try:
        yield
    finally:
        del accelerator.backward


class LossWatch:
    """Ends the run when the loss was 0 or not finite for `DEAD_STEPS` steps in a row."""

    def __init__(self) -> None:
        self._dead_steps = 0

    def see(self, loss: float, step: int) -> None:
        """Note the loss of a step.

        Raises:
            RuntimeError: too many dead steps in a row.
        """
        self._dead_steps = 0 if math.isfinite(loss) and loss != 0.0 else self._dead_steps + 1
        if self._dead_steps >= DEAD_STEPS:
            raise RuntimeError(
                f"step {step}: loss={loss} for {DEAD_STEPS} steps in a row (ai-toolkit turns NaN into 0); {REMEDY}"
            )


def dead_adapters(network: nn.Module, trained_steps: int) -> str | None:
    """Say why the adapters of `network` are not worth saving, or None.

    Args:
        network: the LoRA network, with `lora_up` and `lora_down` parameters.
        trained_steps: optimizer steps done in this run.
    """
    broken = [name for name, value in network.named_parameters() if not value.isfinite().all()]
    if broken:
        return f"{len(broken)} LoRA tensors are not finite ({broken[0]}); {REMEDY}"
    ups = [value for name, value in network.named_parameters() if "lora_up" in name]
    if trained_steps > 1 and ups and not any(value.any() for value in ups):
        return f"every lora_up is still zero after {trained_steps} steps: nothing was trained; check train.lr"
    return None
