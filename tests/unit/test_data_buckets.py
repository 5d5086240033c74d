"""Bucket sizes and the crop to them, as properties, and against the host's own function where it is there."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from coat_flux.data.buckets import Bucket, bucket_for, fit_to_bucket

SIDES = st.integers(1, 6000)
RESOLUTIONS = st.sampled_from([256, 512, 640, 768, 1024, 1328])
STEPS = st.sampled_from([16, 32, 64])


@given(SIDES, SIDES, RESOLUTIONS, STEPS)
def test_sides_are_multiples_of_the_step_within_the_budget(width, height, resolution, step):
    bucket = bucket_for(width, height, resolution, step)
    assert bucket.width % step == bucket.height % step == 0
    assert bucket.width >= step <= bucket.height
    assert bucket.width * bucket.height <= resolution * resolution


@given(SIDES, SIDES, RESOLUTIONS, STEPS)
def test_each_side_is_within_a_step_of_the_ideal_one(width, height, resolution, step):
    scale = min(1.0, resolution / math.sqrt(width * height))
    assume(min(width, height) * scale >= step)
    bucket = bucket_for(width, height, resolution, step)
    assert abs(bucket.width - width * scale) < step
    assert abs(bucket.height - height * scale) < step
    low = (width * scale - step) / (height * scale + step)
    high = (width * scale + step) / max(height * scale - step, step)
    assert low <= bucket.width / bucket.height <= high


@given(SIDES, SIDES, RESOLUTIONS, STEPS)
def test_no_image_is_enlarged_beyond_rounding_to_the_step(width, height, resolution, step):
    bucket = bucket_for(width, height, resolution, step)
    assert bucket.width < width + step
    assert bucket.height < height + step


@pytest.mark.parametrize(
    ("size", "resolution", "expected"),
    [
        ((1024, 1024), 1024, (1024, 1024)),
        ((4000, 3000), 1024, (1152, 896)),
        ((3000, 4000), 512, (448, 576)),
        ((600, 600), 1024, (608, 608)),
        ((10, 10), 512, (32, 32)),
        ((20000, 10), 512, (8192, 32)),
    ],
)
def test_known_sizes(size, resolution, expected):
    bucket = bucket_for(*size, resolution)
    assert (bucket.width, bucket.height) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 100, 512, 24), r"step=24: must be a positive multiple of 16"),
        ((100, 100, 512, 0), r"step=0: must be"),
        ((100, 100, 16, 32), r"resolution=16: must be at least step=32"),
        ((0, 100, 512), r"image size 0x100: both sides"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bucket_for(*arguments)


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([(32, 32), (64, 32), (32, 96)]))
def test_fit_gives_exactly_the_bucket(width, height, size):
    assert fit_to_bucket(Image.new("RGB", (width, height)), Bucket(*size)).size == size


def test_fit_crops_the_centre_and_keeps_the_aspect():
    pixels = np.zeros((64, 192, 3), dtype=np.uint8)
    pixels[:, 64:128] = 255
    fitted = np.asarray(fit_to_bucket(Image.fromarray(pixels), Bucket(64, 64)))
    assert fitted.min() == 255
    tall = np.asarray(fit_to_bucket(Image.fromarray(pixels.transpose(1, 0, 2)), Bucket(32, 32)))
    assert tall[4:-4].min() == 255


def test_fit_leaves_an_exact_image_untouched():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(fit_to_bucket(Image.fromarray(pixels), Bucket(64, 32))), pixels)


@pytest.mark.aitk
def test_buckets_are_the_hosts():
    host_file = Path(os.environ["AI_TOOLKIT_ROOT"]) / "toolkit" / "buckets.py"
    spec = importlib.util.spec_from_file_location("host_buckets", host_file)
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    rng = np.random.default_rng(0)
    for width, height in rng.integers(64, 5000, (3000, 2)).tolist():
        for resolution in (512, 768, 1024):
            theirs = host.get_bucket_for_image_size(width, height, resolution, 32)
            ours = bucket_for(width, height, resolution)
            assert (ours.width, ours.height) == (theirs["width"], theirs["height"]), (width, height, resolution)
