"""Errors that the user can correct; the command line shows only their message, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Base of all errors whose message says what is wrong and what to change."""
