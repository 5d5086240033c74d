"""Does it help a garment's colour? LoRAs of the mini-FLUX with masked and colour losses, caption dropout, and ranks.

    python scripts/garment_trials.py [--seeds 3] [--few 2] [--steps 200] [--out FOLDER] [--picture FILE]

A seed has one of 16 colours and 16 drawn photos of plain dungarees in it, 12 to train on and 4 held out, whose captions
name the background alone. All arms of a seed have the same photos, order, noise and timesteps; fp32, without COAT:

    plain           the loss of all latents             masked, m     black of the mask counts m
    colour, mean    plain + W · |mean of e inside|²     colour, low   plain + W · mean inside of |3 x 3 mean of e|²

e = σ (v - target) is the error of the predicted x0, "inside" the mask. Measured: held-out photos, redrawn as by
`validation.fidelity` at the end and at the best of four saves; `ground`, ΔE outside their masks; `others`, ΔE between
photos of other garments redrawn with the LoRA and without; the loss of whole held-out photos. Writes results.json and
table.md after each run; started again it goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from garment_sheet import Fabric, Sheet
from mini_flux.experiment import make_job
from mini_flux.pictures import BACKGROUNDS, GARMENTS, HELD_OUT, caption, draw, random_item
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import avg_pool2d

from coat_flux.base.files import write_file
from coat_flux.data.cache import encode_latents
from coat_flux.data.fidelity import LEVELS, Redrawn, Subject, compare, to_picture, to_pixels
from coat_flux.data.hold_out import FixedNoise
from coat_flux.mini_flux import MINI_FLUX
from coat_flux.trainers.standalone import flow_matching
from coat_flux.trainers.standalone.loading import load_encoders
from coat_flux.trainers.standalone.trainer import COATTrainer
from coat_flux.trainers.standalone.validation import loss_of, redraw

ROOT = Path(__file__).resolve().parents[1]
COLOURS = (  # of seed s: number 5 (s - 1) modulo 16; midway between two known ones, of the VAE's ΔE 5.6 to 7.5
    *((120, 40, 44), (156, 56, 44), (218, 84, 40), (219, 123, 48), (237, 167, 44), (124, 88, 58), (76, 56, 44)),
    *((80, 104, 58), (44, 88, 58), (36, 146, 114), (36, 126, 176), (86, 80, 182), (124, 68, 120), (181, 97, 170)),
    *((162, 52, 106), (219, 85, 108)),
)
SIZE, TRAINED, HELD, OTHERS = 96, 12, 4, 6
LR = 2e-3
LOSSES: dict[str, dict[str, Any]] = {  # arms; "weight" is W
    "plain": {},
    "masked, 0.1": {"mask_min_value": 0.1},
    "masked, 0": {"mask_min_value": 0.0},
    "colour, mean": {"mask_min_value": 0.0, "term": "mean", "weight": 10.0},
    "colour, low": {"mask_min_value": 0.0, "term": "low", "weight": 3.0},
}
SETTINGS: dict[str, dict[str, Any]] = {"dropout 0": {"dropout": 0.0}, "dropout 0.3": {"dropout": 0.3}}
SETTINGS |= {"rank 4": {"rank": 4}, "rank 64": {"rank": 64}}  # of the plain ones 0.05 and 16
MEASURES = ("colour", "colour_p95", "texture", "best", "ground", "others", "loss")
SHOWN = ("photo", "without the LoRA", "with the LoRA", "the VAE alone")


def write_photos(folder: Path, seed: int) -> None:
    """Photos of one garment with captions in `photos`, and its masks in `masks`."""
    rng, (drawing, aspect) = random.Random(seed), GARMENTS[HELD_OUT]
    for number in range(TRAINED + HELD):
        sheet = Sheet((SIZE, SIZE), aspect, rng.uniform(0.68, 0.86))
        drawing(sheet, Fabric(COLOURS[5 * (seed - 1) % len(COLOURS)]))
        shown = sheet.finish(None, (rng.randint(-18, 18), rng.randint(-9, 9)))
        shown = shown.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC)
        name = list(BACKGROUNDS)[number % len(BACKGROUNDS)]
        ground = tuple(round(min(level + rng.uniform(-10, 10), 255)) for level in BACKGROUNDS[name])
        photo = Image.alpha_composite(Image.new("RGBA", shown.size, (*ground, 255)), shown).convert("RGB")
        for place, image in (("photos", photo), ("masks", shown.getchannel("A"))):
            (folder / place).mkdir(parents=True, exist_ok=True)
            image.save(folder / place / f"{number:02d}.png")
        text = f"a photo of a [trigger] on a {name} background\n"
        (folder / "photos" / f"{number:02d}.txt").write_text(text, encoding="utf-8")


def other_garments() -> list[Subject]:
    """Garments and colours that the mini-FLUX knows, with their captions."""
    encoders, rng, subjects = load_encoders(str(MINI_FLUX), torch.float32), random.Random(0), []
    for item in [random_item(rng) for _ in range(OTHERS)]:
        picture = np.array(draw(item, (SIZE, SIZE), rng))
        embeds, pooled = encoders.text.encode([caption(item, rng)])
        inputs = {"latents": encode_latents(encoders.vae, to_pixels(picture))[0]}
        inputs |= {"prompt_embeds": embeds[0], "pooled": pooled[0]}
        subjects.append(Subject(picture, np.ones((SIZE, SIZE), bool), inputs))
    return subjects


def drawn_by(session: Any, subjects: Sequence[Subject]) -> list[np.ndarray]:
    """Pictures by the VAE alone, then those of `Redrawn.measure`, for each subject one a level."""
    pictures: list[np.ndarray] = []
    hook = session.vae.decoder.register_forward_hook(lambda *call: pictures.append(to_picture(call[-1])))
    model, cpu = session.transformer, torch.device("cpu")
    with session.between_steps("validate"), hook:
        redraw(Redrawn(subjects, None), 0, model, session.vae, dtype=session.dtype, device=cpu)
    return pictures


def colour_losses(term: str, weight: float) -> Callable[..., Tensor]:
    """`flow_matching.losses_of` without weights by the mask, and with a term for the colour inside it."""

    def losses(transformer: Any, drawn: Any, dtype: torch.dtype, loss_type: str = "mse") -> Tensor:
        latents, noise, sigma = drawn["latents"], drawn["noise"], drawn["sigmas"].view(-1, 1, 1, 1)
        x_t = (1 - sigma) * latents + sigma * noise
        texts = drawn["prompt_embeds"], drawn["pooled"]
        error = flow_matching.predict_velocity(transformer, x_t, drawn["sigmas"], *texts, dtype=dtype)
        error, inside = error - (noise - latents), (drawn["mask"] > 0).float()
        e, area = sigma * error * inside, inside.sum((2, 3), keepdim=True).clamp(min=1)
        if term == "mean":
            colour = (e.sum((2, 3), keepdim=True) / area).square()
        else:
            low = avg_pool2d(e, 3, 1, 1) / avg_pool2d(inside, 3, 1, 1).clamp(min=0.1) * inside
            colour = low.square().sum((2, 3), keepdim=True) / area
        return error.square().mean((1, 2, 3)) + weight * colour.mean((1, 2, 3))

    return losses


def train(out: Path, steps: int, arm: str, seed: int, others: Sequence[Subject]) -> dict[str, Any]:
    """Trains one run from its start and measures it; pictures go to `<out>/pictures`."""
    settings, name = (LOSSES | SETTINGS)[arm], re.sub(r"\W+", "_", f"{arm} seed {seed}")
    photos, held = out / "photos" / str(seed), [f"{TRAINED + number:02d}.png" for number in range(HELD)]
    write_photos(photos, seed)
    shutil.rmtree(out / "runs" / name, ignore_errors=True)
    job = make_job(MINI_FLUX, photos / "photos", out / "runs", steps=steps, lr=LR, coat={"enabled": False})
    job["config"]["name"], process = name, job["config"]["process"][0]
    process |= {"training_seed": seed, "validation": {"hold_out": held, "every": steps, "fidelity": True}}
    masks = {"mask_path": str(photos / "masks"), "mask_min_value": settings.get("mask_min_value", 1.0)}
    process["datasets"][0] |= masks | {"resolution": SIZE, "caption_dropout_rate": settings.get("dropout", 0.05)}
    process["network"] |= dict.fromkeys(("linear", "linear_alpha"), settings.get("rank", 16))
    process["save"]["save_every"], process["model"]["quantize"] = steps // 4, False
    process["train"] |= {"lr_scheduler": "cosine", "dtype": "fp32", "optimizer": "adamw"}
    seen: dict[str, Any] = {}

    def observe(session: Any) -> None:
        if session.step == 0:
            seen["session"], subjects = session, session.redrawn.subjects
            seen["before"] = [drawn_by(session, each) for each in (subjects, others)]

    began, losses_of = time.monotonic(), flow_matching.losses_of
    try:
        if "term" in settings:
            flow_matching.losses_of = colour_losses(settings["term"], settings["weight"])
        COATTrainer(job, observer=observe).train()
    finally:
        flow_matching.losses_of = losses_of
    session, before, seconds = seen["session"], seen["before"], time.monotonic() - began
    subjects, whole = session.redrawn.subjects, np.ones((SIZE, SIZE), bool)
    after = [drawn_by(session, each) for each in (subjects, others)]
    changes = [compare(*pair, whole).colour for pair in zip(before[1], after[1], strict=True)]
    grounds, tiles = {"ground_before": before[0], "ground": after[0]}, []
    for key, drawn in grounds.items():
        photo_of = [subject for subject in subjects for _ in LEVELS]
        grounds[key] = fmean(compare(x.picture, y, ~x.mask).colour for x, y in zip(photo_of, drawn[HELD:], strict=True))
    for number, subject in enumerate(subjects):
        last = HELD + (number + 1) * len(LEVELS) - 1
        mask = np.repeat(subject.mask[..., None], 3, 2).astype(np.uint8) * 255
        tiles.append(np.hstack([subject.picture, before[0][last], after[0][last], after[0][number], mask]))
    (out / "pictures").mkdir(exist_ok=True)
    Image.fromarray(np.vstack(tiles)).save(out / "pictures" / f"{name}.png")
    unmasked = [{key: value for key, value in photo.items() if key != "mask"} for photo in session.noise.photos]
    with session.between_steps("validate"):
        loss = loss_of(session.transformer, FixedNoise(unmasked), 16, dtype=session.dtype, device=torch.device("cpu"))
    rows = session.redrawn.rows()  # step, three measures, those of the VAE
    numbers = dict(zip(MEASURES[:3], rows[-1][1:4], strict=True)) | {"best": min(row[1] for row in rows[1:])}
    numbers |= {**grounds, "others": fmean(changes[OTHERS:]), "loss": loss, "seconds": seconds}
    return {"arm": arm, "seed": seed, "name": name, **numbers, "rows": rows}


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Means with standard deviations over seeds, and mean differences from plain with standard errors."""
    plain = {each["seed"]: each for each in results if each["arm"] == "plain"}
    marks = [(*each["rows"][0][1:5], each["ground_before"]) for each in plain.values()]
    text = "Without the LoRA: ΔE {:.2f}, 95 % {:.2f}, texture {:.2f}; the VAE alone ΔE {:.2f}; ground {:.2f}.\n"
    text = text.format(*map(fmean, zip(*marks, strict=True)))
    for title, minus in (("mean (sd)", False), ("minus plain, same seed (standard error)", True)):
        text += "\n| " + " | ".join((title, "seeds", *MEASURES)) + " |\n" + "|---" * (len(MEASURES) + 2) + "|\n"
        for arm in LOSSES | SETTINGS:
            runs = [each for each in results if each["arm"] == arm]
            if len(runs) < 2 or (minus and arm == "plain"):
                continue
            cells = [arm, str(len(runs))]
            for measure in MEASURES:
                values = [run[measure] - minus * plain[run["seed"]][measure] for run in runs]
                spread = stdev(values) / (math.sqrt(len(values)) if minus else 1)
                cells.append(f"{fmean(values):{'+' if minus else ''}.3f} ({spread:.3f})")
            text += "| " + " | ".join(cells) + " |\n"
    return text


