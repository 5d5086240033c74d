"""`coat-flux watch`: a live page on a run."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `coat-flux`."""
    watch = commands.add_parser("watch", help="a live page on a run", description=run.__doc__)
    watch.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run: <training_folder>/<name>")
    add_address(watch)
    watch.set_defaults(run=run)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add --host and --port."""
    parser.add_argument(
        "--host", metavar="ADDRESS", help="listen there, for other machines to see (default: 127.0.0.1, this one only)"
    )
    parser.add_argument("--port", type=int, help="default: the first free one from 8675 on")


def run(args: argparse.Namespace) -> None:
    """Serve a page on a run while it trains, here or inside ai-toolkit: progress, loss, samples, log.

    Its buttons sample, save and stop. Ctrl+C ends the page; the run goes on.
    """
    from ..pages.run import RunFolder

    RunFolder(args.run_dir)
    serve(args.run_dir, args.host, args.port)
    threading.Event().wait()


def serve(run_dir: Path, host: str | None, port: int | None) -> None:
    """Start the page and say where it is.

    Raises:
        WatchError: it cannot listen there.
    """
    from ..pages.live_server import Watch

    watch = Watch(run_dir.resolve(), *([] if host is None else [host]))
    address = watch.start(port)
    print(f"watch: {address}", flush=True)
    if not watch.is_private:
        print("watch: whoever reaches this address sees the samples; the part after # is needed to sample, save, stop")
