"""The example clothing set: what is in the repository is what the script draws, and holds what it promises."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from coat_flux.data.buckets import bucket_for, cropped_share, fit_to_bucket
from coat_flux.data.preflight import CROPPED_SHARE
from tests.tolerances import EXAMPLE_IMAGE_LEVELS, EXAMPLE_IMAGE_MEAN_LEVELS

ROOT = Path(__file__).resolve().parents[2]
CLOTHING = ROOT / "datasets_example" / "clothing"
FILES = sorted(path for path in CLOTHING.iterdir() if path.is_file())  # a run leaves a cache folder there
IMAGES = [path for path in FILES if path.suffix in {".jpg", ".png"}]
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("make_example_dataset")


@pytest.fixture(scope="module")
def drawn(script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clothing")
    script.make_dataset(folder)
    return folder


def test_the_set_is_complete_and_small():
    captions = sorted(CLOTHING.glob("*.txt"))
    assert [path.stem for path in IMAGES] == [path.stem for path in captions]
    assert len(IMAGES) == 16
    assert {path.suffix for path in IMAGES} == {".jpg", ".png"}
    assert {path.suffix for path in FILES} == {".jpg", ".png", ".txt"}
    assert sum(path.stat().st_size for path in FILES) < 1_500_000


def test_the_script_draws_the_same_files(drawn):
    assert [path.name for path in sorted(drawn.iterdir())] == [path.name for path in FILES]
    for caption in CLOTHING.glob("*.txt"):
        assert (drawn / caption.name).read_bytes() == caption.read_bytes()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_the_script_draws_the_same_pixels(drawn, path):
    with Image.open(path) as kept, Image.open(drawn / path.name) as again:
        assert (kept.mode, kept.size, kept.getexif().get(ORIENTATION)) == (
            again.mode,
            again.size,
            again.getexif().get(ORIENTATION),
        )
        difference = np.abs(np.asarray(kept, np.int16) - np.asarray(again, np.int16))
    assert difference.max() <= EXAMPLE_IMAGE_LEVELS
    assert difference.mean() <= EXAMPLE_IMAGE_MEAN_LEVELS


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_each_picture_is_a_product_photo(script, path):
    (photo,) = (photo for photo in script.PHOTOS if photo.name == path.stem)
    with Image.open(path) as stored:
        image = ImageOps.exif_transpose(stored)
    assert image.size == photo.size  # upright once the orientation is followed
    assert 512 <= min(image.size) <= max(image.size) <= 1024
    pixels = np.asarray(image.convert("RGBA"), np.float32)
    corner = pixels[: image.height // 20, : image.width // 20]
    if photo.cut_out:
        assert image.mode == "RGBA"
        covered = pixels[..., 3] == 255
        assert corner[..., 3].max() == 0
        assert 0.1 < covered.mean() < 0.7
    else:
        assert image.mode == "RGB"
        ground = np.median(corner[..., :3], axis=(0, 1))
        assert np.abs(ground - script.BACKGROUNDS[photo.background]).max() < 8
        garment = np.abs(pixels[..., :3] - ground).max(axis=-1) > 40
        assert 0.08 < garment.mean() < 0.7


@pytest.mark.parametrize("resolution", [64, 512])
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_the_crop_to_a_bucket_keeps_the_whole_garment(path, resolution):
    """A photo that has lost straps and legs teaches a plain garment without straps."""
    with Image.open(path) as stored:
        image = ImageOps.exif_transpose(stored)
    bucket = bucket_for(*image.size, resolution)
    assert cropped_share(image.size, bucket) <= CROPPED_SHARE  # above it the run would warn
    pixels = np.asarray(fit_to_bucket(image.convert("RGBA"), bucket), np.float32)
    ground = np.median(pixels[: resolution // 16, : resolution // 16], axis=(0, 1))
    rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert np.abs(rim - ground).max() < 40  # the shade of the background; a garment differs by more


def test_sizes_shapes_cutouts_and_orientations_vary():
    with_alpha, orientations, sizes = [], [], set()
    for path in IMAGES:
        with Image.open(path) as image:
            sizes.add(image.size)
            with_alpha += [path.name] if image.mode == "RGBA" else []
            orientations.append(image.getexif().get(ORIENTATION, 1))
    assert with_alpha == ["03_plain_teal.png", "09_striped_blue.png", "15_checked_black.png"]
    assert sorted(set(orientations)) == [1, 6, 8]
    assert sum(value != 1 for value in orientations) == 2
    assert len(sizes) >= 10
    ratios = [width / height for width, height in sizes]
    assert min(ratios) < 0.8
    assert max(ratios) > 1.25


@pytest.mark.parametrize("name", ["07_plain_orange.jpg", "13_plain_red.jpg"])
def test_rotated_photos_are_upright_only_when_the_orientation_is_followed(name):
    with Image.open(CLOTHING / name) as stored:
        raw, upright = np.asarray(stored.convert("L"), np.float32), ImageOps.exif_transpose(stored).convert("L")
    picture = np.asarray(upright, np.float32)
    assert raw.shape == picture.shape[::-1]

    def mirror_error(image: np.ndarray) -> float:
        return float(np.abs(image - image[:, ::-1]).mean())

    # garments are symmetric left to right, not top to bottom; the shadow falls downwards
    assert mirror_error(picture) < mirror_error(raw) / 2
    height = picture.shape[0]
    assert picture[: height // 12].mean() > picture[-height // 12 :].mean()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_captions_have_the_trigger_in_the_place_of_the_garment(path):
    caption = path.with_suffix(".txt").read_text(encoding="utf-8")
    _, pattern, colour = path.stem.split("_")
    assert caption.startswith(f"a {pattern} {colour} [trigger] ")
    assert caption.count("[trigger]") == 1
    assert caption.endswith((" background, product photo\n", " isolated cut-out\n"))
    assert "dungarees" not in caption
