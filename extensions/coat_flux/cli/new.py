"""`coat-flux new`: a ready YAML for these photos and this card."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Refused

if TYPE_CHECKING:
    from ..plan.facts import Card
    from ..plan.starter import Starter


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    new = commands.add_parser("new", help="write a YAML for your photos and card", description=run.__doc__)
    new.add_argument("dir", nargs="?", type=Path, metavar="DIR_OF_PHOTOS", help="without it: a YAML to fill in")
    new.add_argument("--gpu", metavar="CARD", help="by GB or name, as 24 or 4090 (default: the GPU of this machine)")
    new.add_argument("--trigger", metavar="WORD", help="the word for what is trained (default: made from the name)")
    new.add_argument("-n", "--name", help="of the run (default: the folder's name)")
    new.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.yaml here; a file is never overwritten")
    new.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write a YAML for a folder of photos and a card, from the ready-made config that fits, a comment at each line.

    Resolutions follow the photos' sizes and steps their number. Nothing is downloaded.
    """
    name = args.name or (_name_of(args.dir) if args.dir else "my_lora")
    out = args.out or Path(f"{name}.yaml")
    if out.exists() or out.is_symlink():
        raise Refused(f"{out}: is there already and is left as it is; write --out with another file, or --name")
    from ..plan.facts import find_card
    from ..plan.starter import PLACEHOLDER, look_at, made_up_word, make_starter

    card = _own_card() if args.gpu is None else find_card(args.gpu)
    photos = look_at(args.dir) if args.dir else None
    made = make_starter(photos, card, name, args.trigger or made_up_word(name), out.as_posix())
    try:
        with out.open("x", encoding="utf-8", newline="\n") as file:
            file.write(made.text)
    except OSError as error:
        raise Refused(f"--out {out}: cannot be written: {error.strerror}; give another file") from error
    print(f"wrote {out}, from {made.origin}; trigger word: {made.trigger}")
    _say_fit(made)
    if photos is None:
        print(f"Put your photos' folder in place of {PLACEHOLDER}, then:")
    else:
        print(f"{len(photos.sides)} photos; next:")
    for command in ("check", "train"):
        print(f"  coat-flux {command} {shlex.quote(str(out))}")


def _name_of(folder: Path) -> str:
    return re.sub(r"[^\w-]+", "_", folder.resolve().name).strip("_") or "my_lora"


def _own_card() -> Card:
    import torch

    from ..plan.facts import Card

    if not torch.cuda.is_available():
        raise Refused("--gpu: there is no CUDA GPU here to go by; name the card to train on, as --gpu 24")
    properties = torch.cuda.get_device_properties(0)
    return Card(round(properties.total_memory / 1e9, 1), properties.name)


def _say_fit(made: Starter) -> None:
    verdict = made.verdict
    peak, room, card = verdict.prediction.peak / 1e9, verdict.room / 1e9, f"{verdict.card.gb:g} GB card"
    if verdict.fits:
        print(f"It needs {peak:.1f} GB of the {room:.1f} GB that a {card} has for it")
        return
    print(f"warning: no ready-made config fits a {card}: this one comes nearest and needs {peak:.1f} of {room:.1f} GB")
    if verdict.changes:
        print(f"It would fit with: {'; '.join(change.text for change in verdict.changes)}")
    else:
        print("and no change of it fits either; train on a larger card")
