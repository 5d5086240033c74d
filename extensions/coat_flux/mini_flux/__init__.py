"""Embedded models: a mini-FLUX that draws clothes, a tiny one and FLUX.1-dev's geometry with random weights.

They exist so that everything in this project can be run, tested and measured without downloading a model:

* `make_mini_flux` copies the shipped mini-FLUX (`files/`, 9 MB, trained by `scripts/pretrain_mini_flux.py`);
* `make_tiny_flux` writes a folder with random weights (about 2 MB): quicker, for what does not need to draw; any FLUX
  program loads either folder (diffusers layout, all seven parts, real classes) in place of FLUX.1-dev;
* `make_flux_dev_geometry` builds the 11.9 B parameter transformer directly on a device, for memory and speed
  measurements.
"""
