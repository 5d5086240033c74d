"""What does each part of COAT cost and save? `python scripts/ablation.py [--model MODEL] [--out FOLDER] [--jobs 2]`.

Trains the mini-FLUX on the garment it has never seen once for each part of COAT alone, for all together, for the
state formats beyond the paper's, and for a deliberately bad setting; each in pairs with bf16 runs of the same seeds
(`coat_flux.study`). Prints a Markdown table: the final validation loss less bf16's, in the bf16 model and in the
run's own precision, against bf16's standard deviation over seeds, and the bytes a step holds as the run's own memory
report counts them (weights, optimizer states, tensors saved for backward). Started again it goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from mini_flux.experiment import make_job, write_photos

from coat_flux.config.job import JobConfig
from coat_flux.pages.run import RunFolder
from coat_flux.study import BF16, Arm, ArmResult, Scores, Settings, Study, judge, open_study, score_loras

ROOT = Path(__file__).resolve().parents[1]
SEEDS_FROM = 1
WARM_STEPS = 5  # not counted in the pace
PARTS = ("transformer", "optimizer", "saved activations")
RECOMPUTED = {"checkpointing": "all", "enable_efficient_checkpoint": True}
NO_GEMM = ["*"]  # activation.exclude: every linear multiplies in bf16
OFF: dict[str, dict[str, Any]] = {
    "optimizer": {"use_fp8": False},
    "weight": {"use_fp8": False},
    "activation": {"use_fp8": False},
    "memory": {"checkpointing": "none", "enable_efficient_checkpoint": False},
}


def only(**changes: Mapping[str, Any]) -> Arm:
    """Everything off but for these options."""
    return {key: {**block, **changes.get(key, {})} for key, block in OFF.items()}


def moments(**changes: Any) -> Arm:
    """The optimizer's states in 8 bits, alone."""
    return only(optimizer={"use_fp8": True, **changes})


def activations(**changes: Any) -> Arm:
    """Tensors saved for backward in FP8, alone unless the changes say more."""
    return only(activation={"use_fp8": True, "exclude": NO_GEMM, "attention": "bf16", **changes})


COMPANDED = {"m1_format": "int8_ratio", "m2_format": "uint8_log"}
E5M2 = {  # weights stay in e4m3: no GPU multiplies e5m2 by e5m2
    "optimizer": {"m1_format": "e5m2", "m2_format": "e5m2", "use_dynamic_range_expansion": False, "block_size": 4096},
    "activation": {"format": "e5m2", "linear_granularity": "per_tensor", "nonlinear_granularity": "per_tensor"},
}
BASE = "bf16"
# folder -> what it is, options; the config has everything on and nothing recomputed
ARMS: dict[str, tuple[str, Arm]] = {
    BASE: ("bf16, the trainer recomputes all blocks", BF16),
    "off": ("every part off", only()),
    "weights": ("FP8 weights", only(weight={"use_fp8": True})),
    "saved": ("saved activations, attention's in bf16", activations()),
    "attention": ("saved activations and attention's", activations(attention="fp8")),
    "fprop": ("saved activations, forward GEMMs (weights cast each time)", activations(exclude=[], grad_format="bf16")),
    "dgrad": ("the same and dX GEMMs", activations(exclude=[])),
    "checkpoint": ("all blocks recomputed from FP8", only(memory=RECOMPUTED)),
    "m": ("exp_avg", moments(use_fp8_m2=False)),
    "v": ("exp_avg_sq", moments(use_fp8_m1=False)),
    "m_v": ("exp_avg and exp_avg_sq", moments()),
    "m_v_plain": ("exp_avg and exp_avg_sq, no expansion", moments(use_dynamic_range_expansion=False)),
    "m_v_beyond": ("exp_avg int8_ratio, exp_avg_sq uint8_log", moments(**COMPANDED)),
    "all": ("all", {}),
    "all_recomputed": ("all, every block recomputed from FP8", {"memory": {"checkpointing": "all"}}),
    "all_plain": ("all, no expansion", {"optimizer": {"use_dynamic_range_expansion": False}}),
    "all_beyond": ("all, int8_ratio and uint8_log", {"optimizer": COMPANDED}),
    "bad": ("all but the weights in E5M2 per tensor, no expansion, blocks of 4096", E5M2),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "coat_mini_flux", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "ablation", metavar="FOLDER")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each arm (default: 3)")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--batch", type=int, default=2, metavar="N")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, one thread each")
    options = parser.parse_args()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    options.arms = list(dict.fromkeys([BASE, *options.arms]))
    return options


