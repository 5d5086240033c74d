"""Bytes one FLUX block keeps for backward: `python scripts/bench_memory.py [--json FILE] [--picture FILE]`.

Builds one double and one single block of FLUX.1's width (d = 3072, 24 heads of 128) with random weights and a rank-16
LoRA on every linear of the blocks, runs them forward, and counts every allocation alive afterwards (torch's profiler:
allocations minus frees), less the block's outputs. The blocks' inputs are made inside, so that keeping them counts.
Prints bytes per token and hidden element, then scales them to the 19 + 38 blocks of FLUX.1-dev. Runs on a CPU in about
15 minutes; `--heads 4` in one. Exit code 1 where a bound is missed (at full width).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.helpers.flux_block import (
    HEAD_DIM,
    block_call,
    block_inputs,
    loop_context,
    make_model,
    prepare,
)
from tests.helpers.toolkit_lora import toolkit_is_real

RANK = 16
FLUX_BLOCKS = {"double": 19, "single": 38}
FLUX_HIDDEN, FLUX_TEXT = 3072, 512
PIXELS = (512, 768, 1024)
KEEP = {"checkpointing": "none"}


class Row(NamedTuple):
    """One setting in one loop; bounds in bytes per token and hidden element, double and single."""

    name: str
    loop: str
    coat: dict[str, Any]
    checkpointed: bool = False
    bounds: tuple[float, float] | None = None


OFF = {"enabled": False}
GENERIC = {"memory": KEEP, "activation": {"flow": "generic"}}
GENERIC_BF16 = {"memory": KEEP, "activation": {"flow": "generic", "attention": "bf16"}}
FUSED = {"memory": KEEP}
FUSED_BF16 = {"memory": KEEP, "activation": {"attention": "bf16"}}
ROWS = [
    Row("bf16", "autocast", OFF),
    Row("bf16, recomputed", "autocast", OFF, checkpointed=True),
    Row("generic, attention bf16", "autocast", GENERIC_BF16),
    Row("generic", "autocast", GENERIC, bounds=(30, 26)),
    Row("fused, attention bf16", "autocast", FUSED_BF16, bounds=(17, 15)),
    Row("fused", "autocast", FUSED, bounds=(13, 11)),
    Row("bf16", "peft", OFF),
    Row("bf16, recomputed", "peft", OFF, checkpointed=True),
    Row("generic", "peft", GENERIC),
    Row("fused, attention bf16", "peft", FUSED_BF16, bounds=(17, 15)),
    Row("fused", "peft", FUSED, bounds=(13, 11)),
    Row("recomputed from FP8", "peft", {"memory": {"checkpointing": "all"}}),
    Row("bf16", "toolkit", OFF),
    Row("generic", "toolkit", GENERIC),
    Row("fused, attention bf16", "toolkit", FUSED_BF16, bounds=(17, 15)),
    Row("fused", "toolkit", FUSED, bounds=(13, 11)),
]

DRAWN_LOOP = "peft"
BARS = {  # rows of the picture, and what a reader calls them
    "bf16": "bf16",
    "bf16, recomputed": "bf16 with recomputation:\nevery block runs forward twice",
    "fused": "COAT: nothing recomputed",
}


def kept_bytes(run: Callable[[], tuple[Tensor, ...]]) -> int:
    """Return what `run` allocated and did not free, without its outputs."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = run()
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    alive = sum(event.nbytes() for event in events if event.name() == "[memory]")
    storages = {out.untyped_storage().data_ptr(): out.untyped_storage().nbytes() for out in outputs}
    return alive - sum(storages.values())


def measure(model: nn.Module, row: Row, text: int, image: int, batch: int = 1) -> dict[str, float]:
    """Return bytes per token and hidden element of the double and the single block."""
    model = prepare(model, row.coat, row.loop, RANK)
    if row.loop == "toolkit":
        vars(model)["toolkit_network"].multiplier = [1.0] * batch  # as ai-toolkit sets it at every step
    hidden, encoder, temb = block_inputs(model, text, image, batch=batch)
    hidden.requires_grad_(), encoder.requires_grad_()
    rotary, call = model.pos_embed(torch.zeros(text + image, 3)), block_call(model)
    if row.checkpointed:
        call = lambda block, *args: checkpoint(block, *args, use_reentrant=False)  # noqa: E731

    def run(block: nn.Module) -> tuple[Tensor, ...]:
        with loop_context(row.loop):
            return call(
                block, hidden * 1, encoder * 1, temb, rotary
            )  # * 1: the input belongs to the block, as a tensor

    blocks = {"double": model.transformer_blocks[0], "single": model.single_transformer_blocks[0]}
    elements = batch * (text + image) * model.inner_dim
    for block in [*blocks.values()] * 2:  # weights are joined and adapters copied, in memory of their own
        run(block)
    return {kind: kept_bytes(lambda block=block: run(block)) / elements for kind, block in blocks.items()}


