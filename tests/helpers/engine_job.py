"""A job for the stand-alone engine on the embedded tiny model: 64-px noise images, seconds to run on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

IMAGE_SIZE = 64
TRIGGER = "sks"


def write_images(folder: Path, count: int = 5) -> Path:
    """Random images with captions that hold `[trigger]`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a [trigger] shirt, number {i}", encoding="utf-8")
    return folder


def engine_job(
    name: str,
    *,
    model: Path,
    images: Path,
    out: Path,
    coat: Mapping[str, Any] | None = None,
    **blocks: Mapping[str, Any],
) -> dict[str, Any]:
    """The job as a dictionary.

    Args:
        name: of the run.
        model: from `make_tiny_flux`.
        images: from `write_images`.
        out: the training folder.
        coat: the coat block; None is `enabled: false`.
        **blocks: further keys of train, save, sample, network, dataset (the one entry), laid over the defaults; a
            validation block.
    """
    train = {"steps": 4, "lr": 1e-3, "dtype": "bf16", "gradient_checkpointing": False, "disable_sampling": True}
    train["optimizer"] = "adamw" if coat is None else "coat_fp8_adamw"
    dataset = {"folder_path": str(images), "resolution": IMAGE_SIZE, "caption_dropout_rate": 0.2}
    dataset |= {"cache_latents": True, "cache_text_embeddings": True}
    sample = {"prompts": ["[trigger] shirt"], "width": IMAGE_SIZE, "height": IMAGE_SIZE, "sample_steps": 2}
    process = {
        "type": "coat_flux_trainer",
        "training_folder": str(out),
        "device": "cpu",
        "trigger_word": TRIGGER,
        "training_seed": 7,
        "network": {"type": "lora", "linear": 4} | dict(blocks.get("network", {})),
        "save": {"dtype": "float16"} | dict(blocks.get("save", {})),
        "datasets": [dataset | dict(blocks.get("dataset", {}))],
        "train": train | dict(blocks.get("train", {})),
        "model": {"name_or_path": str(model), "is_flux": True},
        "sample": sample | dict(blocks.get("sample", {})),
        "coat": {"enabled": False} if coat is None else dict(coat),
    }
    if "validation" in blocks:
        process["validation"] = dict(blocks["validation"])
    return {"job": "extension", "config": {"name": name, "process": [process]}}
