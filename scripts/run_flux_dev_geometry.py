"""Train a few steps at FLUX.1-dev's size with random weights: `python scripts/run_flux_dev_geometry.py [CONFIG]`.

Runs the stand-alone trainer on a config as it is, except that the transformer has FLUX.1-dev's geometry and random
weights, made on the device, and the encoders are those of the embedded tiny model. Nothing is downloaded. Prints the
loss, seconds per step and peak memory that the run measured, and the peak that `coat-flux plan` predicts. On a CPU, use
--double, --single and --heads to make the model small.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
NAME = "flux_dev_geometry"


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "flux_clothing_coat_80gb.yaml")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--double", type=int, default=19, help="double blocks (default: 19)")
    parser.add_argument("--single", type=int, default=38, help="single blocks (default: 38)")
    parser.add_argument("--heads", type=int, default=24, help="attention heads of 128 (default: 24)")
    parser.add_argument("--resolution", type=int, nargs="+", help="instead of the config's")
    parser.add_argument("--batch-size", type=int, help="instead of the config's")
    parser.add_argument("--checkpointing", choices=("auto", "none", "all"), help="instead of the config's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def text_widths(model: Path) -> dict[str, int]:
    """Return the two text widths of the embedded model's encoders."""
    import json

    clip = json.loads((model / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    t5 = json.loads((model / "text_encoder_2" / "config.json").read_text(encoding="utf-8"))
    return {"joint_attention_dim": t5["d_model"], "pooled_projection_dim": clip["hidden_size"]}


def read_job(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return the config with the embedded encoders, few steps and no sampling."""
    from coat_flux.config.job_file import load_job_yaml

    job = load_job_yaml(options.config, name=NAME)
    process = job["config"]["process"][0]
    process["device"] = options.device
    process["model"]["name_or_path"] = str(model)
    process["train"].update(steps=options.steps, disable_sampling=True)
    if options.resolution:
        process["datasets"][0]["resolution"] = options.resolution
    if options.batch_size:
        process["train"]["batch_size"] = options.batch_size
    if options.checkpointing:
        process["coat"].setdefault("memory", {})["checkpointing"] = options.checkpointing
    return job


def describe_model(tiny: Path, geometry: dict[str, int], folder: Path) -> Path:
    """Return a model folder with the embedded encoders and this transformer's config, for `plan` to read its sizes."""
    from coat_flux.mini_flux.geometry import make_flux_dev_geometry

    shutil.copytree(tiny, folder, ignore=lambda _, names: [name for name in names if name == "transformer"])
    make_flux_dev_geometry("meta", **geometry).save_config(folder / "transformer")
    return folder


def main() -> None:
    """Train and print what was measured."""
    from coat_flux.mini_flux.folder import EMBEDDED_MODEL, make_tiny_flux

    options = parse_arguments()
    tiny = make_tiny_flux(ROOT / EMBEDDED_MODEL)
    geometry = {
        "num_layers": options.double,
        "num_single_layers": options.single,
        "num_attention_heads": options.heads,
        **text_widths(tiny),
    }
    with tempfile.TemporaryDirectory() as parent:
        run(options, read_job(options, describe_model(tiny, geometry, Path(parent) / "model")), geometry)


def run(options: argparse.Namespace, job: dict[str, Any], geometry: dict[str, int]) -> None:
    """Train the job and print what was measured, next to the plan."""
    from coat_flux import COATTrainer
    from coat_flux.config.job import JobConfig
    from coat_flux.mini_flux.geometry import make_flux_dev_geometry
    from coat_flux.plan.predict import predict
    from coat_flux.trainers.standalone import session

    session.load_transformer = lambda _, dtype, *__, **___: make_flux_dev_geometry(options.device, dtype, **geometry)
    total = torch.cuda.get_device_properties(options.device).total_memory if options.device != "cpu" else None
    predicted = predict(JobConfig.from_dict(job), device_bytes=total)
    folder = Path(job["config"]["process"][0]["training_folder"]) / NAME
    shutil.rmtree(folder, ignore_errors=True)
    COATTrainer(job).train()
    with (folder / "coat" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = statistics.median(float(row["s_per_it"]) for row in rows[len(rows) // 4 :])
    peak = max(float(row["peak_memory_gb"]) for row in rows)
    print(f"{options.config.name}: {len(rows)} steps, loss {rows[0]['loss']} -> {rows[-1]['loss']}")
    print(f"median {seconds:.3f} s/it after the first quarter")
    step = next(phase for phase in predicted.phases if phase.name == "step")
    print(
        f"peak memory of the steps: {peak:.2f} GB, predicted {step.total / 1e9:.2f} GB with "
        f"{len(predicted.recomputed)} of {predicted.blocks} blocks recomputed"
    )


if __name__ == "__main__":
    main()
