"""The guard's limits, which no config sets, for a test that cannot wait for them."""

from dataclasses import fields
from typing import Any

import pytest

from coat_flux.config.coat import GuardOptions


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let every `GuardOptions` made from here on have these limits."""
    own = (getattr(GuardOptions, field.name) for field in fields(GuardOptions))
    values = tuple(limits.get(field.name, value) for field, value in zip(fields(GuardOptions), own, strict=True))
    monkeypatch.setattr(GuardOptions.__init__, "__defaults__", values)
