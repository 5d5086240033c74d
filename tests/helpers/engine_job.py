"""Jobs for the stand-alone engine on the embedded tiny model: 64-px noise images, seconds to run on a CPU."""

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from coat_flux.saves.commit import newest_set
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.tiny_flux import make_tiny_flux

IMAGE_SIZE = 64
TRIGGER = "sks"
FEW_LINEARS = {"network_kwargs": {"only_if_contains": ["blocks.0.attn.to_q", "blocks.1.attn.to_v"]}}
ON_DISK = {"cache_latents": False, "cache_latents_to_disk": True}


def write_images(folder: Path, count: int = 5) -> Path:
    """Random images with captions that hold `[trigger]`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"a [trigger] shirt, number {i}", encoding="utf-8")
    return folder


@contextmanager
def tiny_place(root: Path, images: int = 5, *, tokens: int = 16) -> Iterator[dict[str, Path]]:
    """Model, images and output folder of runs below `root`, for `engine_job`; for speed little is beside the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.data.hold_out.LEVELS", 2)
        patch.setattr("coat_flux.data.hold_out.FEWEST_FORWARDS", 2)
        patch.setattr("coat_flux.trainers.standalone.validation.TRAINED_PHOTOS", 2)
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", tokens)
        patch.setattr("coat_flux.trainers.standalone.trainer.finish", lambda *_: None)
        patch.setattr("os.fsync", lambda file: None)
        yield {
            "model": make_tiny_flux(root / "tiny"),
            "images": write_images(root / "images", images),
            "out": root / "out",
        }


def rows(run: Path) -> list[dict[str, str]]:
    """The table of a run's steps."""
    with (run / "coat" / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses(run: Path) -> list[str]:
    """The loss of each step, to the last digit."""
    return [row["loss"] for row in rows(run)]


def engine_job(
    name: str, *, model: Path, images: Path, out: Path, coat: Mapping[str, Any] | None = None, **blocks: Any
) -> dict[str, Any]:
    """The job as a dictionary, on the folders of `tiny_place`; without `coat` it is `enabled: false`.

    `blocks` are further keys of train, save, sample, network, dataset (the one entry), and a validation block.
    """
    train = {"steps": 4, "lr": 1e-3, "dtype": "bf16", "gradient_checkpointing": False, "disable_sampling": True}
    train["optimizer"] = "adamw" if coat is None else "coat_fp8_adamw"
    dataset = {"folder_path": str(images), "resolution": IMAGE_SIZE, "caption_dropout_rate": 0.2}
    dataset |= {"cache_latents": True, "cache_text_embeddings": True}
    sample = {"prompts": ["[trigger] shirt"], "width": IMAGE_SIZE, "height": IMAGE_SIZE, "sample_steps": 1}
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


def full_job(name: str, place: dict[str, Path], **blocks: Any) -> dict[str, Any]:
    """A job that trains every weight."""
    job = engine_job(name, **place, **blocks)
    del job["config"]["process"][0]["network"]
    return job


def train(name: str, place: dict[str, Path], from_step: int | None = None, **blocks: Any) -> Path:
    """Train a LoRA; returns its file."""
    return COATTrainer(engine_job(name, **place, **blocks)).train(from_step=from_step)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_end(run: Path, other: Path) -> None:
    """Assert that two runs have the same losses, raw and published weights, averages and states of the optimizer."""
    assert losses(run) == losses(other)
    assert_all_bitwise(_end_of(run), _end_of(other))


def _end_of(run: Path) -> dict[str, Tensor]:
    folder = newest_set(run)
    files = [path for path in folder.rglob("*.safetensors") if path.name != "rng.safetensors"]
    tensors = {f"{path.relative_to(folder)} {key}": x for path in files for key, x in load_file(path).items()}
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["params"] == list(saved["state"])
    return tensors | {f"{index} {key}": x for index, state in saved["state"].items() for key, x in state.items()}
