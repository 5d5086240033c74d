"""Exponential moving average of the trained parameters.

shadow ← decay · shadow + (1 - decay) · parameter, after every optimizer step. The raw parameters go on training; the
average is what is saved and sampled, as in ai-toolkit. Unlike there, both are kept for a resume. Of sharded parameters
each process averages its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from coat_core.optim.sharded import local_values

from ...saves.state import restore_tensors

__all__ = ["LoraEMA"]


class LoraEMA:
    """Moving average over named parameters.

    Args:
        params: name → parameter; the dictionary fixes the names of the state.
        decay: weight of the old average, 0 to 1.
        use_feedback: move each parameter by 10 · (1 - decay) · (shadow - parameter) after the update.
        param_multiplier: multiply each parameter by this after the update.

    Raises:
        ValueError: `decay` outside [0, 1].
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        decay: float = 0.999,
        *,
        use_feedback: bool = False,
        param_multiplier: float = 1.0,
    ):
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"train.ema_config.ema_decay={decay}: must be from 0 to 1")
        self.decay = decay
        self.use_feedback = use_feedback
        self.param_multiplier = param_multiplier
        self.shadow = {name: param.detach().float().clone() for name, param in params.items()}
        self._params = {name: local_values(param.detach()) for name, param in params.items()}
        self._averages = {name: local_values(average) for name, average in self.shadow.items()}

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Take the parameters into the average; call once after each optimizer step.

        Args:
            found_inf: fp32 [] on the parameters' device, 1 where the step was skipped there: nothing changes then.
        """
        params, shadows = list(self._params.values()), list(self._averages.values())
        deltas = torch._foreach_sub(shadows, [param.float() for param in params])
        torch._foreach_mul_(deltas, 1.0 - self.decay)
        multiplier: float | Tensor = self.param_multiplier
        if found_inf is not None:
            torch._foreach_mul_(deltas, 1 - found_inf)
            multiplier = torch.where(found_inf > 0, 1.0, self.param_multiplier)
        torch._foreach_sub_(shadows, deltas)
        if self.use_feedback:
            torch._foreach_add_(
                params, [delta.to(p.dtype) for delta, p in zip(deltas, params, strict=True)], alpha=10.0
            )
        if self.param_multiplier != 1.0:
            torch._foreach_mul_(params, multiplier)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the parameters for a `with` block; the raw values come back bit for bit."""
        raw = {name: param.clone() for name, param in self._params.items()}
        self._copy(self._averages)
        try:
            yield
        finally:
            self._copy(raw)

    def load(self, shadow: Mapping[str, Tensor]) -> None:
        """Replace the average by saved values.

        Raises:
            ResumeError: names or shapes differ from the parameters'.
        """
        restore_tensors(self.shadow, shadow, "saved EMA")

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.copy_(values[name])
