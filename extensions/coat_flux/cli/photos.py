"""Help with a folder of photos: `coat-flux mask`, masks of the garment, and `caption`, drafts of captions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .check import save_sheet
from .common import EXIT_REFUSED, UsageError, add_command, print_findings, show_warnings


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    masks = add_command(commands, "mask", mask, "draw a mask of the garment in each photo")
    captions = add_command(commands, "caption", caption, "draft a caption for each photo")
    models = "mattmdjaga/segformer_b2_clothes", "Salesforce/blip-image-captioning-large"
    for parser, model in zip((masks, captions), models, strict=True):
        parser.add_argument("dir", type=Path, metavar="FOLDER", help="of photos")
        parser.add_argument("--model", metavar="NAME", default=model, help="Hub name or folder (default: %(default)s)")
        parser.add_argument("--device", choices=("cpu", "cuda"), help="of the model (default: the GPU if there is one)")
    masks.add_argument("--labels", metavar="A,B", help="of the model (default: all that are a garment's)")
    masks.add_argument("--out", type=Path, metavar="DIR", help="default: FOLDER_masks, beside the photos")
    masks.add_argument("--sheet", type=Path, metavar="FILE", help="default: output/data/<name>.png")
    captions.add_argument("--about", metavar="A,B", help="of models that can be asked (default: background,pose,light)")
    captions.add_argument("--ext", default="txt", help="the data set's caption_ext (default: txt)")


def mask(args: argparse.Namespace) -> int:
    """Write a mask for each photo, white where the garment is: `mask_path` of a data set, for either trainer.

    It is the photo's own transparency where it has some; else a segmentation model of transformers draws it, which is
    downloaded at its first use. No mask is ever written over: remove one to have it made again, or paint it yourself.
    The contact sheet tints what is not trained. Exit code 2 where a photo got none because of an error.
    """
    photos, device = _find_photos(args)
    folder = args.dir.resolve()
    out = args.out or folder.with_name(f"{folder.name}_masks")
    if out.resolve().is_relative_to(folder):
        raise UsageError(
            f"--out {out}: is inside {args.dir}, where masks would train as photos; name a folder beside it"
        )
    from ..data.preflight import inspect_process
    from ..data.pretrained import FAILED, KEPT
    from ..data.segment import BY_MODEL, FROM_ALPHA, NOTHING, Parser, draw_masks

    done = draw_masks(photos, out, lambda: Parser(args.model, _names(args.labels), device))
    drawn, kept = len(done[FROM_ALPHA]) + len(done[BY_MODEL]), len(done[KEPT])
    print(f"{out}: {len(done[FROM_ALPHA])} masks from transparency, {len(done[BY_MODEL])} by {args.model}, {kept} kept")
    remedy = "paint one, or try other --labels"
    print_findings((), [f"{name}: no garment was found, it has no mask; {remedy}" for name in done[NOTHING]])
    if drawn + kept:
        entry = {"folder_path": str(args.dir), "mask_path": str(out), "resolution": [1024]}
        save_sheet(inspect_process({"datasets": [entry], "model": {"is_flux": True}}), args.sheet, out.name)
        print(f"look at them, then write into the data set of your YAML: mask_path: {out}")
    return EXIT_REFUSED if print_findings(done[FAILED], ()) else 0


def caption(args: argparse.Namespace) -> int:
    """Write a draft of a caption beside each photo that has none: `[trigger]`, then a sentence by a model.

    The model is one of transformers that describes images, such as BLIP, Florence-2 or Qwen-VL, downloaded at its
    first use. One with a chat template is asked for what is not the garment. No caption is ever written over: read
    them all, and correct them. Exit code 2 where a photo got none.
    """
    from ..data.captions import TEXT_EXTENSIONS
    from ..data.describe import WRITTEN, Captioner, draft_captions
    from ..data.pretrained import FAILED, KEPT

    extension = f".{args.ext.lstrip('.')}"
    if extension not in TEXT_EXTENSIONS:
        raise UsageError(f"--ext {args.ext}: is none of a caption; write one of {', '.join(TEXT_EXTENSIONS)}")
    photos, device = _find_photos(args)
    done = draft_captions(photos, extension, lambda: Captioner(args.model, _names(args.about), device))
    for line in [*done[WRITTEN], *(f"{name}: has a caption, which is kept" for name in done[KEPT])]:
        print(line)
    written, kept, failed = (len(done[each]) for each in (WRITTEN, KEPT, FAILED))
    print(f"{args.dir}: {written} captions by {args.model}, {kept} kept, {failed} failed")
    if written:
        print("they are drafts: delete the garment's name, color and cut, for which [trigger] stands")
    return EXIT_REFUSED if print_findings(done[FAILED], ()) else 0


def _find_photos(args: argparse.Namespace) -> tuple[list[Path], str]:
    """The photos of FOLDER, with warnings of what cannot be read there, and the device; raises UsageError."""
    if not args.dir.is_dir():
        raise UsageError(f"{args.dir}: is no folder; name the one with the photos")
    import torch

    from ..data.files import Listing

    show_warnings()
    listing = Listing(args.dir)
    print_findings((), listing.errors + listing.warnings)
    if not listing.images:
        raise UsageError(f"{args.dir}: has no photos; name the folder with them")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and best == "cpu":
        raise UsageError("--device cuda: torch finds no CUDA GPU here; leave --device out")
    return listing.images, args.device or best


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
