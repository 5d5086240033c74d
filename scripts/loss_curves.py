"""Loss curves of COAT against bf16 on the embedded model: `python scripts/loss_curves.py [--steps N] [--json FILE]`.

Trains `configs/flux_clothing_tiny.yaml` with the stand-alone engine three ways (bf16 with AdamW, COAT in the generic
flow, COAT in the fused flow; all without recomputation, all else COAT's defaults), each with the same seeds. A seed
fixes data order, noise, sigmas and the adapters' start, so a difference at the same seed is COAT's doing; the spread
of the bf16 seeds is the yardstick. Each run's log must name the flow it claims. Prints a Markdown table and a verdict,
draws the curves.

Curves are trailing means over WINDOW steps. The share of steps inside the bf16 band (min to max over seeds) has a
ceiling: the bf16 twin is itself an edge of the band for 2 of n seeds, and a run that equals its twin up to noise of
either sign is outside at half of those, so 1 - 1/n is expected of it, not 1.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "flux_clothing_tiny.yaml"
PICTURE = ROOT / "docs" / "loss_curves.png"
LARGEST_PICTURE_BYTES = 150_000
TRAIN = """
import logging, sys
from coat_flux import COATTrainer

logging.basicConfig(format="%(message)s")
logging.getLogger("coat_flux").setLevel(logging.INFO)
COATTrainer(sys.argv[1]).train()
"""
WINDOW = 20
LAST = 50
KEEP = {"memory": {"checkpointing": "none"}}
BASE = "bf16"
COAT_BLOCKS: dict[str, dict[str, Any]] = {
    BASE: {"enabled": False},
    "generic": {**KEEP, "activation": {"flow": "generic"}},
    "fused": KEEP,
}
FLOWS = tuple(name for name in COAT_BLOCKS if name != BASE)
COLOURS = {BASE: "0.45", "generic": "tab:blue", "fused": "tab:orange"}


class Run(NamedTuple):
    """What one training left: loss per step, validation loss before and after, median seconds per step."""

    losses: list[float]
    before: float
    after: float
    seconds: float

    @property
    def last(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


Runs = dict[tuple[str, int], Run]


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default: 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="training seeds (default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "loss_curves", help="folder for the runs")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: docs/loss_curves.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--read", action="store_true", help="read the runs in --out again instead of training")
    options = parser.parse_args()
    if options.steps <= WINDOW:
        parser.error(f"--steps {options.steps}: must be more than {WINDOW}, the steps a curve is smoothed over")
    if len(set(options.seeds)) < 2:
        parser.error(f"--seeds {options.seeds}: must be two or more different seeds: one has no spread")
    return options


def make_job(base: dict[str, Any], kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the job of one run: the config, with the run's own optimizer, COAT block and seed."""
    job = copy.deepcopy(base)
    job["config"]["name"] = f"{kind}_{seed}"
    process = job["config"]["process"][0]
    process.update(training_folder=str(options.out), training_seed=seed, coat=COAT_BLOCKS[kind])
    optimizer = "adamw" if kind == BASE else "coat_fp8_adamw"
    process["train"].update(
        steps=options.steps, optimizer=optimizer, gradient_checkpointing=False, disable_sampling=True
    )
    process["model"]["quantize"] = kind != BASE
    process["save"]["save_every"] = options.steps
    process["datasets"][0].update(cache_latents_to_disk=True, cache_text_embeddings=True)
    return job


def train(job: dict[str, Any], out: Path) -> None:
    """Train one job from its start in a process of its own; console output goes to `<name>.log`."""
    name = job["config"]["name"]
    shutil.rmtree(out / name, ignore_errors=True)
    file = out / f"{name}.json"
    file.write_text(json.dumps(job, indent=1), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-c", TRAIN, str(file)]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}; see {out / f'{name}.log'}")
    print(f"trained {name}", flush=True)


def train_all(options: argparse.Namespace) -> None:
    """Train every kind with every seed."""
    from coat_flux.config.job_file import load_job_yaml
    from coat_flux.mini_flux.folder import make_tiny_flux

    options.out.mkdir(parents=True, exist_ok=True)
    base = load_job_yaml(CONFIG)
    base["config"]["process"][0]["model"]["name_or_path"] = str(make_tiny_flux(options.out / "model"))
    jobs = [make_job(base, kind, seed, options) for seed in options.seeds for kind in COAT_BLOCKS]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(train, jobs, [options.out] * len(jobs)))


