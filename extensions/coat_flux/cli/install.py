"""`coat-flux install`: the extension in an ai-toolkit checkout."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    install = commands.add_parser("install", help="link into an ai-toolkit checkout", description=run.__doc__)
    install.add_argument("dir", metavar="AI_TOOLKIT_DIR", help="the folder with ai-toolkit's run.py")
    install.add_argument("--undo", action="store_true", help="remove what install made")
    install.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Link extension, configs and example images into an ai-toolkit checkout."""
    from ..trainers.ai_toolkit.install import install

    print("\n".join(install(args.dir, undo=args.undo)))
