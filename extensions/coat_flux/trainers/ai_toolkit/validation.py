"""`validation:` inside ai-toolkit: photos kept out of its data sets, and the loss on them by its own forward.

ai-toolkit opens folders, so the photos are divided by folders of links in the run's own:

    coat/photos/<i>            what is trained on, with no link to a photo held out
    coat/held_out/<i>/<r>      the photos held out that are measured at the r-th resolution of data set i

A second set of ai-toolkit's data sets reads the latter before the first is loaded: captions, masks and crops are made
as for training, without repeats, flips and dropout. VAE and text encoders encode them once, the noise is that of
`data.hold_out`, the same as in the stand-alone trainer; the photos are read and encoded as ai-toolkit does it, so that
losses are comparable within a run and between runs of one trainer.

ai-toolkit's step number N is the step after N + 1 updates; it saves where `save_every` divides N, and so is measured
where `every` divides N: a save and a measurement of the same numbers are of the same LoRA.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .common import info

if TYPE_CHECKING:
    from ...data.hold_out import FixedNoise

__all__ = ["HeldOutPhotos", "asked_for"]

FOLDER = Path("coat") / "held_out"
AS_SHOWN_ONCE = {
    "num_repeats": 1,
    "flip_x": False,
    "flip_y": False,
    "caption_dropout_rate": 0.0,
    "token_dropout_rate": 0.0,
    "shuffle_tokens": False,
    "random_triggers": [],
    "random_crop": False,
    "random_scale": False,
    "augments": [],
    "augmentations": None,
    "cache_latents": False,
    "cache_latents_to_disk": False,
    "cache_text_embeddings": False,
    "num_workers": 0,
    "batch_size": 1,
}


def asked_for(process: Any) -> Any:
    """The `validation:` block of a process entry, as `ValidationSection`; `check_job` has looked at it."""
    from ...config.build import build
    from ...config.findings import Findings
    from ...config.job_sections import ValidationSection

    return build(ValidationSection, process.get_conf("validation", None), "validation", Findings(""))


class HeldOutPhotos:
    """The photos held out of a run, and the losses on them so far.

    Args:
        process: built and checked, nothing loaded.
        chosen: folder of a data set, as configured → its photos held out.

    Attributes:
        names: folder → their paths in it.
        curve: (steps done, loss).
    """

    def __init__(self, process: Any, chosen: Mapping[str, tuple[Path, ...]]):
        self._process, self._chosen = process, chosen
        self._configs: list[Any] = []
        self._noise: FixedNoise | None = None
        self.every = asked_for(process).every
        self.names = {folder: [p.relative_to(folder).as_posix() for p in paths] for folder, paths in chosen.items()}
        self.curve: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))

    def of(self, folder: str) -> tuple[Path, ...]:
        """The photos of a folder that are held out."""
        return self._chosen.get(folder, ())

    def add(self, folder: str, configs: list[Any]) -> None:
        """Make the folders of links of one data set.

        Args:
            folder: with photos held out.
            configs: one for each resolution; not changed.
        """
        from ...data.prepare import prepare_copy

        asked = self._process.coat.data
        number = list(self.names).index(folder)
        for place, config in enumerate(configs):
            share = frozenset(self.of(folder)[place :: len(configs)])
            target = Path(self._process.save_root) / FOLDER / str(number) / str(place)
            policy = {"background": asked.background, "transparency": asked.transparency}
            if not share:
                continue
            made = prepare_copy(folder, target, **policy, keep=share, correct=asked.prepare == "auto")
            once = copy.copy(config)
            for name, value in (AS_SHOWN_ONCE | {"folder_path": str(made.folder), "dataset_path": None}).items():
                if hasattr(once, name):
                    setattr(once, name, value)
            if made.mask_folder is not None and once.mask_path is None:
                once.mask_path = str(made.mask_folder)
            self._configs.append(once)

    @torch.no_grad()
    def encode(self) -> None:
        """Let ai-toolkit load and encode them, while VAE and text encoders are there; random numbers go on after it."""
        from toolkit.data_loader import get_dataloader_from_datasets

        from ...data.hold_out import FixedNoise
        from .resume import kept_draws

        process, photos, names = self._process, [], []
        encoders = process._text_encoders()
        homes, vae_home = [next(encoder.parameters()).device for encoder in encoders], process.sd.vae.device
        process.sd.text_encoder_to(process.device_torch)
        with kept_draws():
            torch.manual_seed(0)  # the VAE's latents are drawn
            for batch in get_dataloader_from_datasets(self._configs, 1, process.sd):
                photos.append(self._encoded(batch))
                names.append(Path(batch.file_items[0].path).name)
        for encoder, home in zip(encoders, homes, strict=True):
            encoder.to(home)
        process.sd.vae.to(vae_home)
        order = sorted(range(len(names)), key=lambda i: (names[i], tuple(photos[i]["latents"].shape)))
        self._noise = FixedNoise([photos[i] for i in order], [names[i] for i in order])
        listed = ", ".join(name for found in self.names.values() for name in found)
        info(f"[coat] {len(names)} photos are held out of training: {listed}")

    def _encoded(self, batch: Any) -> dict[str, Any]:
        process, sd = self._process, self._process.sd
        (caption,) = batch.get_caption_list()
        if process.trigger_word is not None:
            caption = sd.inject_trigger_into_prompt(caption, trigger=process.trigger_word, add_if_not_present=True)
        latents = sd.encode_images(list(batch.tensor), device=process.device_torch).to("cpu", torch.float32)[0]
        photo = {"latents": latents, "embeds": sd.encode_prompt([caption]).to("cpu", dtype=torch.float32).detach()}
        if batch.mask_tensor is not None:
            mask = torch.nn.functional.interpolate(batch.mask_tensor[:, :1].float().cpu(), size=latents.shape[-2:])[0]
            photo["mask"] = mask / mask.mean()
        return photo

    def is_due(self, step_num: int, steps: int) -> bool:
        """Whether to measure after the step that ai-toolkit numbers `step_num`."""
        return step_num + 1 == steps or (step_num > 0 and step_num % self.every == 0)

    def measure(self, done: int) -> float:
        """The loss now, with the average where one is kept; training continues as if it had not been measured.

        Args:
            done: steps done.
        """
        from ...data.hold_out import levels_for
        from .resume import kept_draws

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
                at_once = process.train_config.batch_size
                loss = self._noise.mean_loss(self._losses, levels_for(len(self._noise.photos)), lambda _: at_once)
        finally:
            if network is not None:
                network.multiplier = multiplier
            if process.ema is not None:
                process.ema.train()
            for module, was in zip(modules, training, strict=True):
                module.train(was)
        self.curve.append((done, loss))
        return loss

    def _losses(self, photos: list[dict[str, Any]], sigmas: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        from toolkit.prompt_utils import concat_prompt_embeds
        from toolkit.train_tools import get_torch_dtype

        process, sd = self._process, self._process.sd
        device, dtype = process.device_torch, get_torch_dtype(process.train_config.dtype)
        latents = torch.stack([photo["latents"] for photo in photos]).to(device, dtype)
        noise, timesteps = noise.to(device, dtype), (sigmas * 1000).to(device)
        if not sd.is_flow_matching:
            timesteps = timesteps.long()
        embeds = concat_prompt_embeds([photo["embeds"].clone() for photo in photos]).to(device, dtype=dtype)
        predicted = sd.predict_noise(
            latents=sd.add_noise(latents, noise, timesteps).to(device, dtype),
            conditional_embeddings=embeds,
            timestep=timesteps,
            guidance_scale=1.0,
            guidance_embedding_scale=process.train_config.cfg_scale,
            bypass_guidance_embedding=getattr(process.train_config, "bypass_guidance_embedding", False),
        )
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
