"""The error that ends a dead run."""

from __future__ import annotations

from ..base.errors import UserError

__all__ = ["DeadRunError"]


class DeadRunError(UserError, RuntimeError):
    """A run that further steps cannot mend; the message says at which step, what was seen, why, and what to change.

    Attributes:
        since: the first step that is in doubt, where the run diverged; None where going back would not help.
    """

    def __init__(self, message: str, since: int | None = None):
        super().__init__(message)
        self.since = since
