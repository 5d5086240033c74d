"""Colour and texture of a drawing against its photo, and which save is best."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn

from coat_flux.data import fidelity
from coat_flux.data.cache import decode_latents, encode_latents


def striped(colour: tuple[int, int, int] = (200, 40, 40), shift: int = 0) -> Image.Image:
    """A striped square of 80 px on white."""
    picture = Image.new("RGB", (128, 128), "white")
    picture.paste(colour, (24, 24, 104, 104))
    for top in range(24 + shift, 100, 16):
        picture.paste((250, 240, 230), (24, top, 104, top + 6))
    return picture


MASK = np.zeros((128, 128), bool)
MASK[24:104, 24:104] = True


def against(drawn: Image.Image, mask: np.ndarray = MASK) -> tuple[float, float, float]:
    return fidelity.compare(np.array(striped()), np.array(drawn), mask)


def test_colour_and_texture_are_told_apart():
    assert against(striped()) == (0.0, 0.0, 0.0)
    moved, recoloured = against(striped(shift=2)), against(striped((40, 40, 200)))
    blurred = against(striped().filter(ImageFilter.GaussianBlur(4)))
    plain = Image.new("RGB", (128, 128), "white")
    plain.paste((200, 40, 40), (24, 24, 104, 104))
    assert recoloured[0] > 20
    assert moved[2] < 0.1
    assert blurred[2] > 5 * moved[2]
    assert against(plain)[2] > 2 * blurred[2]


def test_only_the_subject_counts():
    """And the whole picture where there is no mask."""
    other = striped()
    other.paste((0, 0, 0), (0, 0, 128, 24))
    assert against(other) == (0.0, 0.0, 0.0)
    for mask in (np.ones_like(MASK), np.zeros_like(MASK)):
        assert against(other, mask)[0] > 5


def subjects(count: int) -> list[fidelity.Subject]:
    picture = np.array(striped().resize((32, 32)))
    latents = torch.from_numpy(picture).permute(2, 0, 1).float() / 127.5 - 1
    return [fidelity.Subject(picture, np.ones((32, 32), bool), {"latents": latents}) for _ in range(count)]


def test_a_perfect_model_redraws_the_photo_and_a_worse_one_does_not():
    """By straight lines from noise: the velocity of a model that knows the photo is (x - x0) / σ."""
    asked: list[float] = []
    inputs: list[Tensor] = []

    def velocity(photo: dict[str, Tensor], x: Tensor, sigmas: Tensor, share: float = 1.0) -> Tensor:
        asked.append(sigmas.item())
        inputs.append(x)
        return share * (x - photo["latents"]) / sigmas.view(-1, 1, 1, 1)

    redrawn = fidelity.Redrawn(subjects(2), None)
    redrawn.measure(0, lambda *args: velocity(*args, share=0.8), lambda x: x)
    redrawn.measure(10, velocity, lambda x: x)
    steps, calls = fidelity.STEPS, 2 * len(fidelity.LEVELS) * fidelity.STEPS
    assert asked[:steps] == pytest.approx([fidelity.LEVELS[0] * (1 - step / steps) for step in range(steps)])
    assert len(asked) == 2 * calls
    worse, right = redrawn.rows()
    assert (worse[0], right[0], right[4:]) == (0, 10, (0.0, 0.0, 0.0))
    assert redrawn.mean().colour < 0.1
    assert worse[1] > 3
    assert "without the LoRA ΔE" in redrawn.describe()
    assert [redrawn.lacks(step) for step in (0, 10, 20)] == [False, False, True]
    again = fidelity.Redrawn(subjects(2), redrawn.record)
    again.measure(20, velocity, lambda x: x)
    assert all(map(torch.equal, inputs[calls : 2 * calls], inputs[2 * calls :]))
    assert again.rows()[2][1:] == right[1:]  # the same noise in another process


@pytest.mark.parametrize("bn", [False, True])
def test_latents_are_decoded_as_they_were_encoded(bn):
    """By a VAE whose latents are the pixels, with FLUX.1's numbers or, with `bn`, as FLUX.2's are normalized."""
    pixels, vae = torch.rand(1, 3, 8, 8) * 2 - 1, nn.Module()
    vae.weight = nn.Parameter(torch.zeros(1))
    vae.config = SimpleNamespace(scaling_factor=0.3611, shift_factor=0.1159, batch_norm_eps=1e-4)
    vae.encode = lambda x: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: x))
    vae.decode = lambda x, return_dict: (x,)
    if bn:
        vae.bn = nn.BatchNorm2d(12)
        vae.bn.running_mean.uniform_(-1, 1)
        vae.bn.running_var.uniform_(0.5, 2)
    latents = encode_latents(vae, pixels)
    assert not torch.allclose(latents, pixels, atol=0.1)
    torch.testing.assert_close(decode_latents(vae, latents), pixels, rtol=0, atol=1e-6)


def test_the_best_save_is_told_with_those_that_are_as_good():
    draws = {10: [3.0, 5.0, 4.0, 6.0], 20: [2.0, 4.2, 2.9, 5.1], 30: [2.1, 4.0, 3.1, 4.9]}
    redrawn = fidelity.Redrawn(subjects(1), {"vae": [[0, 0, 0]], "saves": [[0, [[9.0, 9.0, 9.0]] * 4]]})
    for step, colours in draws.items():
        redrawn.record["saves"].append([step, [[colour, 2 * colour, step / 100] for colour in colours]])
    colour, p95, texture = redrawn.best()
    assert colour == "colour: the save of step 30 is best, ΔE 3.53; that of 20 cannot be told apart from it"
    assert "step 30" in p95
    assert texture == "texture: the save of step 10 is best, 0.10"


def test_photos_are_taken_evenly_pixels_come_back_and_a_mask_is_the_upper_half_of_its_levels():
    assert fidelity.evenly(range(3)) == [0, 1, 2]
    assert fidelity.evenly(range(9)) == [0, 2, 4, 6]
    assert len(fidelity.evenly(range(99))) == fidelity.MOST_PHOTOS
    picture = np.array(striped())
    assert (fidelity.to_picture(torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1) == picture).all()
    beyond = torch.tensor([-1.4, 1.4]).expand(1, 3, 1, 2)  # as a VAE decodes
    assert fidelity.to_picture(beyond).tolist() == [[[0] * 3, [255] * 3]]
    assert fidelity.upper_half(torch.tensor([[0.1, 0.3], [0.9, 1.0]])).tolist() == [[False, False], [True, True]]
    for level in (0.0, 1.0):  # one level is the whole photo
        assert fidelity.upper_half(torch.full((2, 2), level)).all()
