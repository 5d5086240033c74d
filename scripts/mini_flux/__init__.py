"""Trains the parts of the mini-FLUX on drawn pictures of clothes; see `scripts/pretrain_mini_flux.py`."""
