"""The embedded model: a tiny FLUX.1 made on the spot, and FLUX.1-dev's geometry with random weights.

Both exist so that everything in this project can be run, tested and measured without downloading a model:

* `make_tiny_flux` writes a complete diffusers folder (all seven parts, real classes, about 2 MB) that any FLUX program
  loads in place of `black-forest-labs/FLUX.1-dev`;
* `make_flux_dev_geometry` builds the 11.9 B parameter transformer directly on a device, for memory and speed
  measurements.
"""

from __future__ import annotations

from .folder import EMBEDDED_MODEL, MARKER_NAME, TINY_FLUX_VERSION, make_tiny_flux, provide_embedded
from .geometry import FLUX_DEV_TRANSFORMER_CONFIG, make_flux_dev_geometry

__all__ = [
    "EMBEDDED_MODEL",
    "FLUX_DEV_TRANSFORMER_CONFIG",
    "MARKER_NAME",
    "TINY_FLUX_VERSION",
    "make_flux_dev_geometry",
    "make_tiny_flux",
    "provide_embedded",
]
