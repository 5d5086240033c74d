"""The one error the data package raises for something a user can put right in the dataset folder."""

from __future__ import annotations


class DatasetError(ValueError):
    """A problem with a dataset folder, image, caption or cache file; the message names it and says what to do."""
