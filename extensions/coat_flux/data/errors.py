"""The one error the data package raises for something a user can correct in the dataset folder."""

from __future__ import annotations

from ..base.errors import UserError


class DatasetError(UserError, ValueError):
    """A problem with a dataset folder, image, caption or cache file; the message names it and says what to do."""


def printable(name: object) -> str:
    """A path or text that any console, log and file can take.

    Control characters, marks that turn the direction of writing and bytes that are not text are escaped.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))
