"""First steps: `coat-flux new`, a ready YAML; `examples`, files to try; `install`, into an ai-toolkit checkout."""

from __future__ import annotations

import argparse
import filecmp
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..config.job_file import shipped_folder
from .common import UsageError, add_command, positive, print_findings, writing

if TYPE_CHECKING:
    from ..plan.cards import CardFit


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    new = add_command(commands, "new", run, "write a YAML for your photos and card")
    new.add_argument("dir", nargs="?", type=Path, metavar="DIR_OF_PHOTOS", help="without it: a YAML to fill in")
    new.add_argument("--gpu", metavar="CARD", help="GB or name, as 24 or 3090, or cpu (default: the GPU here)")
    new.add_argument("--ram", type=positive, metavar="GB", help="CPU memory (default: of this machine, any with --gpu)")
    new.add_argument("--trigger", metavar="WORD", help="the word for what is trained (default: made from the name)")
    new.add_argument("-n", "--name", help="of the run (default: the folder's name)")
    new.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.yaml here; a file is never overwritten")
    examples = add_command(commands, "examples", copy_examples, "copy configs and example photos here")
    examples.add_argument("dir", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: this folder")
    install = add_command(commands, "install", link, "link into an ai-toolkit checkout")
    install.add_argument("dir", metavar="AI_TOOLKIT_DIR", help="the folder with ai-toolkit's run.py")
    install.add_argument("--undo", action="store_true", help="remove what install made")


def run(args: argparse.Namespace) -> None:
    """Write a YAML for your photos and card, from the ready-made config that fits.

    Resolutions follow the photos' sizes, steps their number, prompts their captions. With `--gpu cpu` it trains the
    mini-FLUX, 64 pixels in minutes. Nothing is downloaded.
    """
    name = args.name
    if not name and args.dir:
        name = re.sub(r"[^\w-]+", "_", args.dir.resolve().name).strip("_")
    name = name or "my_lora"
    out = args.out or Path(f"{name}.yaml")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: is there already and is left as it is; write --out with another file, or --name")
    from ..plan.speed import FIRST_BF16, Card, find_card
    from ..plan.starter import PLACEHOLDER, RAM_SHARE, Photos, made_up_word, make_starter

    ram = args.ram or math.inf
    if args.gpu is not None:
        card = None if args.gpu.lower() == "cpu" else find_card(args.gpu)
    else:
        import torch

        if not torch.cuda.is_available():
            remedy = "name a card, as --gpu 24, or try the mini-FLUX with --gpu cpu"
            raise UsageError(f"--gpu: torch finds no CUDA GPU here; {remedy}")
        properties = torch.cuda.get_device_properties(0)
        gb = round(properties.total_memory / 1e9, 1)
        card = Card(gb, properties.name, capability=(properties.major, properties.minor))
        ram = args.ram or psutil.virtual_memory().total / 1e9
    photos = Photos(args.dir) if args.dir else None
    captions = [] if photos is None else photos.captions
    trigger = args.trigger or made_up_word(name, captions)
    text, origin, verdict, warnings = make_starter(photos, card, name, trigger, out.as_posix(), ram)
    with writing(f"--out {out}"), out.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
    print(f"wrote {out}, from {origin}; trigger word: {trigger}")
    said = sum(bool(re.search(rf"\b{re.escape(trigger)}\b", caption)) for caption in captions)
    if said:
        text = f"is a word of {said} of {len(captions)} captions; choose one that you make up"
        warnings.append(f"trigger word {trigger}: {text}")
    if card is not None and card.capability < FIRST_BF16:
        text = "multiplies neither FP8 nor bf16; INT8 from 7.5 on, all else is slow"
        major, minor = card.capability
        warnings.append(f"--gpu: compute capability {major}.{minor} {text}")
    if verdict is not None:
        warnings += _print_fit(verdict, ram, RAM_SHARE)
    print_findings((), warnings)
    if photos is None:
        print(f"Put your photos' folder in place of {PLACEHOLDER}, then:")
    else:
        print(f"{len(photos.sides)} photos; next:")
    for command in ("data", "check", "plan", "train"):
        print(f"  coat-flux {command} {shlex.quote(str(out))}")


def _print_fit(verdict: CardFit, ram: float, share: float) -> list[str]:
    """Print what the run needs of a card and of CPU memory; returns warnings."""
    prediction, warnings = verdict.prediction, []
    peak, host = prediction.peak / 1e9, prediction.ram_bytes / 1e9
    room, card = verdict.card.room / 1e9, f"{verdict.card.gb:g} GB card"
    if verdict.fits:
        print(f"It needs {peak:.1f} GB of the {room:.1f} GB that a {card} has for it,")
        print(f"and {host:.1f} GB of CPU memory")
    else:
        needs = f"this one comes nearest and needs {peak:.1f} of {room:.1f} GB"
        warnings.append(f"no ready-made config fits a {card}: {needs}")
        changes = "; ".join(change.text for change in verdict.changes)
        none = "No change of it fits either; train on a larger card"
        print(f"It would fit with: {changes}" if changes else none)
    if host > ram * share:
        remedy = "close other programs and have swap space"
        text = f"it needs {host:.1f} GB of CPU memory and there are {ram:.1f}"
        warnings.append(f"{text}; {remedy}")
    return warnings


def copy_examples(args: argparse.Namespace) -> None:
    """Copy the ready-made configs and the example photos into DIR, to train on and to edit.

    A file that is already there is left as it is.
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
