"""The fused FP8 flow: one autograd function per block, which saves in FP8 only what cannot be recomputed."""