def check_flow(kind: str, log: Path) -> None:
    """Refuse a run whose log does not say that all its blocks ran as `kind` claims."""
    said = set(re.findall(r"blocks: \d+ (kept.*|recomputed.*)", log.read_text(encoding="utf-8")))
    expected = set() if kind == BASE else {f"kept in FP8, {kind} flow, attention fp8"}
    if said != expected:
        must = "nothing" if kind == BASE else expected
        raise RuntimeError(f"{log}: says of the blocks {said}: must say {must}; it is not the run it is named after")


def read_column(file: Path, column: str) -> list[float]:
    """Return one column of a CSV."""
    with file.open(newline="", encoding="utf-8") as rows:
        return [float(row[column]) for row in csv.DictReader(rows)]


def read_run(kind: str, seed: int, options: argparse.Namespace) -> Run:
    """Return what one run left, after checking that it is what it should be."""
    check_flow(kind, options.out / f"{kind}_{seed}.log")
    folder = options.out / f"{kind}_{seed}" / "coat"
    losses = read_column(folder / "metrics.csv", "loss")
    validation = read_column(folder / "validation.csv", "loss")
    if len(losses) != options.steps or len(validation) != 2:
        counts = f"{len(losses)} steps, {len(validation)} validations"
        raise RuntimeError(f"{folder}: {counts}: must be {options.steps} and 2; train again, without --read")
    seconds = statistics.median(read_column(folder / "metrics.csv", "s_per_it"))
    return Run(losses, validation[0], validation[1], seconds)


