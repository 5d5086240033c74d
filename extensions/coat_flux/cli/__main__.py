"""`python -m coat_flux.cli`, for `accelerate launch -m coat_flux.cli train CONFIG`; also `python …/coat_flux/cli`."""

import sys
from pathlib import Path

if not __package__:
    home = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(home), str(home.parent)]  # coat_flux, and in a checkout coat_core
    __package__ = "coat_flux.cli"

from .entry import main

if __name__ == "__main__":
    sys.exit(main())
