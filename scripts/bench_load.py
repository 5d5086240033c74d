"""Peak memory of loading a transformer: `python scripts/bench_load.py [--folder DIR] [--double 2 --single 3]`.

Writes a random transformer of FLUX.1-dev's width in bf16 shards (2.3 GB with the numbers above; 57 blocks are 24 GB),
then loads it three times, each in a process of its own, on the CPU:

    whole     diffusers' from_pretrained, then apply_coat: how `coat-flux train` loaded before there was the next
    by weight each weight quantized as it is read
    cache     the codes of the second one, from disk

Prints above the process's own memory: the most there was (VmHWM), the most of it that is anonymous, so without pages of
mapped files, and the model's own bytes; whether the codes of all three are equal; and seconds, which depend on what the
system still has of the files. Linux only. Exit code 1 where the codes differ or the peak of the second is above its
codes, the largest shard and 0.3 GB.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

GB = 1e9
ROWS = ("whole", "by weight", "cache")
SLACK = 0.3e9  # above codes and one shard
STATUS = Path("/proc/self/status")


def main() -> int:
    """Write the model where it is not there, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the model is written, and stays")
    parser.add_argument("--double", type=int, default=2, help="double blocks")
    parser.add_argument("--single", type=int, default=3, help="single blocks")
    parser.add_argument("--shard", default="600MB", help="size of a shard")
    parser.add_argument("--row", choices=("make", *ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row == "make":
        make(options)
    elif options.row is not None:
        print(json.dumps(measure(options.row, options.folder)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            options.folder = (options.folder or Path(scratch, "model")).resolve()
            return compare(options, Path(scratch))
    return 0


def compare(options: argparse.Namespace, scratch: Path) -> int:
    """Print the table."""
    given = ["--folder", options.folder, "--double", options.double, "--single", options.single]
    command = [sys.executable, __file__, *map(str, given), "--shard", options.shard, "--row"]
    environment = {**os.environ, "HF_ASSETS_CACHE": str(scratch / "assets"), "HF_HUB_OFFLINE": "1"}
    if not (options.folder / "transformer" / "config.json").is_file():
        subprocess.run([*command, "make"], check=True)
    shards = [path.stat().st_size for path in (options.folder / "transformer").glob("*.safetensors")]
    print(f"{sum(shards) / GB:.2f} GB in {len(shards)} shards, the largest {max(shards) / GB:.2f}")
    print(f"{'GB above the process':22}{'peak':>8}{'anonymous':>11}{'model':>8}{'seconds':>9}")
    found: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        done = subprocess.run([*command, row], check=True, env=environment, stdout=subprocess.PIPE, text=True)
        found[row] = one = json.loads(done.stdout.splitlines()[-1])
        sizes = "".join(f"{one[key] / GB:{width}.2f}" for key, width in (("peak", 8), ("anonymous", 11), ("model", 8)))
        print(f"{row:22}{sizes}{one['seconds']:9.1f}", flush=True)
    same = len({one["codes"] for one in found.values()}) == 1
    bound = found["by weight"]["model"] + max(shards) + SLACK
    print(f"codes {'equal' if same else 'DIFFER'}; codes + one shard + 0.3 GB are {bound / GB:.2f}")
    return int(not same or found["by weight"]["peak"] > bound)


def make(options: argparse.Namespace) -> None:
    """Write the random model."""
    import torch

    from coat_flux.mini_flux.geometry import make_flux_dev_geometry

    blocks = {"num_layers": options.double, "num_single_layers": options.single}
    model = make_flux_dev_geometry("cpu", torch.bfloat16, **blocks)
    model.save_pretrained(options.folder / "transformer", max_shard_size=options.shard)


def measure(row: str, folder: Path) -> dict[str, Any]:
    """Load in this process."""
    import torch
    from diffusers import AutoModel

    from coat_flux.blocks.apply import apply_coat
    from coat_flux.config.coat import COATConfig
    from coat_flux.trainers.standalone.loading import load_transformer

    config = COATConfig()
    gc.collect()
    before = status()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    sampler = AnonymousPeak()
    started = time.perf_counter()
    if row == "whole":
        model = AutoModel.from_pretrained(str(folder), subfolder="transformer", torch_dtype=torch.bfloat16)
    else:
        model = load_transformer(str(folder), torch.bfloat16, config)
    apply_coat(model, config, device="cpu")
    seconds = time.perf_counter() - started
    peak = status()["VmHWM"] - before["VmRSS"]
    anonymous = sampler.stop() - before["RssAnon"]
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    sizes = {"peak": peak, "anonymous": anonymous, "model": held, "seconds": seconds}
    return {**sizes, "codes": digest.hexdigest()}


def status() -> dict[str, int]:
    """The process's memory in bytes, as Linux counts it."""
    rows = (line.split() for line in STATUS.read_text().splitlines() if line.startswith(("Vm", "Rss")))
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}


class AnonymousPeak(threading.Thread):
    """Looks every 2 ms how much anonymous memory there is."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._done = 0, threading.Event()
        self.start()

    def run(self) -> None:
        """Until `stop`."""
        while not self._done.wait(0.002):
            self.peak = max(self.peak, status()["RssAnon"])

    def stop(self) -> int:
        """The most there was."""
        self._done.set()
        self.join()
        return self.peak


if __name__ == "__main__":
    raise SystemExit(main())
