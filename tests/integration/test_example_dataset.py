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


def test_the_script_draws_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("make_example_dataset")
    assert len(IMAGES) == len(script.PHOTOS) == 16
    assert sum(path.stat().st_size for path in FILES) < 1_500_000
    for photo in script.PHOTOS[::5]:
        script.save(photo, tmp_path)
    assert len(list(tmp_path.iterdir())) == 8
    for drawn in tmp_path.iterdir():
        path = CLOTHING / drawn.name
        if path.suffix == ".txt":
            assert drawn.read_bytes() == path.read_bytes()
            _, pattern, colour = path.stem.split("_")
            assert path.read_text(encoding="utf-8").startswith(f"a {pattern} {colour} [trigger] ")
            continue
        with Image.open(path) as kept, Image.open(drawn) as again:
            assert (kept.mode, kept.size) == (again.mode, again.size)
            assert kept.getexif().get(ORIENTATION) == again.getexif().get(ORIENTATION)
            difference = np.abs(np.asarray(kept, np.int16) - np.asarray(again, np.int16))
        assert difference.max() <= EXAMPLE_IMAGE_LEVELS, path.name
        assert difference.mean() <= EXAMPLE_IMAGE_MEAN_LEVELS, path.name


@pytest.mark.parametrize("resolution", [64, 512])
def test_the_crop_to_a_bucket_keeps_the_whole_garment(resolution: int) -> None:
    """A photo that has lost straps and legs teaches a plain garment without straps."""
    for path in IMAGES:
        with Image.open(path) as stored:
            image = ImageOps.exif_transpose(stored)
        bucket = bucket_for(*image.size, resolution)
        assert cropped_share(image.size, bucket) <= CROPPED_SHARE  # above it the run would warn
        pixels = np.asarray(fit_to_bucket(image.convert("RGBA"), bucket), np.float32)
        ground = np.median(pixels[: resolution // 16, : resolution // 16], axis=(0, 1))
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.abs(rim - ground).max() < 40, path.name  # the shade of the background; a garment differs by more
