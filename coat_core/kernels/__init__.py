"""Operators with one schema each: a CPU kernel that is the reference, and a GPU kernel behind the same name."""