def study_of(options: argparse.Namespace) -> Study:
    """The comparison, open; draws the photos."""
    photos, validation = write_photos(options.out / "photos")
    coat = {"memory": {"checkpointing": "none"}, "guard": {"enabled": False}}  # a bad setting is run to its end
    job = make_job(
        options.model, photos, options.out, steps=options.steps, coat=coat, lr=options.lr, batch=options.batch
    )
    settings = Settings(validation=validation, every=options.steps, curve_sigmas=1, final_sigmas=4)
    return open_study(job, settings, folder=options.out / "runs")


def train(options: argparse.Namespace, name: str, seed: int) -> ArmResult:
    """Trains one run, or goes on with it, or finds it done."""
    torch.set_num_threads(1)
    return study_of(options).train_arm(name, ARMS[name][1], seed)


def train_all(options: argparse.Namespace) -> list[ArmResult]:
    """Every run, seed by seed, so that an interrupted ablation has whole seeds."""
    study_of(options)  # written before processes read it
    tasks = [(name, seed) for seed in range(SEEDS_FROM, SEEDS_FROM + options.seeds) for name in options.arms]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = []
        for run in pool.map(train, [options] * len(tasks), *zip(*tasks, strict=True)):
            print(f"{run.name}: loss {run.final_own:.6f}, {run.seconds:.0f} s", flush=True)
            runs.append(run)
    return runs


def score(options: argparse.Namespace, runs: Sequence[ArmResult]) -> Scores:
    """All LoRAs in the bf16 model."""
    study = study_of(options)
    job = JobConfig.from_dict(study.prepare(BASE, BF16, SEEDS_FROM))
    loras, sigmas = {run.name: run.lora for run in runs}, study.settings.final_sigmas
    return score_loras(job, loras, study.held_out, device=study.device, sigmas=sigmas)


def held_bytes(run: ArmResult) -> dict[str, int]:
    """Most bytes of each part in a training step, from the run's own report."""
    record = json.loads((run.lora.parent / "coat" / "memory.json").read_text(encoding="utf-8"))
    return {part: record["phases"]["step"]["most"][part] for part in PARTS}


def pace(run: ArmResult) -> float:
    """Median seconds per step, after the first ones."""
    return median(seconds for _, seconds in RunFolder(run.lora.parent).metrics["s_per_it"][WARM_STEPS:])


def arm_results(runs: Sequence[ArmResult], scores: Scores) -> dict[str, dict[str, Any]]:
    """All numbers of each arm, plain JSON."""
    found = {}
    for name in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == name]
        found[name] = {
            "what": ARMS[name][0],
            "options": ARMS[name][1],
            "in_bf16": [scores.losses[run.name] for run in mine],
            "own": [run.final_own for run in mine],
            "bytes": held_bytes(mine[0]),
            "s_per_step": median(pace(run) for run in mine),
        }
    return found


def table(found: Mapping[str, Mapping[str, Any]], base: float) -> str:
    """Markdown: one row per arm."""
    header = ["part of COAT", "loss", "gap in the bf16 model", "95 % interval", "gap / bf16's sd", "gap, own precision"]
    header += ["verdict", *(f"{part}, MB" for part in PARTS), "s per step"]
    reference, lines = found[BASE], [header, ["---"] * len(header)]
    for name, arm in found.items():
        sizes = [f"{arm['bytes'][part] / 1e6:.2f}" for part in PARTS]
        row, seen = [arm["what"], f"{fmean(arm['in_bf16']):.5f}"], judge(reference["in_bf16"], arm["in_bf16"], base)
        if name == BASE:
            row += ["", "", f"sd {seen.spread:.5f}", "", ""]
        else:
            own = fmean(arm["own"]) - fmean(reference["own"])
            row += [f"{seen.gap:+.5f}", f"{seen.low:+.5f} to {seen.high:+.5f}", f"{seen.gap / seen.spread:+.2f}"]
            row += [f"{own:+.5f}", seen.outcome]
        lines.append([*row, *sizes, f"{arm['s_per_step']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Trains, measures, writes."""
    options = parse_arguments()
    runs = train_all(options)
    scores = score(options, runs)
    found = arm_results(runs, scores)
    text = (
        f"Mini-FLUX, LoRA of rank 16 on a garment it has never seen, batch {options.batch}, {options.steps} steps, "
        f"lr {options.lr:g}, {options.seeds} seeds; loss without a LoRA {scores.base:.5f}. Seconds per step are "
        f"those of a CPU, where FP8 is emulated; torch {torch.__version__}.\n\n{table(found, scores.base)}\n"
    )
    results = {"base": scores.base, "arms": found, "steps": options.steps, "seeds": options.seeds}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    sys.exit(main())
