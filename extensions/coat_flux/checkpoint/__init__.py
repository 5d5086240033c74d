"""Checkpoints of a run, for both hosts: whole or not at all, taken up only by the same run, bit for bit.

repair.py     what a killed process or a damaged disk left is put right; going back to an earlier state
files.py      single files that a crash leaves old or new
commit.py     a set of files that one rename commits; two sets are kept
identity.py   what makes a run this run: model, data, network, seed, processes, batch
interrupts.py Ctrl+C ends a run after its step, with a save
live.py       what a run tells its watchers, and the commands they give
lock.py       one process at a time
path.py       GEMMs and compilation that were measured
rng.py        states of the random generators
"""

from .commit import commit, committed_sets, damage, newest_set, set_step, state_folder
from .errors import ResumeError, SaveError
from .identity import compare, require_same_run, run_identity
from .interrupts import Interrupts
from .lock import run_lock
from .repair import go_back, good_step, repair, step_of
from .rng import rng_state, set_rng_state

__all__ = [
    "Interrupts",
    "ResumeError",
    "SaveError",
    "commit",
    "committed_sets",
    "compare",
    "damage",
    "go_back",
    "good_step",
    "newest_set",
    "repair",
    "require_same_run",
    "rng_state",
    "run_identity",
    "run_lock",
    "set_rng_state",
    "set_step",
    "state_folder",
    "step_of",
]
