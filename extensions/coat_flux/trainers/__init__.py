"""The two trainers and their shared parts."""
