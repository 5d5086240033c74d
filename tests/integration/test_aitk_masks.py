"""Masks and regularization in ai-toolkit's own trainer and in ours: the same batches have the same loss.

An extension beside ours writes down what `calculate_loss` of jobs of the `sd_trainer` was given, and what came of it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.loader import LatentDataset
from coat_flux.data.masks import normalized
from coat_flux.data.preflight import DataReport
from coat_flux.mini_flux import EMBEDDED_MODEL
from coat_flux.trainers.standalone.flow_matching import sample_losses
from tests.helpers.aitk_standin.real import Checkout, make_real_entry, real_checkout  # noqa: F401
from tests.tolerances import MASKED_LOSS_BF16, MASKED_LOSS_FP32

pytestmark = [pytest.mark.aitk, pytest.mark.timeout(3600)]

STEPS, REG_WEIGHT = 24, 0.375
TENSORS = ("prediction", "latents", "noise")
RECORDER = """
import random
from pathlib import Path

import torch

from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
from toolkit.dataloader_mixins import MaskFileItemDTOMixin

AI_TOOLKIT_EXTENSIONS = []
load, calculate, step = (
    MaskFileItemDTOMixin.load_mask_image, SDTrainer.calculate_loss, SDTrainer.train_single_accumulation
)
records = []


def load_mask_image(self):
    state = random.getstate()
    self.blur = random.random()
    random.setstate(state)
    load(self)


def calculate_loss(self, noise_pred, noise, noisy_latents, timesteps, batch, mask_multiplier=1.0, **others):
    loss = calculate(self, noise_pred, noise, noisy_latents, timesteps, batch, mask_multiplier, **others)
    items = [
        {"path": item.path, "flip": item.flip_x, "blur": getattr(item, "blur", 0.0), "reg": item.is_reg,
         "caption": item.caption}
        for item in batch.file_items
    ]
    tensors = {"prediction": noise_pred, "noise": noise, "latents": batch.latents}
    tensors = {name: x.detach().float().cpu() for name, x in tensors.items()}
    records.append({"step": self.step_num, "items": items, "loss": loss.item(), **tensors})
    return loss


def train_single_accumulation(self, batch):
    total = step(self, batch)
    records[-1]["total"] = total.item()
    torch.save(records, Path(self.save_root).with_suffix(".pt"))
    return total


