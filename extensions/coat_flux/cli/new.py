"""First steps: `coat-flux new`, a ready YAML; `examples`, files to try; `install`, into an ai-toolkit checkout."""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from ..config.job_file import shipped_folder
from .common import UsageError, add_command, writing


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    new = add_command(commands, "new", run, "write a YAML for your photos and card")
    new.add_argument("dir", nargs="?", type=Path, metavar="DIR_OF_PHOTOS", help="without it: a YAML to fill in")
    new.add_argument("--gpu", metavar="CARD", help="by GB or name, as 24 or 4090 (default: the GPU of this machine)")
    new.add_argument("--trigger", metavar="WORD", help="the word for what is trained (default: made from the name)")
    new.add_argument("-n", "--name", help="of the run (default: the folder's name)")
    new.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.yaml here; a file is never overwritten")
    examples = add_command(commands, "examples", copy_examples, "copy configs and example photos here")
    examples.add_argument("dir", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: this folder")
    install = add_command(commands, "install", link, "link into an ai-toolkit checkout")
    install.add_argument("dir", metavar="AI_TOOLKIT_DIR", help="the folder with ai-toolkit's run.py")
    install.add_argument("--undo", action="store_true", help="remove what install made")


def run(args: argparse.Namespace) -> None:
    """Write a YAML for a folder of photos and a card, from the ready-made config that fits, a comment at each line.

    Resolutions follow the photos' sizes and steps their number. Nothing is downloaded.
    """
    name = args.name
    if not name and args.dir:
        name = re.sub(r"[^\w-]+", "_", args.dir.resolve().name).strip("_")
    name = name or "my_lora"
    out = args.out or Path(f"{name}.yaml")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: is there already and is left as it is; write --out with another file, or --name")
    from ..plan.speed import Card, find_card
    from ..plan.starter import PLACEHOLDER, Photos, made_up_word, make_starter

    if args.gpu is not None:
        card = find_card(args.gpu)
    else:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--gpu: there is no CUDA GPU here to go by; name the card to train on, as --gpu 24")
        properties = torch.cuda.get_device_properties(0)
        card = Card(round(properties.total_memory / 1e9, 1), properties.name)
    photos = Photos(args.dir) if args.dir else None
    trigger = args.trigger or made_up_word(name)
    text, origin, verdict = make_starter(photos, card, name, trigger, out.as_posix())
    with writing(f"--out {out}"), out.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
    print(f"wrote {out}, from {origin}; trigger word: {trigger}")
    peak = verdict.prediction.peak / 1e9
    room = verdict.card.room / 1e9
    card_name = f"{verdict.card.gb:g} GB card"
    if verdict.fits:
        print(f"It needs {peak:.1f} GB of the {room:.1f} GB that a {card_name} has for it")
    else:
        needs = f"this one comes nearest and needs {peak:.1f} of {room:.1f} GB"
        print(f"warning: no ready-made config fits a {card_name}: {needs}")
        changes = "; ".join(change.text for change in verdict.changes)
        print(f"It would fit with: {changes}" if changes else "and no change of it fits either; train on a larger card")
    if photos is None:
        print(f"Put your photos' folder in place of {PLACEHOLDER}, then:")
    else:
        print(f"{len(photos.sides)} photos; next:")
    for command in ("check", "train"):
        print(f"  coat-flux {command} {shlex.quote(str(out))}")


def copy_examples(args: argparse.Namespace) -> None:
    """Copy the ready-made configs and the example photos into DIR, to train on and to edit.

    An installation from a wheel has no checkout to run `configs/flux_clothing_tiny.yaml` in; here it is. A file that is
    already there is left as it is.
    """
    copied = []

    def copy(source: str, target: str) -> None:
        if not os.path.exists(target):
            copied.append(shutil.copyfile(source, target))
        elif not filecmp.cmp(source, target, shallow=False):
            print(f"{target}: left as it is, it differs from {source}")

    for name in ("configs", "datasets_example"):
        origin, target = shipped_folder(name), args.dir / name
        if origin is None:
            raise UsageError(f"{name}: not part of this installation; install coat-flux from a wheel or a checkout")
        caches = shutil.ignore_patterns(".*", "_*")
        with writing(str(target)):
            shutil.copytree(origin, target, ignore=caches, copy_function=copy, dirs_exist_ok=True)
        print(f"{target}: {len(copied)} files copied")
        copied.clear()


def link(args: argparse.Namespace) -> None:
    """Link extension, configs and example images into an ai-toolkit checkout."""
    from ..trainers.ai_toolkit.install import install

    print("\n".join(install(args.dir, undo=args.undo)))
