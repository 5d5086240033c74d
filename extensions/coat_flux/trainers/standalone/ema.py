"""Exponential moving average of the trained parameters: shadow ← decay · shadow + (1 - decay) · parameter.

As in ai-toolkit, training continues on the raw parameters, and the average is saved and sampled; a resume has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from coat_core.optim.sharded import local_values

__all__ = ["LoraEMA"]


class LoraEMA:
    """Moving average over named parameters; `shadow` has it by name, in fp32. ValueError if `decay` is outside [0, 1].

    After an update, `use_feedback` moves each parameter by 10 · (1 - decay) · (shadow - parameter), and
    `param_multiplier` multiplies it.
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
        self.decay, self.use_feedback, self.param_multiplier = decay, use_feedback, param_multiplier
        self.shadow = {name: param.detach().float().clone() for name, param in params.items()}
        self._params = [local_values(param.detach()) for param in params.values()]
        self._averages = [local_values(average) for average in self.shadow.values()]

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Update the average after an optimizer step, unless `found_inf`, fp32 [] on the device, is 1."""
        deltas = torch._foreach_sub(self._averages, [param.float() for param in self._params])
        torch._foreach_mul_(deltas, 1.0 - self.decay)
        multiplier: float | Tensor = self.param_multiplier
        if found_inf is not None:
            torch._foreach_mul_(deltas, 1 - found_inf)
            multiplier = torch.where(found_inf > 0, 1.0, self.param_multiplier)
        torch._foreach_sub_(self._averages, deltas)
        if self.use_feedback:
            moves = [delta.to(param.dtype) for delta, param in zip(deltas, self._params, strict=True)]
            torch._foreach_add_(self._params, moves, alpha=10.0)
        if self.param_multiplier != 1.0:
            torch._foreach_mul_(self._params, multiplier)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the parameters for a `with` block; the raw values are restored bit for bit."""
        raw = [param.clone() for param in self._params]
        self._copy(self._averages)
        try:
            yield
        finally:
            self._copy(raw)

    @torch.no_grad()
    def _copy(self, values: Iterable[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)
