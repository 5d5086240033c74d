"""`coat-flux report`: one page on a run; `coat-flux watch`: a live one."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from .common import add_command, add_run_dir


def add_parser(commands: Any) -> None:
    """Add both commands to the parser of `coat-flux`."""
    report = add_command(commands, "report", run, "one HTML page on a run")
    add_run_dir(report)
    report.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/coat/report.html)")
    live = add_command(commands, "watch", watch, "a live page on a run")
    add_run_dir(live)
    add_address(live)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add --host and --port."""
    parser.add_argument(
        "--host", metavar="ADDRESS", help="listen there, for other machines to see (default: 127.0.0.1, this one only)"
    )
    parser.add_argument("--port", type=int, help="default: the first free one from 8675 on")


def run(args: argparse.Namespace) -> None:
    """Write one self-contained HTML page on a run, of this trainer or of ai-toolkit, that ended or is still going.

    Loss, learning rate, speed, samples over time, memory by phase against the plan, precision of FP8 by layer with what
    to change, guard, what was asked for and what it got, versions, config, LoRA files. precision.png goes next to it.
    """
    from ..pages.report import write_report

    print(f"wrote {write_report(args.run_dir, args.out)}")


def watch(args: argparse.Namespace) -> None:
    """Serve a page on a run while it trains, here or inside ai-toolkit: progress, loss, samples, log.

    Its buttons sample, save and stop. Ctrl+C ends the page; the run goes on.
    """
    from ..pages.run import RunFolder

    RunFolder(args.run_dir)
    serve(args.run_dir, args.host, args.port)
    threading.Event().wait()


def serve(run_dir: Path, host: str | None, port: int | None) -> None:
    """Start the page and print where it is.

    Raises:
        WatchError: it cannot listen there.
    """
    from ..pages.live import Watch

    watch = Watch(run_dir.resolve(), *([] if host is None else [host]))
    print(f"watch: {watch.start(port)}", flush=True)
    if not watch.is_private:
        print("watch: whoever reaches this address sees the samples; the part after # is needed to sample, save, stop")
