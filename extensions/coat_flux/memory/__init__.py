"""What a run holds in memory: recomputation, budgets, memory lines."""
