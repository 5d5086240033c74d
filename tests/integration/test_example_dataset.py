"""The example clothing set: what is in the repository is what the script draws, and holds what it promises."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.buckets import bucket_for, cropped_share, fit_to_bucket
from coat_flux.data.preflight import CROPPED_SHARE, inspect_datasets
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


def test_the_set_is_complete_small_and_has_photos_to_correct():
    captions = sorted(CLOTHING.glob("*.txt"))
    assert [path.stem for path in IMAGES] == [path.stem for path in captions]
    assert len(IMAGES) == 16
    assert sum(path.stat().st_size for path in FILES) < 1_500_000
    for caption in captions:
        _, pattern, colour = caption.stem.split("_")
        text = caption.read_text(encoding="utf-8")
        assert text.startswith(f"a {pattern} {colour} [trigger] ")
        assert text.count("[trigger]") == 1
    report = inspect_datasets([DatasetSection(folder_path=str(CLOTHING), resolution=(512,))], "ohwx")
    assert (report.errors, report.warnings) == ([], [])
    with_alpha = [path.name for path, facts in report.photos.items() if "transparency" in facts.traits]
    assert with_alpha == ["03_plain_teal.png", "09_striped_blue.png", "15_checked_black.png"]
    assert sum("EXIF orientation" in facts.traits for facts in report.photos.values()) == 2
    ratios = [facts.size[0] / facts.size[1] for facts in report.photos.values()]
    assert min(ratios) < 0.8
    assert max(ratios) > 1.25


def test_the_script_draws_the_same_files_and_pixels(drawn):
    assert [path.name for path in sorted(drawn.iterdir())] == [path.name for path in FILES]
    for caption in CLOTHING.glob("*.txt"):
        assert (drawn / caption.name).read_bytes() == caption.read_bytes()
    for path in IMAGES:
        assert_same(path, drawn / path.name)


def assert_same(path: Path, other: Path) -> None:
    with Image.open(path) as kept, Image.open(other) as again:
        assert (kept.mode, kept.size, kept.getexif().get(ORIENTATION)) == (
            again.mode,
            again.size,
            again.getexif().get(ORIENTATION),
        )
        difference = np.abs(np.asarray(kept, np.int16) - np.asarray(again, np.int16))
    assert difference.max() <= EXAMPLE_IMAGE_LEVELS
    assert difference.mean() <= EXAMPLE_IMAGE_MEAN_LEVELS


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_the_crop_to_a_bucket_keeps_the_whole_garment(path):
    """A photo that has lost straps and legs teaches a plain garment without straps."""
    resolution = 64
    with Image.open(path) as stored:
        image = ImageOps.exif_transpose(stored)
    bucket = bucket_for(*image.size, resolution)
    assert cropped_share(image.size, bucket) <= CROPPED_SHARE  # above it the run would warn
    pixels = np.asarray(fit_to_bucket(image.convert("RGBA"), bucket), np.float32)
    ground = np.median(pixels[: resolution // 16, : resolution // 16], axis=(0, 1))
    rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert np.abs(rim - ground).max() < 40  # the shade of the background; a garment differs by more
