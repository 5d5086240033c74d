"""The dead-run guard of both hosts: ends a run that has died, and says why and what to change.

run_guard.py   loss, gradient norm, parameters; when to look at what
divergence.py  loss and weights far beyond what they were
casts.py       observes what casts to FP8 lose during a step
health.py      the table of it, and the remedies
"""

from .divergence import WINDOW
from .errors import DeadRunError
from .health import CastHealth
from .run_guard import RunGuard

__all__ = ["WINDOW", "CastHealth", "DeadRunError", "RunGuard"]
