"""From nothing to a trained LoRA: `python scripts/quickstart.py [--seed N]`.

1. Makes a virtual environment in `.venv` (when not started from one) and installs torch and this package.
2. Puts the embedded mini-FLUX, which draws clothes of 64 pixels, into `models/coat_mini_flux`; nothing is downloaded.
3. Trains a LoRA on `datasets_example/clothing`, a garment the model has never seen, with
   `configs/flux_clothing_tiny.yaml`, every COAT part on.
4. Checks that the fixed-noise validation loss fell.
5. Loads the LoRA into a fresh diffusers pipeline, draws the same prompts without and with it, and has a classifier
   count in how many of them the trigger word now means the garment.

Exits non-zero when a check fails. Every run starts over.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _environment

if TYPE_CHECKING:
    from PIL.Image import Image

ROOT = _environment.ROOT
CONFIG = ROOT / "configs" / "flux_clothing_tiny.yaml"
MODEL = ROOT / "models" / "coat_mini_flux"
RUN_NAME = "coat_quickstart"
IMAGE_SCALE = 4
# 8-bit levels: what rounding alone may do to an image is below 1 everywhere and far below it on average
LEAST_CHANGE = 0.5


class QuickstartError(RuntimeError):
    """A check failed; the message says which."""


def log(message: str) -> None:
    """One line of progress."""
    print(f"[quickstart] {message}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: what the config says)")
    parser.add_argument("--seed", type=int, metavar="N", help="of training and pictures (default: the config's)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the pictures here as well (.png, .jpg)")
    _environment.add_options(parser)
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed {options.seed}: must be at least 0")
    if options.picture is not None:
        if options.picture.suffix.lower() not in {".png", ".jpg", ".jpeg"}:
            parser.error(f"--picture {options.picture}: must end in .png or .jpg")
        options.picture = options.picture.absolute()
    return options


def read_job(model: Path, steps: int | None, seed: int | None) -> dict[str, Any]:
    """Return the config under the quickstart's own name, with the model, the steps and the seed put in."""
    from coat_flux.config.job_file import load_job_yaml

    job = load_job_yaml(CONFIG, name=RUN_NAME)
    process = job["config"]["process"][0]
    process["model"]["name_or_path"] = str(model)
    if steps is not None:
        process["train"]["steps"] = steps
    if seed is not None:
        process["training_seed"] = process["sample"]["seed"] = seed
    return job


def train(job: dict[str, Any]) -> Path:
    """Train from the start and return the LoRA's file."""
    from coat_flux import COATTrainer
    from coat_flux.base.run_log import quiet_libraries

    quiet_libraries()
    folder = Path(job["config"]["process"][0]["training_folder"]) / RUN_NAME
    if folder.exists():
        log(f"removing the run of an earlier quickstart in {folder}")
        shutil.rmtree(folder)
    return COATTrainer(job).train().resolve()


def check_validation(run: Path) -> None:
    """The fixed-noise validation loss must have fallen."""
    with (run / "coat" / "validation.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    log(f"fixed-noise validation loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    if not losses[-1] < losses[0]:
        raise QuickstartError("the validation loss must fall; try more --steps")


def check_pictures(model: Path, lora: Path, job: dict[str, Any], *, whole: bool) -> Image:
    """Draw the config's sample prompts with the model alone and with the LoRA, loaded by diffusers, and compare them.

    After a whole training the trigger word must mean the garment of the example photos more often, by the shipped
    classifier. Returns the pictures as a grid: a prompt above each column, without the LoRA above, with it below.
    """
    from mini_flux.pictures import GARMENTS, HELD_OUT
    from mini_flux.samples import draw_prompts, grid, load_pipeline
    from mini_flux.scorer import judge, load_scorer

    process = job["config"]["process"][0]
    sample = process["sample"]
    prompts = [prompt.replace("[trigger]", process["trigger_word"]) for prompt in sample["prompts"]]
    size, seed = (sample["width"], sample["height"]), sample["seed"]
    pipeline = load_pipeline(model)
    without = draw_prompts(pipeline, prompts, size, seed=seed)
    pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
    with_lora = draw_prompts(pipeline, prompts, size, seed=seed)
    scorer, garment = load_scorer(), list(GARMENTS).index(HELD_OUT)
    before = int((judge(scorer, without)[:, 0] == garment).sum())
    after = int((judge(scorer, with_lora)[:, 0] == garment).sum())
    log(f"the trigger word draws the new garment in {after} of {len(prompts)} pictures with the LoRA, {before} without")
    change = (with_lora.float() - without.float()).abs().mean().item()
    if not change >= LEAST_CHANGE:
        raise QuickstartError(f"the LoRA changes the pictures by {change:.3f} levels: must be {LEAST_CHANGE} or more")
    if whole and not after > before:
        raise QuickstartError("the trigger word must draw the garment more often with the LoRA; try more --steps")
    headline = f"{after} of {len(prompts)} pictures with the LoRA show the new garment, {before} without it"
    return grid({"without LoRA": without, "with LoRA": with_lora}, prompts, headline, enlarged=IMAGE_SCALE)


def run(options: argparse.Namespace) -> None:
    """Do everything after the installation and print what came out."""
    from coat_flux.mini_flux import make_mini_flux

    started = time.monotonic()
    model = make_mini_flux(MODEL)
    log(f"the embedded FLUX model is in {model}")
    job = read_job(model, options.steps, options.seed)
    process = job["config"]["process"][0]
    steps, seed = process["train"]["steps"], process["training_seed"]
    log(f"training as {CONFIG.relative_to(ROOT)} says, {steps} steps, seed {seed}")
    lora = train(job)
    check_validation(lora.parent)
    page = check_pictures(model, lora, job, whole=options.steps is None)
    picture = lora.parent / "coat" / "without_and_with_lora.png"
    for path in filter(None, (picture, options.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)
        page.save(path, quality=90)
    log(f"LoRA: {lora}")
    log(f"run folder: {lora.parent}")
    log(f"samples of the training: {lora.parent / 'samples'}")
    log(f"pictures without and with the LoRA: {picture}")
    log(f"model: {model}")
    log("your own photos: coat-flux new path/to/photos (README.md, Train on your own photos)")
    log(f"done in {time.monotonic() - started:.0f} s after installation")


def main() -> int:
    """Run the quickstart; 0 when every check passed."""
    options = parse_arguments()
    _environment.prepare(options.torch_index_url)
    os.chdir(ROOT)  # the config's paths start here
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # what they say about the embedded model is of no use to anyone
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        run(options)
    except QuickstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
