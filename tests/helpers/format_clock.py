"""A made-up clock for `weight.format: auto`."""

from collections.abc import Callable

import pytest
import torch

from coat_flux.blocks import formats

MS = {"e4m3": 2.0, "int8": 1.0}


class FormatClock:
    """Linears that take a table's milliseconds; `timed` are the formats that were timed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
        self.ms: dict[str, float] = MS | ms
        self.timed: list[str] = []
        monkeypatch.setattr(formats, "_linear", lambda device, linear, sizes: lambda: linear.weight_format)
        monkeypatch.setattr(formats, "timed", self)

    def __call__(self, once: Callable[[], str], device: torch.device) -> float:
        self.timed.append(once())
        return self.ms[once()]
