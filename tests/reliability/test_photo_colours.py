"""Cut-outs reach the VAE and the loss as the config asks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from PIL import Image

from coat_flux.config.coat import DataOptions
from coat_flux.config.job_sections import DatasetSection, TrainSection
from coat_flux.data.files import DatasetError
from coat_flux.data.images import read_photo
from coat_flux.data.loader import Batch, LatentDataset
from coat_flux.data.preflight import DataReport
from coat_flux.trainers.standalone.flow_matching import Objective
from tests.helpers.asserts import assert_bitwise
from tests.reliability.photos import noise


@pytest.fixture(scope="module")
def vae(place):
    return AutoencoderKL.from_pretrained(place["model"], subfolder="vae").eval()


def no_text(prompts):
    """In place of the text encoders: every prompt has the same embedding."""
    return torch.zeros(len(prompts), 4, 8), torch.zeros(len(prompts), 8)


def garment() -> Image.Image:
    """Colours from pale to strong, within sRGB."""
    return Image.fromarray((np.asarray(noise((64, 64), seed=3)) * 0.8 + 20).astype(np.uint8))


def cut_out(path: Path) -> Path:
    """The garment in the left half, bright red hidden under the transparent right half."""
    picture = garment().convert("RGBA")
    picture.paste((255, 0, 0, 0), (32, 0, 64, 64))
    picture.save(path)
    return path


@pytest.mark.parametrize(("background", "colour"), [("grey", "#808080"), ("#204060", "#204060")])
def test_a_cut_out_gets_the_chosen_background(tmp_path, background, colour):
    flat = garment()
    flat.paste(colour, (32, 0, 64, 64))
    assert np.array_equal(read_photo(cut_out(tmp_path / "cut.png"), background)[0], flat)


def dataset(folder: Path, vae, *, cached: bool = False, flip=False, buckets=True, **policy: str) -> LatentDataset:
    settings = {"cache_latents_to_disk": cached, "flip_x": flip, "buckets": buckets}
    configs = [DatasetSection(folder_path=str(folder), resolution=(64,), **settings)]
    options = DataOptions(**policy)
    samples = DataReport(configs, "ohwx", options).usable()
    found = LatentDataset(samples, configs, vae, SimpleNamespace(identity="none", encode=no_text), options=options)
    if cached:
        found.fill(progress=False)
    return found


@pytest.mark.parametrize("cached", [False, True])
def test_the_mask_is_the_opacity_of_each_latent_with_mean_one(tmp_path, vae, cached):
    cut_out(tmp_path / "a.png")
    garment().save(tmp_path / "b.png")
    found = dataset(tmp_path, vae, cached=cached, flip=True, transparency="mask")
    batch = found.batch(Batch((0, 1, 2), 0))
    assert batch["mask"].shape == (3, 1, 8, 8)
    half = torch.cat([torch.full((8, 4), 2.0), torch.zeros(8, 4)], dim=1)
    assert torch.equal(batch["mask"][0, 0], half)
    assert torch.equal(batch["mask"][1, 0], torch.ones(8, 8))
    assert torch.equal(batch["mask"][2, 0], half.flip(1))
    plain = dataset(tmp_path, vae)
    assert "mask" not in plain.batch(Batch((0,), 0))
    assert "mask" not in plain.encoded(plain.samples[0], "")
    assert_bitwise(batch["latents"][0], plain.encoded(plain.samples[0], "")["latents"])


def test_the_mask_goes_through_resize_and_crop_like_the_photo(tmp_path, vae):
    picture = noise((200, 100), seed=1).convert("RGBA")
    opacity = Image.new("L", (200, 100), 0)
    opacity.paste(255, (100, 0, 200, 100))
    picture.putalpha(opacity)
    picture.save(tmp_path / "a.png")
    found = dataset(tmp_path, vae, transparency="mask")
    mask = found.encoded(found.samples[0], "")["mask"]
    assert mask.shape[1:] == found.encoded(found.samples[0], "")["latents"].shape[1:]
    columns = mask[0].mean(dim=0)
    middle = len(columns) // 2
    assert columns[: middle - 1].abs().max() < 0.1
    assert (columns[middle + 1 :] - 2).abs().max() < 0.1
    assert mask.mean().item() == pytest.approx(1)
    opacity.paste(0, (100, 0, 190, 100))
    picture.putalpha(opacity)
    picture.save(tmp_path / "a.png")
    with pytest.raises(DatasetError, match="nothing visible"):  # before a model is loaded
        dataset(tmp_path, vae, transparency="mask", buckets=False)
    assert dataset(tmp_path, vae, buckets=False).samples


def test_caches_follow_the_photo_policy(tmp_path, vae):
    cut_out(tmp_path / "a.png")

    def first(**policy: str) -> dict[str, torch.Tensor]:
        data = dataset(tmp_path, vae, cached=True, **policy)
        return data.encoded(data.samples[0], "") | {"files": len(list(tmp_path.glob("_coat_cache/latents/*")))}

    white, same, black = first(), first(background="#ffffff"), first(background="black")
    masked = first(transparency="mask")
    assert [entry["files"] for entry in (white, same, black, masked)] == [1, 1, 2, 3]
    assert_bitwise(same["latents"], white["latents"])
    assert not torch.equal(black["latents"], white["latents"])
    assert masked["mask"].max() == 2


class Constant(torch.nn.Module):
    """A transformer whose answer is one number everywhere."""

    config = SimpleNamespace(guidance_embeds=False)

    def forward(self, hidden_states, **_):
        return (torch.zeros_like(hidden_states) + 0.5,)


def test_the_loss_counts_what_is_visible_only(tmp_path, vae):
    cut_out(tmp_path / "a.png")
    batch = dataset(tmp_path, vae, transparency="mask").batch(Batch((0,), 0))
    objective = Objective(Constant(), TrainSection(), FlowMatchEulerDiscreteScheduler(), 0, torch.float32)
    hidden, seen = batch["latents"].clone(), batch["latents"].clone()
    hidden[..., 4:] += 1
    seen[..., :4] += 1
    losses = [objective(batch | {"latents": latents}, 0) for latents in (batch["latents"], hidden, seen)]
    assert_bitwise(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
