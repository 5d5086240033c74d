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