def smooth(losses: list[float]) -> np.ndarray:
    """Trailing mean over WINDOW steps, from step WINDOW on: [steps - WINDOW + 1]."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def smoothed(runs: Runs, kind: str, seeds: list[int]) -> np.ndarray:
    """Return the smoothed curves of one kind, a row for each seed."""
    return np.stack([smooth(runs[kind, seed].losses) for seed in seeds])


def spread(values: list[float]) -> dict[str, float]:
    """Return max - min and the sample standard deviation."""
    return {"max_minus_min": max(values) - min(values), "std": statistics.stdev(values)}


def compare_curves(runs: Runs, kind: str, seeds: list[int]) -> dict[str, float]:
    """Compare the smoothed curves of one kind with the band of the bf16 seeds: shares of points, and losses."""
    base, curves = smoothed(runs, BASE, seeds), smoothed(runs, kind, seeds)
    low, high = base.min(axis=0), base.max(axis=0)
    outside = np.maximum(np.maximum(low - curves, curves - high), 0.0)
    mean = curves.mean(axis=0)
    gap = np.abs(curves - base)
    return {
        "share_inside": float((outside == 0).mean()),
        "share_inside_expected_of_a_twin": 1 - 1 / len(seeds),
        "mean_curve_share_inside": float(((mean >= low) & (mean <= high)).mean()),
        "largest_excursion": float(outside.max()),
        "share_gap_below_band": float((gap < high - low).mean()),
        "mean_gap": float(gap.mean()),
        "largest_gap": float(gap.max()),
        "mean_band_width": float((high - low).mean()),
        "narrowest_band_width": float((high - low).min()),
    }


def summarize(runs: Runs, seeds: list[int]) -> dict[str, Any]:
    """Return every number of the report."""
    rows = []
    for (kind, seed), run in runs.items():
        base = runs[BASE, seed]
        gaps = {"gap_last": run.last - base.last, "gap_after": run.after - base.after}
        values = {"last": run.last, "before": run.before, "after": run.after, **gaps, "seconds": run.seconds}
        rows.append({"run": kind, "seed": seed, **values})
    base_rows = [row for row in rows if row["run"] == BASE]
    spreads = {key: spread([row[key] for row in base_rows]) for key in ("last", "after")}
    curves = {kind: compare_curves(runs, kind, seeds) for kind in FLOWS}
    losses = {f"{kind}_{seed}": run.losses for (kind, seed), run in runs.items()}
    return {"rows": rows, "bf16_spread": spreads, "curves": curves, "losses": losses}


def print_table(report: dict[str, Any]) -> None:
    """Print the runs and the spread of the bf16 seeds."""
    print(f"\n| run | seed | training loss, last {LAST} | gap | validation before | after | gap | s/it |")
    print("|---|---|---|---|---|---|---|---|")
    for row in report["rows"]:
        gaps = ["–", "–"] if row["run"] == BASE else [f"{row['gap_last']:+.5f}", f"{row['gap_after']:+.5f}"]
        losses = f"{row['last']:.4f} | {gaps[0]} | {row['before']:.4f} | {row['after']:.4f} | {gaps[1]}"
        print(f"| {row['run']} | {row['seed']} | {losses} | {row['seconds']:.2f} |")
    for key, label in (("max_minus_min", "max - min"), ("std", "standard deviation")):
        last, after = (report["bf16_spread"][name][key] for name in ("last", "after"))
        print(f"| bf16 seeds: {label} | | {last:.4f} | | | {after:.4f} | | |")


def print_verdict(report: dict[str, Any]) -> None:
    """Print, for each flow, where its curves and its final losses lie against the spread of the bf16 seeds."""
    for kind in FLOWS:
        curves = report["curves"][kind]
        rows = [row for row in report["rows"] if row["run"] == kind]
        last, after = (
            max(abs(row[f"gap_{key}"]) for row in rows) / report["bf16_spread"][key]["max_minus_min"]
            for key in ("last", "after")
        )
        within = max(last, after) < 1 and curves["share_gap_below_band"] == 1
        for line in (
            f"\nverdict, {kind}: {'within' if within else 'NOT within'} the spread of the bf16 seeds "
            "(gaps at the same seed below it, at the end and at every step)",
            f"- largest gap at the end: {last:.1%} of the spread (last {LAST} steps), {after:.1%} (validation)",
            f"- smoothed curves: gap {curves['mean_gap']:.5f} on average, {curves['largest_gap']:.5f} at most; "
            f"band {curves['mean_band_width']:.4f} wide on average, at least {curves['narrowest_band_width']:.4f}; "
            f"the gap is below that width at {curves['share_gap_below_band']:.1%} of the points",
            f"- inside the band: {curves['share_inside']:.1%} of the points (expected of a twin of bf16: "
            f"{curves['share_inside_expected_of_a_twin']:.1%}), at most {curves['largest_excursion']:.5f} outside; "
            f"the mean curve over the seeds at {curves['mean_curve_share_inside']:.1%} of the steps",
        ):
            print(line)


def draw(runs: Runs, seeds: list[int], path: Path) -> None:
    """Draw the smoothed curves over the bf16 band, and below them the difference to bf16 at the same seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2), layout="tight")
    base = smoothed(runs, BASE, seeds)
    steps = np.arange(WINDOW, WINDOW + base.shape[1])
    top.fill_between(steps, base.min(axis=0), base.max(axis=0), color="0.85", label=f"band of the {BASE} seeds")
    for kind, colour in COLOURS.items():
        curves = smoothed(runs, kind, seeds)
        line = "--" if kind == "fused" else "-"
        style = {"color": colour, "linewidth": 2.5 if kind == BASE else 1.0, "linestyle": line}
        for i, curve in enumerate(curves):
            top.plot(steps, curve, **style, label=f"{kind}, {len(seeds)} seeds" if i == 0 else None)
            if kind != BASE:
                bottom.plot(steps, curve - base[i], **style, label=kind if i == 0 else None)
    width = (base.max(axis=0) - base.min(axis=0)).mean()
    top.set(ylabel="training loss", title=f"LoRA on the embedded tiny FLUX, mean of {WINDOW} steps")
    bottom.axhline(0, color=COLOURS[BASE], linewidth=1)
    bottom.set(xlabel="step", ylabel="loss - bf16's", title=f"same seed; the band above is {width:.3f} wide on average")
    for axes in (top, bottom):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    if path.stat().st_size >= LARGEST_PICTURE_BYTES:
        raise RuntimeError(f"{path}: {path.stat().st_size} bytes: must be below {LARGEST_PICTURE_BYTES}")


def main() -> None:
    """Train, read, compare, draw."""
    options = parse_arguments()
    options.out = options.out.resolve()
    if not options.read:
        train_all(options)
    runs = {(kind, seed): read_run(kind, seed, options) for kind in COAT_BLOCKS for seed in options.seeds}
    report = summarize(runs, options.seeds)
    print_table(report)
    print_verdict(report)
    draw(runs, options.seeds, options.picture)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
