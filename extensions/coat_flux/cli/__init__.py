"""The `coat-flux` command."""

from .entry import main

__all__ = ["main"]
