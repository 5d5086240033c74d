"""Checkpoints of a run, for both trainers: whole or not at all, resumed only by the same run, bit for bit.

commit.py     a set of files that one rename commits; two sets are kept; the room on the disk
errors.py     SaveError, ResumeError, and what a disk can answer in words
identity.py   what makes a run this run: model, data, network, seed, processes, batch; what it was made with
interrupts.py Ctrl+C ends a run after its step, with a save
lock.py       one process at a time
repair.py     repairs what a killed process or a damaged disk left; goes back to an earlier state
rng.py        states of the random generators
state.py      what a save holds beyond the published LoRA, for both trainers
"""
