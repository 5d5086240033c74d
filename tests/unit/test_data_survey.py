"""Near duplicates: what is found, and what only resembles."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from coat_flux.data.preflight import near_duplicates, survey
from tests.reliability.photos import encoded, noise, write


def garment(colour, seed=1, size=(256, 256)) -> Image.Image:
    """A coloured shape in front of a noisy white wall."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(245, 1.5, (*size[::-1], 3)).clip(0, 255)
    shape = np.asarray(noise((160, 160), seed), np.float64)[..., :1] / 255
    pixels[48:208, 48:208] = shape * np.array(colour) + 20
    return Image.fromarray(pixels.astype(np.uint8))


def pairs(folder, **images) -> list[tuple[str, str]]:
    paths = []
    for name, image in images.items():
        content = image if isinstance(image, bytes) else encoded(image, "PNG")
        paths.append(write(folder / f"{name}.png", content))
    return [(first.stem, second.stem) for first, second in near_duplicates(survey(paths))]


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image,
        lambda image: image.resize((640, 640), Image.Resampling.LANCZOS),
        lambda image: image.resize((120, 120)),
        lambda image: encoded(image, "JPEG", quality=60),
        lambda image: ImageEnhance.Brightness(image).enhance(0.98),
        lambda image: image.convert("RGBA"),
        lambda image: image.crop((1, 1, 255, 255)),
    ],
)
def test_the_same_photo_saved_otherwise_is_found(tmp_path, change):
    image = garment((200, 40, 60))
    assert pairs(tmp_path, a=image, b=garment((40, 90, 200), seed=2), c=change(image)) == [("a", "c")]


def test_another_garment_and_another_colour_are_other_photos(tmp_path):
    red = garment((200, 40, 60))
    assert pairs(tmp_path, a=red, b=garment((200, 40, 60), seed=3), c=garment((40, 40, 220)), d=red.rotate(90)) == []


def test_a_cut_out_and_its_flat_twin_look_alike(tmp_path):
    image = garment((200, 40, 60))
    opacity = Image.new("L", image.size, 0)
    opacity.paste(255, (48, 48, 208, 208))
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=opacity)
    image.putalpha(opacity)
    assert pairs(tmp_path, a=flat, b=image) == [("a", "b")]
