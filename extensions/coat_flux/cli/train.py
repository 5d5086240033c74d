"""`coat-flux train`: the stand-alone engine."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from .common import Refused, add_config, load_job
from .watch import add_address, serve


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    train = commands.add_parser("train", help="train with the stand-alone engine", description=run.__doc__)
    add_config(train)
    train.add_argument("--watch", action="store_true", help="serve the live page of `coat-flux watch` meanwhile")
    add_address(train)
    train.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train a LoRA with the stand-alone engine, or continue its run; several GPUs with `accelerate launch`."""
    if not args.watch and (args.host is not None or args.port is not None):
        raise Refused("--host, --port: are for the live page; add --watch, or remove them")
    job = load_job(args)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if os.environ.get("RANK", "0") == "0":
        for package in ("coat_core", "coat_flux"):
            logging.getLogger(package).setLevel(logging.INFO)
        if args.watch:
            serve(job.folder, args.host, args.port)
    from ..engine.trainer import COATTrainer

    COATTrainer(job).train()
