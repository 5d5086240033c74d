"""`coat-flux doctor`, `plan` and `export`: this machine, a card for a run, a LoRA for other programs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from ..config.check import job_for_plan
from ..config.job_file import load_job_yaml
from .common import EXIT_FAILED, add_command, writing

PLAIN = str.maketrans({"✓": "+", "✗": "x"})  # for a console whose code page has no such signs
LAYOUTS = ("diffusers", "kohya", "comfyui")
DTYPES = ("float16", "bfloat16", "float32")


def add_parsers(commands: Any) -> None:
    """Add the commands of this module."""
    parser = add_command(commands, "doctor", doctor, "what this machine can do")
    parser.add_argument(
        "--ai-toolkit",
        type=Path,
        metavar="DIR",
        help="its folder, the one with run.py (default: AI_TOOLKIT_ROOT, else here if it is one)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="then compare products with fp32 and operators with their references, in processes of their own: one text "
        "to paste where you report a problem",
    )
    parser = add_command(commands, "plan", plan, "memory, disk and time before the run", of_config=True)
    parser.add_argument(
        "--gpu", metavar="CARD", help="one card by GB or name, as 24, 4090 or 'A100 80GB', in place of the usual ones"
    )
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write it as JSON, without FILE to the terminal"
    )
    parser = add_command(commands, "export", export, "convert a LoRA for other programs")
    parser.add_argument("lora", type=Path, metavar="LORA", help="a .safetensors file; it stays as it is")
    parser.add_argument(
        "--to",
        choices=LAYOUTS,
        required=True,
        help="diffusers: also ai-toolkit and ComfyUI; kohya: sd-scripts, also ComfyUI; comfyui: the checkpoint's names",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: <layout>-<name of LORA>, next to it")
    parser.add_argument("--dtype", choices=DTYPES, help="of the matrices (default: unchanged)")


def doctor(args: argparse.Namespace) -> int:
    """Look at Python, torch, GPU, FP8, Triton, memory, disk and ai-toolkit; exit code 1 where training cannot work.

    ✓ works, ✗ does not: what to do follows the arrow, - is not here. Multiplies for about a second on each GPU.
    """
    from ..doctor.probes import diagnose, verdict

    logging.getLogger("coat_core").addHandler(logging.NullHandler())  # its warnings are lines here
    try:
        "✓✗".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        signs = {}
    except UnicodeEncodeError:
        signs = PLAIN
    lines = []
    for line in diagnose(args.ai_toolkit):
        lines.append(line)
        print(str(line).translate(signs), flush=True)
    if args.gpu:
        from ..doctor.on_gpu import report

        for text in report():
            print(text, flush=True)
    works, text = verdict(lines)
    print(text, flush=True)
    return 0 if works else EXIT_FAILED


def plan(args: argparse.Namespace) -> None:
    """Predict memory by phase, disk and time of a run, which cards it fits, and the cheapest change that makes it fit.

    Needs no GPU and downloads nothing.
    """
    job = job_for_plan(load_job_yaml(args.config, name=args.name), args.config)
    from ..plan.report import Plan, as_json, as_text
    from ..plan.speed import find_card

    card = None if args.gpu is None else find_card(args.gpu)
    prediction = Plan(job, card)
    if args.json == "-":
        print(json.dumps(as_json(prediction), indent=2))
    elif args.json is not None:
        with writing(f"--json {args.json}"):
            Path(args.json).write_text(json.dumps(as_json(prediction), indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    else:
        print(as_text(prediction))
        if card is not None and card.name:
            print(f"--gpu {args.gpu}: {card.gb:g} GB" + (f", rates of the {card.name}" if card.bf16_tflops else ""))


def export(args: argparse.Namespace) -> None:
    """Convert a FLUX LoRA between key layouts. Exact: nothing is written unless converting back gives the same bits."""
    import torch

    from ..export.lora_files import convert_file

    # never <name>-kohya: ai-toolkit resumes from, and cleans up, whatever in the folder begins with the job's name
    target = args.out or args.lora.with_name(f"{args.to}-{args.lora.name}")
    report = convert_file(args.lora, target, args.to, getattr(torch, args.dtype) if args.dtype else None)
    print(f"wrote {target}\n{report.line()}")
