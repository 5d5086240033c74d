"""The fine-tuning task of the mini-FLUX: photos of the garment it has never seen, and the job that learns it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from .pictures import BACKGROUNDS, COLOURS, HELD_OUT, PATTERNS, Item, caption, draw

TRIGGER = "dngrs"  # no word of the vocabulary: T5 reads it letter by letter
TRAIN_PHOTOS, VALIDATION_PHOTOS = 32, 64
SEED = 1
SIZE = (64, 64)


def _items() -> list[Item]:
    """All 240 combinations of the held-out garment, shuffled: the first are trained on, the next validated on."""
    items = [Item(HELD_OUT, *names) for names in product(COLOURS, PATTERNS, BACKGROUNDS)]
    random.Random(SEED).shuffle(items)
    return items


def prompt_items(count: int) -> list[Item]:
    """Combinations of the held-out garment that are neither trained nor validated on, in rotation."""
    items = _items()[TRAIN_PHOTOS + VALIDATION_PHOTOS :]
    return [items[i % len(items)] for i in range(count)]


def write_photos(folder: Path) -> tuple[Path, Path]:
    """Draws photos to train on and others, of other combinations, to validate on, unless they are there: two folders.

    `[trigger]` stands for the garment in their captions.
    """
    if not folder.exists():
        items, rng, new = _items(), random.Random(SEED), folder.with_name(f"{folder.name}.part")
        shutil.rmtree(new, ignore_errors=True)
        halves = {"train": items[:TRAIN_PHOTOS], "validation": items[TRAIN_PHOTOS : TRAIN_PHOTOS + VALIDATION_PHOTOS]}
        for name, half in halves.items():
            (new / name).mkdir(parents=True)
            for number, item in enumerate(half):
                path = new / name / f"{number:02d}_{item.colour}_{item.pattern}_{item.background}.png"
                draw(item, SIZE, rng).save(path)
                text = caption(item._replace(garment="[trigger]"), rng)
                path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        new.rename(folder)
    return folder / "train", folder / "validation"


def make_job(
    model: Path, photos: Path, folder: Path, *, steps: int, coat: Mapping[str, Any], lr: float = 1e-3, batch: int = 4
) -> dict[str, Any]:
    """A job as `coat-flux train` takes it: rank 16 on every linear of the blocks, constant learning rate."""
    train = {"batch_size": batch, "steps": steps, "lr": lr, "dtype": "bf16", "gradient_checkpointing": True}
    train |= {"noise_scheduler": "flowmatch", "timestep_type": "sigmoid", "optimizer": "coat_fp8_adamw"}
    dataset = {"folder_path": str(photos), "resolution": SIZE[0], "caption_dropout_rate": 0.05}
    process = {
        "type": "coat_flux_trainer",
        "training_folder": str(folder),
        "device": "cpu",
        "trigger_word": TRIGGER,
        "training_seed": 1,
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "save": {"dtype": "float16", "save_every": 200},
        "datasets": [dataset | {"cache_latents": True, "cache_text_embeddings": True}],
        "train": train | {"disable_sampling": True, "max_grad_norm": 1.0},
        "model": {"name_or_path": str(model), "is_flux": True, "quantize": True, "qtype": "coat_fp8"},
        "coat": dict(coat),
    }
    return {"job": "extension", "config": {"name": "mini_flux_lora", "process": [process]}}
