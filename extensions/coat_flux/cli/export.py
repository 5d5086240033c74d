"""`coat-flux export`: a LoRA in the key layout another program wants."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_command

LAYOUTS = ("diffusers", "kohya", "comfyui")
DTYPES = ("float16", "bfloat16", "float32")


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    export = add_command(commands, "export", run, "convert a LoRA for other programs")
    export.add_argument("lora", type=Path, metavar="LORA", help="a .safetensors file; it stays as it is")
    export.add_argument(
        "--to",
        choices=LAYOUTS,
        required=True,
        help="diffusers: also ai-toolkit and ComfyUI; kohya: sd-scripts, also ComfyUI; comfyui: the checkpoint's names",
    )
    export.add_argument("--out", type=Path, metavar="FILE", help="default: <layout>-<name of LORA>, next to it")
    export.add_argument("--dtype", choices=DTYPES, help="of the matrices (default: as they are)")


def run(args: argparse.Namespace) -> None:
    """Convert a FLUX LoRA between key layouts. Exact: nothing is written unless converting back gives the same bits."""
    import torch

    from ..export.convert import convert_file

    # never <name>-kohya: ai-toolkit resumes from, and cleans up, whatever in the folder begins with the job's name
    target = args.out or args.lora.with_name(f"{args.to}-{args.lora.name}")
    report = convert_file(args.lora, target, args.to, getattr(torch, args.dtype) if args.dtype else None)
    print(f"wrote {target}\n{report.line()}")
