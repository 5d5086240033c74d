"""Checkpoints of a run, for both trainers: whole or not at all, resumed only by the same run, bit for bit."""
