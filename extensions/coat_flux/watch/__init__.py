"""What watches a step while it runs: phases, memory, precision of the casts, dead and diverged runs, out of memory."""