MaskFileItemDTOMixin.load_mask_image = load_mask_image
SDTrainer.calculate_loss = calculate_loss
SDTrainer.train_single_accumulation = train_single_accumulation
"""


def draw_photo(path: Path, size: tuple[int, int], seed: int, *, alpha: bool, mask: Path | None) -> None:
    """A photo of noise, with a soft ellipse as its alpha channel or as the mask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(seed)
    image = Image.fromarray(draws.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    y, x = np.mgrid[: size[1], : size[0]]
    middle = draws.uniform(0.3, 0.7, 2) * size
    distance = np.hypot((x - middle[0]) / size[0], (y - middle[1]) / size[1])
    opacity = Image.fromarray((255 * np.clip(3 - 9 * distance, 0, 1)).astype(np.uint8))
    if alpha:
        image.putalpha(opacity)
    image.save(path)
    path.with_suffix(".txt").write_text(f"a [trigger] coat {seed}", encoding="utf-8")
    if mask is not None:
        mask.mkdir(exist_ok=True)
        opacity.save(mask / f"{path.stem}.png")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Entries of `datasets`, whose folders' names tell them apart."""
    root = tmp_path_factory.mktemp("data")
    sizes = [(900, 700), (700, 900), (640, 640), (900, 700)]
    for name in ("masked", "inverted", "alpha", "partly", "regular"):
        for seed, size in enumerate(sizes):
            has_mask = name in ("masked", "inverted") or (name == "partly" and seed != 3)
            masks = root / f"{name}_masks" if has_mask else None
            draw_photo(root / name / f"{seed}.png", size, seed, alpha=name == "alpha", mask=masks)
    entries = [
        {"folder_path": "masked", "mask_path": "masked_masks", "flip_x": True},
        {"folder_path": "inverted", "mask_path": "inverted_masks", "invert_mask": True, "mask_min_value": 0.2},
        {"folder_path": "alpha", "alpha_mask": True, "mask_min_value": 0.1, "flip_x": True},
        {"folder_path": "partly", "mask_path": "partly_masks"},
        {"folder_path": "regular", "is_reg": True},
    ]
    for entry in entries:
        entry |= {"resolution": [128], "caption_ext": "txt", "cache_latents": False}
        entry |= {key: str(root / entry[key]) for key in ("folder_path", "mask_path") if key in entry}
    return entries


def key_of(path: str | Path, flip: bool) -> tuple[str, str, bool]:
    return Path(path).parent.name, Path(path).name, flip


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", MASKED_LOSS_FP32), ("bf16", MASKED_LOSS_BF16)])
def test_the_same_batches_have_ai_toolkits_losses(checkout, datasets, dtype, tolerance):
    recorder = checkout.root / "extensions" / "recorder"
    recorder.mkdir(exist_ok=True)
    (recorder / "__init__.py").write_text(RECORDER, encoding="utf-8")
    changes = {"type": "sd_trainer", "coat": ..., "datasets": datasets, "model.quantize": False}
    changes |= {"save.save_every": 100, "sample.sample_every": 100, "validation": ...}
    train = {"steps": STEPS, "batch_size": 2, "optimizer": "adamw", "optimizer_params": {}, "reg_weight": REG_WEIGHT}
    entry = make_real_entry(changes, **train, disable_sampling=True, dtype=dtype, timestep_type="linear")
    name = f"masks_{dtype}"
    out = checkout.run(name, entry)
    records = torch.load((checkout.folder(name)).with_suffix(".pt"), weights_only=False)
    assert [record["step"] for record in records] == list(range(STEPS)), out[-3000:]

    sections = [DatasetSection(**{**item, "resolution": (128,)}) for item in datasets]
    samples = DataReport(sections, entry["trigger_word"]).usable()
    by_key = {key_of(sample.image_path, sample.flip): sample for sample in samples}
    vae = AutoencoderKL.from_pretrained(checkout.root / EMBEDDED_MODEL, subfolder="vae")
    text = SimpleNamespace(identity="", encode=lambda prompts: (torch.zeros(1, 1, 4), torch.zeros(1, 4)))
    ours = LatentDataset(samples, sections, vae, text)
    seen = set()
    for record in records:
        seen |= {(Path(item["path"]).parent.name, item["flip"], item["blur"] > 0.4) for item in record["items"]}
        regular = {item["reg"] for item in record["items"]}
        step = record["step"]
        assert regular == {step > 0 and step % 2 == 0}, step  # ai-toolkit saves before step 0
        weight = REG_WEIGHT if True in regular else 1.0
        masks = []
        for item in record["items"]:
            sample = by_key[key_of(item["path"], item["flip"])]
            assert item["caption"] == sample.caption
            masks.append(ours.encoded(sample, sample.caption, blur=item["blur"])["mask"])
        mask = normalized(torch.stack(masks))
        loss = sample_losses(*(record[name] for name in TENSORS), None, mask).mean().item()
        assert loss == pytest.approx(record["loss"], rel=tolerance), record["items"]
        assert loss * weight == pytest.approx(record["total"], rel=tolerance), record["items"]
    assert {name for name, *_ in seen} == {Path(item["folder_path"]).name for item in datasets}
    assert {flip for _, flip, _ in seen} == {blurred for *_, blurred in seen} == {False, True}
    plain = [sample_losses(*(record[name] for name in TENSORS)).mean().item() for record in records]
    masked = [record["loss"] for record in records]
    assert max(abs(a / b - 1) for a, b in zip(plain, masked, strict=True)) > 10 * tolerance
