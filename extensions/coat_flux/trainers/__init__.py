"""The two trainers, and what they share."""
