"""What a comparison can be refused for."""

from __future__ import annotations

from ..base.errors import UserError

__all__ = ["VerifyError"]


class VerifyError(UserError, RuntimeError):
    """Runs cannot be compared as asked, or a folder holds those of another comparison."""
