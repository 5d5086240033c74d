"""Which path a run takes where several are correct: measured on its own blocks, shapes and GPU."""

from .pick import Path, Picked, SpeedPick

__all__ = ["Path", "Picked", "SpeedPick"]
