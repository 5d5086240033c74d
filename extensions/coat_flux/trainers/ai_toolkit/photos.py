"""The photos of a job: inspected, corrected, held out; the loss on the latter.

ai-toolkit opens the folders of `process.dataset_configs`, one config for each resolution. Photos are divided by folders
of links in the run's own:

    coat/photos/<i>          trained on, with corrected copies of misread photos
    coat/held_out/<i>        held out, of the i-th set at one resolution

The latter are loaded by ai-toolkit's data sets, and encoded once.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...base.rng import kept_draws
from ...config.ai_toolkit_keys import BLOCKS
from ...config.coat import DataOptions
from ...config.findings import Findings
from ...config.job_sections import ValidationSection
from ...config.options import build
from ...data.fidelity import Redrawn, Subject, evenly, to_picture, upper_half
from ...data.files import MEDIA_EXTENSIONS, find_images
from ...data.hold_out import FixedNoise, choose_hold_out
from ...data.preflight import inspect_process
from ...data.prepare import IMAGES, MASKS, prepare_copy
from .contract import check_model
from .host import info

TRAINED_FOLDER = Path("coat") / "photos"
HELD_OUT_FOLDER = Path("coat") / "held_out"
AT_DEFAULT = (  # settings of a photo that is shown once, as it is
    "num_repeats",
    "flip_x",
    "flip_y",
    "caption_dropout_rate",
    "token_dropout_rate",
    "shuffle_tokens",
    "random_triggers",
    "random_crop",
    "random_scale",
    "augments",
    "augmentations",
    "cache_latents",
    "cache_latents_to_disk",
    "cache_text_embeddings",
)


def check_photos(process: Any) -> HeldOutPhotos | None:
    """Inspect the data sets, correct photos; returns those held out."""
    by_folder: dict[tuple[Any, ...], list[Any]] = {}
    for config in process.dataset_configs:
        folder = config.dataset_path or config.folder_path
        key = folder, config.alpha_mask, config.mask_path
        if not os.path.isfile(folder):  # a list
            by_folder.setdefault(key, []).append(config)
    report = inspect_process(process.config)
    report.usable(info)
    for table in report.tables:
        info(table)
    validation = build(ValidationSection, process.get_conf("validation", None), "validation", Findings(""))
    trained = [key[0] for key, configs in by_folder.items() if not configs[0].is_reg]
    chosen = choose_hold_out(trained, validation.hold_out, process.training_seed)
    held_out = HeldOutPhotos(process, dict(zip(trained, chosen, strict=True)), validation)
    for index, ((folder, *_), configs) in enumerate(by_folder.items()):
        out = held_out.photos.get(folder, ())
        keep = None
        if out:
            held_out.add(folder, configs)
            files = find_images(Path(folder), MEDIA_EXTENSIONS)
            keep = frozenset(files) - set(out)
        target = Path(process.save_root) / TRAINED_FOLDER / str(index)
        read_copies(process.coat.data, Path(folder), target, configs, keep)
    return held_out if any(chosen) else None


def read_copies(
    options: DataOptions, folder: Path, target: Path, configs: list[Any], keep: frozenset[Path] | None
) -> None:
    """Redirect the configs of a folder to `target`, which links `keep` (None: all) of its files."""
    if configs[0].mask_path is not None:
        options = replace(options, transparency="background")
    corrected = prepare_copy(folder, target, options, keep, alpha_mask=configs[0].alpha_mask)
    if corrected is None:
        return
    if corrected:
        counts = Counter(trait for traits in corrected.values() for trait in traits)
        traits = ", ".join(f"{count} {trait}" for trait, count in sorted(counts.items()))
        info(f"{folder}: {len(corrected)} photos are read from corrected copies in {target / IMAGES} ({traits})")
    for config in configs:
        config.folder_path = str(target / IMAGES)
        config.dataset_path = None
        if options.transparency == "mask":
            config.mask_path = str(target / MASKS)


class HeldOutPhotos:
    """The held-out photos of a run by data set; `curve` has (steps done, loss), `redrawn` their fidelity or None."""

    redrawn: Any = None

    def __init__(self, process: Any, photos: Mapping[str, tuple[Path, ...]], validation: ValidationSection):
        self._process = process
        self.photos = photos
        self.every = validation.every
        self._fidelity = validation.fidelity
        self._configs: list[Any] = []
        self._noise: FixedNoise | None = None
        self.names: dict[str, list[str]] = {}
        for folder, paths in photos.items():
            self.names[folder] = [path.relative_to(folder).as_posix() for path in paths]
        self.curve: list[tuple[int, float]] = []

    def add(self, folder: str, configs: list[Any]) -> None:
        """Make the folders of links of one data set."""
        root = Path(self._process.save_root) / HELD_OUT_FOLDER
        for place, config in enumerate(configs):
            share = frozenset(self.photos[folder][place :: len(configs)])
            if not share:
                continue
            once = copy.copy(config)
            for key in AT_DEFAULT:
                setattr(once, key, json.loads(BLOCKS["DatasetConfig"][key]["default"]))
            once.num_workers, once.batch_size = 0, 1
            target = root / str(len(self._configs))
            read_copies(self._process.coat.data, Path(folder), target, [once], share)
            self._configs.append(once)

    @torch.no_grad()
    def encode(self) -> None:
        """Encode them, while VAE and text encoders are loaded."""
        process, sd = self._process, self._process.sd
        check_model(sd, held_out=True)
        from toolkit.data_loader import get_dataloader_from_datasets
        from toolkit.train_tools import get_torch_dtype

        self._place = process.device_torch, get_torch_dtype(process.train_config.dtype)  # of the model's inputs
        photos = []
        encoders = process._text_encoders()
        homes = [next(encoder.parameters()).device for encoder in encoders]
        vae_home = sd.vae.device
        sd.text_encoder_to(process.device_torch)
        with kept_draws():
            torch.manual_seed(0)  # the VAE's latents are random
            for batch in get_dataloader_from_datasets(self._configs, 1, sd):
                (caption,) = batch.get_caption_list()
                if process.trigger_word is not None:
                    trigger = process.trigger_word
                    caption = sd.inject_trigger_into_prompt(caption, trigger=trigger, add_if_not_present=True)
                latents = sd.encode_images(list(batch.tensor), device=process.device_torch)
                latents = latents.to("cpu", torch.float32)[0]
                embeds = sd.encode_prompt([caption]).to("cpu", dtype=torch.float32)
                photo = {"latents": latents, "embeds": embeds.detach()}
                if batch.mask_tensor is not None:
                    mask = batch.mask_tensor[:, :1].float().cpu()
                    mask = torch.nn.functional.interpolate(mask, size=latents.shape[-2:])[0]
                    photo["mask"] = mask / mask.mean()
                shown = torch.ones(batch.tensor.shape[-2:]) if batch.mask_tensor is None else batch.mask_tensor[0, 0]
                subject = Subject(to_picture(batch.tensor), upper_half(shown), photo)
                photos.append((Path(batch.file_items[0].path).name, subject))
        for encoder, home in zip(encoders, homes, strict=True):
            encoder.to(home)
        sd.vae.to(vae_home)
        photos.sort(key=lambda photo: (photo[0], tuple(photo[1].inputs["latents"].shape)))
        subjects = [subject for _, subject in photos]
        self._noise = FixedNoise([subject.inputs for subject in subjects])
        if self._fidelity and sd.is_flow_matching:
            self.redrawn = Redrawn(evenly(subjects), None)
        elif self._fidelity:
            info("validation.fidelity: is of models with flow matching; not measured")
        names = ", ".join(name for names in self.names.values() for name in names)
        info(f"{len(photos)} photos are held out of training: {names}")

    def measure(self, done: int) -> float:
        """The loss after `done` steps, of the EMA if there is one."""
        with self._evaluating():
            loss = self._noise.mean_loss(self._losses, self._process.train_config.batch_size)
        self.curve.append((done, loss))
        return loss

    def redraw(self, done: int) -> None:
        """`Redrawn.measure` after `done` steps, as `measure`."""
        sd, home = self._process.sd, self._process.sd.vae.device
        with self._evaluating():
            self.redrawn.measure(
                done, lambda photo, x, sigmas: self._predict([photo], x, sigmas * 1000), sd.decode_latents
            )
        sd.vae.to(home)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        process, network = self._process, self._process.network
        modules = [module for module in (process.sd.unet, network) if module is not None]
        training = [module.training for module in modules]
        multiplier = getattr(network, "multiplier", 1.0)
        for module in modules:
            module.eval()
        if process.ema is not None:
            process.ema.eval()
        try:
            with kept_draws(), network if network is not None else nullcontext():
                if network is not None:
                    network.multiplier = 1.0
                yield
        finally:
            if network is not None:
                network.multiplier = multiplier
            if process.ema is not None:
                process.ema.train()
            for module, was in zip(modules, training, strict=True):
                module.train(was)

    def _predict(self, photos: Sequence[Mapping[str, Any]], x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        from toolkit.prompt_utils import concat_prompt_embeds

        config, (device, dtype) = self._process.train_config, self._place
        embeds = concat_prompt_embeds([photo["embeds"].clone() for photo in photos]).to(device, dtype=dtype)
        predicted: torch.Tensor = self._process.sd.predict_noise(
            latents=x.to(device, dtype),
            conditional_embeddings=embeds,
            timestep=timesteps.to(device),
            guidance_scale=1.0,
            guidance_embedding_scale=config.cfg_scale,
            bypass_guidance_embedding=getattr(config, "bypass_guidance_embedding", False),
        )
        return predicted

    def _losses(self, photos: list[Mapping[str, Any]], sigmas: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        sd = self._process.sd
        device, dtype = self._place
        latents = torch.stack([photo["latents"] for photo in photos]).to(device, dtype)
        noise = noise.to(device, dtype)
        timesteps = (sigmas * 1000).to(device)
        if not sd.is_flow_matching:
            timesteps = timesteps.long()
        predicted = self._predict(photos, sd.add_noise(latents, noise, timesteps), timesteps)
        if sd.is_flow_matching:
            target = noise.float() - latents.float()
        elif sd.prediction_type == "v_prediction":
            target = sd.noise_scheduler.get_velocity(latents, noise, timesteps).float()
        else:
            target = noise.float()
        errors = (predicted.float() - target).square()
        if "mask" in photos[0]:
            errors = errors * torch.stack([photo["mask"] for photo in photos]).to(device)
        return errors.mean(dim=(1, 2, 3))