def picture(tiles: Path, target: Path) -> None:
    """A run's last held-out photo, its drawings and their ΔE, side by side."""
    with Image.open(tiles) as image:
        *shown, mask = np.split(np.array(image)[-SIZE:], len(SHOWN) + 1, axis=1)
    font, side, gap = ImageFont.load_default(17), 256, 8
    page = Image.new("RGB", (len(SHOWN) * (side + gap) - gap, side + 30), "white")
    for i, (name, tile) in enumerate(zip(SHOWN, shown, strict=True)):
        page.paste(Image.fromarray(tile).resize((side, side), Image.Resampling.BICUBIC), (i * (side + gap), 0))
        text = name if i == 0 else f"{name}: {compare(shown[0], tile, mask[..., 0] > 0).colour:.1f}"
        ImageDraw.Draw(page).text((i * (side + gap) + side // 2, side + 6), text, "black", font, anchor="ma")
    page.save(target, optimize=True)


def main() -> None:
    """Trains what is missing, the first seeds of all arms first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "garment_trials", metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of the losses (default: 3)")
    parser.add_argument("--few", type=int, default=2, metavar="N", help="of dropout and rank (default: 2)")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of a run, a multiple of 4 (default: 200)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of the best loss, seed 1, such as strip.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out, others = options.out.resolve(), other_garments()
    path = out / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    tasks = [(arm, seed) for arms in (LOSSES, SETTINGS) for seed in range(1, options.few + 1) for arm in arms]
    tasks += [(arm, seed) for seed in range(options.few + 1, options.seeds + 1) for arm in LOSSES]
    for arm, seed in tasks:
        if all((each["arm"], each["seed"]) != (arm, seed) for each in results):
            results.append(train(out, options.steps, arm, seed, others))
            write_file(path, json.dumps(results, indent=1) + "\n")
            write_file(out / "table.md", tables(results))
            print(f"{arm}, seed {seed}: " + ", ".join(f"{key} {results[-1][key]:.3f}" for key in MEASURES), flush=True)
    print(tables(results))
    if options.picture:
        first = [each for each in results if each["seed"] == 1 and each["arm"] in LOSSES]
        means = {arm: fmean(each["colour"] for each in results if each["arm"] == arm) for arm in LOSSES}
        best = min(first, key=lambda each: means[each["arm"]])
        picture(out / "pictures" / f"{best['name']}.png", options.picture)


if __name__ == "__main__":
    main()
