"""`python -m coat_flux.cli`, for `accelerate launch -m coat_flux.cli train CONFIG`; also `python …/coat_flux/cli`.

The latter is for who has linked the folder into ai-toolkit without installing it.
"""

import sys
from pathlib import Path

if __package__:
    from .entry import main
else:
    home = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(home), str(home.parent)]  # coat_flux, and coat_core where this is a checkout
    from coat_flux.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
