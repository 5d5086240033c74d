"""Every kind of image file comes out upright, opaque, 8-bit sRGB."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from coat_flux.data.errors import DatasetError
from coat_flux.data.images import image_size, load_image, to_tensor
from tests import tolerances

RED, BLUE, WHITE = (200, 30, 40), (20, 60, 180), (255, 255, 255)


def halves(size=(40, 20), left=RED, right=BLUE, mode="RGB"):
    image = Image.new(mode, size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_shows_the_photo_upright(tmp_path, orientation):
    upright = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    # What a camera stores so that the given orientation makes it upright (inverse of the EXIF table).
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "photo.png", exif=exif)
    assert np.array_equal(np.asarray(load_image(tmp_path / "photo.png")), upright)
    assert image_size(tmp_path / "photo.png") == (4, 6)


def test_jpeg_header_size_respects_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    halves().save(tmp_path / "photo.jpg", exif=exif)
    assert image_size(tmp_path / "photo.jpg") == load_image(tmp_path / "photo.jpg").size == (20, 40)


def test_transparent_pixels_become_white_and_half_transparent_ones_mix(tmp_path):
    image = Image.new("RGBA", (3, 1))
    image.putdata([(0, 0, 0, 0), (0, 0, 0, 128), (10, 20, 30, 255)])
    image.save(tmp_path / "cutout.png")
    loaded = np.asarray(load_image(tmp_path / "cutout.png"))[0].tolist()
    assert loaded == [[255, 255, 255], [127, 127, 127], [10, 20, 30]]


def test_palette_with_a_transparent_entry(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putdata([0, 1])
    image.save(tmp_path / "palette.png", transparency=1)
    assert np.asarray(load_image(tmp_path / "palette.png"))[0].tolist() == [list(RED), list(WHITE)]


def test_palette_without_transparency_and_opaque_webp(tmp_path):
    halves().quantize(2).save(tmp_path / "palette.png")
    halves().save(tmp_path / "photo.webp", lossless=True)
    for name in ("palette.png", "photo.webp"):
        assert np.array_equal(np.asarray(load_image(tmp_path / name)), np.asarray(halves())), name


def test_grey_alpha_on_white(tmp_path):
    image = Image.new("LA", (2, 1))
    image.putdata([(40, 255), (40, 0)])
    image.save(tmp_path / "grey.png")
    assert np.asarray(load_image(tmp_path / "grey.png"))[0].tolist() == [[40] * 3, [255] * 3]


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    values = np.array([[0, 257 * 40, 257 * 200 + 100, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "scan.png")
    assert np.asarray(load_image(tmp_path / "scan.png"))[0, :, 0].tolist() == [0, 40, 200, 255]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK"])
def test_other_modes_become_rgb(tmp_path, mode):
    halves(left=WHITE, right=(0, 0, 0)).convert(mode).save(tmp_path / "photo.jpg", quality=100)
    loaded = load_image(tmp_path / "photo.jpg")
    pixels = np.asarray(loaded).astype(int)
    assert loaded.mode == "RGB"
    assert pixels[10, 5].min() >= 255 - tolerances.JPEG_LEVELS
    assert pixels[10, 35].max() <= tolerances.JPEG_LEVELS


def srgb_profile(swap_red_and_blue=False):
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    if swap_red_and_blue:  # exchange where the two primaries' tags point to
        count = struct.unpack_from(">I", profile, 128)[0]
        entries = {bytes(profile[p : p + 4]): p + 4 for p in range(132, 132 + 12 * count, 12)}
        red, blue = entries[b"rXYZ"], entries[b"bXYZ"]
        profile[red : red + 8], profile[blue : blue + 8] = profile[blue : blue + 8], profile[red : red + 8]
    return bytes(profile)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_embedded_profile_is_converted_to_srgb(tmp_path, swapped, mode):
    image = halves().quantize(2) if mode == "P" else halves().convert(mode)
    image.save(tmp_path / "photo.png", icc_profile=srgb_profile(swapped))
    expected = np.asarray(halves()).astype(int)
    loaded = np.asarray(load_image(tmp_path / "photo.png")).astype(int)
    assert np.abs(loaded - (expected[..., ::-1] if swapped else expected)).max() <= tolerances.ICC_LEVELS


def test_a_profile_that_does_not_fit_is_reported_and_left_out(tmp_path, caplog):
    halves().save(tmp_path / "broken.png", icc_profile=b"not a profile")
    assert np.array_equal(np.asarray(load_image(tmp_path / "broken.png")), np.asarray(halves()))
    assert "broken.png: its colour profile does not fit" in caplog.text


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"])
def test_unreadable_file_names_the_file_and_the_remedy(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    for read in (load_image, image_size):
        with pytest.raises(DatasetError, match=r"broken\.png: cannot be read as an image .*; open it and save"):
            read(path)


def test_truncated_photo_is_an_error_not_a_grey_band(tmp_path):
    path = tmp_path / "cut.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DatasetError, match=r"cut\.jpg: cannot be read"):
        load_image(path)


def test_to_tensor_range_and_layout():
    image = Image.new("RGB", (3, 2), (0, 255, 51))
    tensor = to_tensor(image)
    assert tensor.shape == (3, 2, 3)
    assert tensor.dtype == torch.float32
    assert tensor[0].unique().tolist() == [-1.0]
    assert tensor[1].unique().tolist() == [1.0]
    assert tensor[2].unique().item() == pytest.approx(51 / 127.5 - 1)
