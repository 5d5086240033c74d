"""Every kind of image file comes out upright, opaque, 8-bit sRGB; and photos that show nearly the same are found."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from coat_flux.data.buckets import bucket_for, cropped_share, fit_to_bucket
from coat_flux.data.files import DatasetError
from coat_flux.data.images import near_duplicates, read_photo, survey, to_tensor
from coat_flux.data.preflight import CROPPED_SHARE
from tests import tolerances
from tests.architecture.sources import ROOT
from tests.reliability.photos import SRGB, deep_png, encoded, matrix_profile, noise, write

RED, BLUE, WHITE = (200, 30, 40), (20, 60, 180), (255, 255, 255)


def load_image(path, background="white"):
    return read_photo(path, background)[0]


def facts(path):
    found = survey([path])[path]
    if isinstance(found, DatasetError):
        raise found
    return found


def halves(size=(40, 20), left=RED, right=BLUE, mode="RGB"):
    image = Image.new(mode, size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_shows_the_photo_upright(tmp_path, orientation):
    upright = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    turned = upright if orientation < 5 else upright.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 6, 7) else 1
    columns = -1 if orientation in (2, 3, 7, 8) else 1
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(turned[::rows, ::columns])  # what a camera stores, by the inverse of the EXIF table
    Image.fromarray(stored).save(tmp_path / "photo.png", exif=exif)
    assert np.array_equal(np.asarray(load_image(tmp_path / "photo.png")), upright)
    assert facts(tmp_path / "photo.png").size == (4, 6)


def test_each_kind_of_file_has_its_pixels_on_white(tmp_path):
    """Half transparent ones mix, 16 bits are scaled and not clipped."""
    palette, grey, cutout = Image.new("P", (2, 1)), Image.new("LA", (2, 1)), Image.new("RGBA", (3, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putdata([0, 1])
    palette.save(tmp_path / "palette.png", transparency=1)
    grey.putdata([(40, 255), (40, 0)])
    grey.save(tmp_path / "grey.png")
    cutout.putdata([(0, 0, 0, 0), (0, 0, 0, 128), (10, 20, 30, 255)])
    cutout.save(tmp_path / "cutout.png")
    Image.fromarray(np.array([[0, 257 * 40, 257 * 200 + 100, 65535]], np.uint16)).save(tmp_path / "scan.png")
    for name, pixels in {
        "palette.png": [[*RED], [*WHITE]],
        "grey.png": [[40] * 3, [255] * 3],
        "cutout.png": [[255] * 3, [127] * 3, [10, 20, 30]],
        "scan.png": [[0] * 3, [40] * 3, [200] * 3, [255] * 3],
    }.items():
        assert np.asarray(load_image(tmp_path / name))[0].tolist() == pixels, name
    halves().quantize(2).save(tmp_path / "opaque.png")
    halves().save(tmp_path / "photo.webp", lossless=True)
    for name in ("opaque.png", "photo.webp"):
        assert np.array_equal(np.asarray(load_image(tmp_path / name)), np.asarray(halves())), name


@pytest.mark.parametrize("mode", ["1", "CMYK"])
def test_other_modes_become_rgb(tmp_path, mode):
    halves(left=WHITE, right=(0, 0, 0)).convert(mode).save(tmp_path / "photo.jpg", quality=100)
    loaded = load_image(tmp_path / "photo.jpg")
    pixels = np.asarray(loaded).astype(int)
    assert loaded.mode == "RGB"
    assert pixels[10, 5].min() >= 255 - tolerances.JPEG_LEVELS
    assert pixels[10, 35].max() <= tolerances.JPEG_LEVELS


PROFILE = matrix_profile(SRGB)
SWAPPED = matrix_profile(SRGB[::-1])  # the primaries of red and blue


@pytest.mark.parametrize(("mode", "swapped"), [("RGB", False), ("RGB", True), ("P", True), ("RGBA", True)])
def test_embedded_profile_is_converted_to_srgb(tmp_path, swapped, mode):
    image = halves().quantize(2) if mode == "P" else halves().convert(mode)
    image.save(tmp_path / "photo.png", icc_profile=SWAPPED if swapped else PROFILE)
    expected = np.asarray(halves()).astype(int)
    loaded = np.asarray(load_image(tmp_path / "photo.png")).astype(int)
    assert np.abs(loaded - (expected[..., ::-1] if swapped else expected)).max() <= tolerances.ICC_LEVELS


@pytest.mark.parametrize("profile", [b"not a profile", PROFILE.replace(b"RGB XYZ ", b"GRAYXYZ ", 1)])
def test_a_profile_that_does_not_fit_is_noted_and_left_out(tmp_path, profile):
    halves().save(tmp_path / "broken.png", icc_profile=profile)
    assert np.array_equal(np.asarray(load_image(tmp_path / "broken.png")), np.asarray(halves()))
    assert ["its colour profile cannot be used" in note for note in facts(tmp_path / "broken.png").notes] == [True]


def test_sixteen_bit_colour_loses_at_most_a_level(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (16, 16, 3)).astype(np.uint16)
    (tmp_path / "a.png").write_bytes(deep_png(values))
    assert np.abs(np.asarray(load_image(tmp_path / "a.png"), np.float64) - values / 257).max() <= 1
    assert facts(tmp_path / "a.png").traits == {"16 bit"}


def test_a_phones_jpeg_with_further_pictures_is_no_animation(tmp_path):
    further = {"save_all": True, "append_images": [Image.new("RGB", (40, 20))]}
    halves().save(tmp_path / "a.jpg", format="MPO", quality=100, **further)
    loaded = np.asarray(load_image(tmp_path / "a.jpg"), int)
    assert np.abs(loaded - np.asarray(halves(), int)).mean() < tolerances.JPEG_LEVELS


def test_to_tensor_range_and_layout():
    tensor = to_tensor(Image.new("RGB", (3, 2), (0, 255, 51)))
    assert (tensor.shape, tensor.dtype) == ((3, 2, 3), torch.float32)
    for channel, value in zip(tensor, (-1.0, 1.0, 51 / 127.5 - 1), strict=True):
        assert channel.unique().tolist() == pytest.approx([value])


def garment(colour, seed=1, size=(256, 256)) -> Image.Image:
    """A coloured shape in front of a noisy white wall."""
    pixels = np.random.default_rng(seed).normal(245, 1.5, (*size[::-1], 3)).clip(0, 255)
    shape = np.asarray(noise((160, 160), seed), np.float64)[..., :1] / 255
    pixels[48:208, 48:208] = shape * np.array(colour) + 20
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize(
    "change",
    [
        lambda image: encoded(image.resize((640, 640), Image.Resampling.LANCZOS), "PNG"),
        lambda image: encoded(image, "JPEG", quality=60),
        lambda image: encoded(image.convert("RGBA").crop((1, 1, 255, 255)), "PNG"),
    ],
)
def test_the_same_photo_saved_otherwise_is_found_and_no_other(tmp_path, change):
    red, blue, other = garment((200, 40, 60)), garment((40, 90, 200), seed=2), garment((200, 40, 60), seed=3)
    images = {"a": red, "b": blue, "d": other, "e": garment((40, 40, 220)), "f": red.rotate(90)}
    files = {name: encoded(image, "PNG") for name, image in images.items()} | {"c": change(red)}
    paths = [write(tmp_path / f"{name}.png", content) for name, content in files.items()]
    assert [(first.stem, second.stem) for first, second in near_duplicates(survey(paths))] == [("a", "c")]


def test_the_crop_to_a_bucket_keeps_the_whole_garment_of_the_example():
    """A photo that has lost straps and legs teaches a plain garment without straps."""
    files = (ROOT / "datasets_example" / "clothing").iterdir()
    images = [path for path in files if path.suffix in {".jpg", ".png"}]
    assert len(images) == 16
    for path in images:
        with Image.open(path) as stored:
            image = ImageOps.exif_transpose(stored)
        bucket = bucket_for(*image.size, 64)
        assert cropped_share(image.size, bucket) <= CROPPED_SHARE  # above it the run would warn
        pixels = np.asarray(fit_to_bucket(image.convert("RGBA"), bucket), np.float32)
        ground = np.median(pixels[:4, :4], axis=(0, 1))
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.abs(rim - ground).max() < 40, path.name  # the shade of the background; a garment differs by more
