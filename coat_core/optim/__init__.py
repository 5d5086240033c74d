"""Optimizers whose states are stored in FP8."""

from coat_core.optim.fp8_adamw import FP8AdamW

__all__ = ["FP8AdamW"]