def scaled_gb(found: dict[str, float], pixels: int) -> dict[str, float]:
    """GB (1e9) of all blocks of FLUX.1-dev for one square image."""
    tokens = (pixels // 16) ** 2 + FLUX_TEXT
    return {kind: FLUX_BLOCKS[kind] * rate * tokens * FLUX_HIDDEN / 1e9 for kind, rate in found.items()}


def misses(row: Row, found: dict[str, float]) -> bool:
    """Whether the row is above its bounds."""
    return row.bounds is not None and (found["double"] > row.bounds[0] or found["single"] > row.bounds[1])


def report_row(row: Row, found: dict[str, float]) -> str:
    """One line of the Markdown table."""
    bound = verdict = ""
    if row.bounds is not None:
        bound, verdict = f"{row.bounds[0]:g} / {row.bounds[1]:g}", "missed" if misses(row, found) else "met"
    sizes = " | ".join(f"{sum(scaled_gb(found, pixels).values()):.1f}" for pixels in PIXELS)
    return (
        f"| {row.loop} | {row.name} | {found['double']:.1f} | {found['single']:.1f} | {bound} | {verdict} | {sizes} |"
    )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """What FLUX.1-dev's blocks save at 1024 px in one loop: the rows of `BARS`."""
    from matplotlib.figure import Figure

    saved = {r["name"]: tuple(scaled_gb(r["bytes"], 1024).values()) for r in results if r["loop"] == DRAWN_LOOP}
    names = [name for name in BARS if name in saved][::-1]
    double, single = ([saved[name][kind] for name in names] for kind in range(2))
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()
    labels = [BARS[name] for name in names]
    axes.barh(labels, double, color="#4477aa", label="19 double blocks")
    bars = axes.barh(labels, single, left=double, color="#ee6677", label="38 single blocks")
    axes.bar_label(bars, labels=[f"{sum(saved[name]):.1f} GB" for name in names], padding=4, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    axes.legend(loc="lower right", frameon=False)
    axes.set_xlabel("GB saved for backward: FLUX.1-dev, 1024 px, rank 16 (scaled from one block of each kind)")
    figure.savefig(path, dpi=90)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24, help="attention heads of 128 (default: FLUX.1's 24)")
    parser.add_argument("--text-tokens", type=int, default=256)
    parser.add_argument("--image-tokens", type=int, default=768)
    parser.add_argument("--batch", type=int, default=1, help="images")
    parser.add_argument("--row", action="append", help="only rows of this name, for example fused")
    parser.add_argument("--loop", action="append", help="only rows of this loop: autocast, peft, toolkit")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Measure every row."""
    options = parse_arguments()
    model = make_model(options.heads)
    toolkit = "ai-toolkit's own LoRA modules" if toolkit_is_real() else "a stand-in for ai-toolkit's LoRA modules"
    print(
        f"torch {torch.__version__}, {options.heads} heads x {HEAD_DIM}, batch {options.batch}, rank {RANK} fp32, "
        f"toolkit: {toolkit}\n"
        "bytes per token x hidden; GB of FLUX.1-dev's 57 blocks by scaling\n\n"
        f"| loop | setting | double | single | bound | "
        f"| {' | '.join(f'{p} px, GB' for p in PIXELS)} |\n"
        f"|{'---|' * (6 + len(PIXELS))}",
        flush=True,
    )
    results, missed = [], 0
    for row in ROWS:
        if (options.loop and row.loop not in options.loop) or (options.row and row.name not in options.row):
            continue
        found = measure(model, row, options.text_tokens, options.image_tokens, options.batch)
        missed += misses(row, found)
        scaled = {str(pixels): scaled_gb(found, pixels) for pixels in PIXELS}
        kept = {"bytes": found, "bounds": row.bounds, "flux_dev_gb": scaled}
        results.append({"loop": row.loop, "name": row.name, **kept})
        print(report_row(row, found), flush=True)
    if options.json:
        head = {"torch": torch.__version__, "heads": options.heads, "rank": RANK, "toolkit": toolkit}
        options.json.write_text(json.dumps({**head, "rows": results}, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(results, options.picture)
    return 1 if missed and options.heads * HEAD_DIM >= FLUX_HIDDEN else 0


if __name__ == "__main__":
    sys.exit(main())
