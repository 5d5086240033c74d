"""What is known of FLUX: which layers become FP8, and the function that makes them so."""

from .apply import apply_coat
from .report import CoatReport

__all__ = ["CoatReport", "apply_coat"]
