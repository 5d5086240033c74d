"""`python -m coat_flux.cli`, for `accelerate launch -m coat_flux.cli train CONFIG`."""

import sys

from .entry import main

if __name__ == "__main__":
    sys.exit(main())
