"""`coat-flux mask`: masks of the garment in each photo of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .check import save_sheet
from .common import EXIT_REFUSED, UsageError, add_command, print_findings, show_warnings


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    parser = add_command(commands, "mask", mask, "draw a mask of the garment in each photo")
    parser.add_argument("dir", type=Path, metavar="FOLDER", help="of photos")
    parser.add_argument("--model", metavar="NAME", help="Hub name or folder (default: mattmdjaga/segformer_b2_clothes)")
    parser.add_argument("--labels", metavar="A,B", help="of the model (default: all that are a garment's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: FOLDER_masks, beside the photos")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="default: output/data/<name>.png")


def mask(args: argparse.Namespace) -> int:
    """Write a mask for each photo, white where the garment is: `mask_path` of a data set, for either trainer.

    It is the photo's own transparency where it has some; else a segmentation model of transformers draws it, which is
    downloaded at its first use. No mask is ever written over: remove one to have it made again, or paint it yourself.
    The contact sheet tints what is not trained. Exit code 2 where a photo got none because of an error.
    """
    folder = args.dir.resolve()
    if not folder.is_dir():
        raise UsageError(f"{args.dir}: is no folder; name the one with the photos")
    out = args.out or folder.with_name(f"{folder.name}_masks")
    if out.resolve().is_relative_to(folder):
        raise UsageError(
            f"--out {out}: is inside {args.dir}, where masks would train as photos; name a folder beside it"
        )
    import torch

    from ..data.files import find_images
    from ..data.preflight import inspect_process
    from ..data.segment import BY_MODEL, CLOTHES_MODEL, FAILED, FROM_ALPHA, KEPT, NOTHING, Parser, draw_masks

    show_warnings()
    photos = find_images(folder)
    if not photos:
        raise UsageError(f"{args.dir}: has no photos; name the folder with them")
    model, labels = args.model or CLOTHES_MODEL, [label.strip() for label in (args.labels or "").split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = draw_masks(photos, out, lambda: Parser(model, list(filter(None, labels)), device))
    drawn, kept = len(done[FROM_ALPHA]) + len(done[BY_MODEL]), len(done[KEPT])
    print(f"{out}: {len(done[FROM_ALPHA])} masks from transparency, {len(done[BY_MODEL])} by {model}, {kept} kept")
    remedy = "paint one, or try other --labels"
    print_findings((), [f"{name}: no garment was found, it has no mask; {remedy}" for name in done[NOTHING]])
    if drawn + kept:
        entry = {"folder_path": str(args.dir), "mask_path": str(out), "resolution": [1024]}
        save_sheet(inspect_process({"datasets": [entry], "model": {"is_flux": True}}), args.sheet, out.name)
        print(f"look at them, then write into the data set of your YAML: mask_path: {out}")
    return EXIT_REFUSED if print_findings(done[FAILED], ()) else 0
