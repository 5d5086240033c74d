"""Which path a run takes where several are correct: measured on its own blocks, shapes and GPU."""

from .pick import Picked, RunPath, SpeedPick, Unavailable

__all__ = ["Picked", "RunPath", "SpeedPick", "Unavailable"]
