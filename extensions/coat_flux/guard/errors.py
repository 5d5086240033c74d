"""The error that ends a dead run."""

from __future__ import annotations

from ..errors import UserError

__all__ = ["DeadRunError"]


class DeadRunError(UserError, RuntimeError):
    """A run that further steps cannot mend; the message says at which step, what was seen, why, and what to change."""
