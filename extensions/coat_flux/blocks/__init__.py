"""Everything about a transformer's blocks: FP8 linears, adapters, what is saved for backward and what is recomputed."""
