"""The corrected copy for ai-toolkit: what is in it, that originals stay, and what the next run makes."""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageOps

from coat_flux.config.coat import DataOptions
from coat_flux.data import prepare as prepare_module
from coat_flux.data.files import DatasetError
from coat_flux.data.images import read_photo
from coat_flux.data.prepare import prepare_copy
from tests.reliability import photos
from tests.reliability.photos import cutout, deep_png, encoded, good_folder, half, jpeg, noise, write


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two photos that ai-toolkit reads right, and one of each kind that it does not."""
    folder = good_folder(tmp_path / "photos", 2)
    files = {
        "srgb.jpg": jpeg(seed=1, icc_profile=photos.matrix_profile(photos.SRGB)),
        "phone.jpg": jpeg((96, 64), seed=2, icc_profile=photos.matrix_profile(photos.DISPLAY_P3), exif=turned(6)),
        "sideways.jpg": jpeg((96, 64), seed=3, exif=turned(8)),
        "cut.png": cutout(100),
        "sub/scan.png": deep_png(np.random.default_rng(0).integers(0, 65536, (64, 64, 1))),
        "sub/plain.webp": encoded(noise(seed=4), "WEBP"),
    }
    for name, content in files.items():
        write(folder / name, content)
        write((folder / name).with_suffix(".txt"), f"caption of {name}")
    return folder


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def as_the_host_reads(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def test_the_host_reads_from_the_copy_what_we_read_from_the_originals(folder, tmp_path):
    before = content_of(folder)
    corrected = prepare_copy(folder, tmp_path / "run" / "data", DataOptions(background="grey"))
    assert {path.name: sorted(traits) for path, traits in corrected.items()} == {
        "cut.png": ["transparency"],
        "phone.jpg": ["EXIF orientation", "colour profile"],
        "sideways.jpg": ["EXIF orientation"],
        "scan.png": ["16 bit"],
    }
    images = tmp_path / "run" / "data" / "images"
    assert not images.with_name("masks").exists()
    copies = {path.relative_to(images).as_posix() for path in images.rglob("*.*") if path.suffix != ".txt"}
    assert copies == {
        *("good0.jpg", "good1.jpg", "srgb.jpg", "phone.png", "sideways.png", "cut.png"),
        *("sub/scan.png", "sub/plain.webp"),
    }
    for name in copies:
        copy = images / name
        (original,) = [path for path in (folder / name).parent.glob(f"{copy.stem}.*") if path.suffix != ".txt"]
        assert np.array_equal(as_the_host_reads(copy), np.asarray(read_photo(original, "grey")[0])), name
        assert copy.with_suffix(".txt").read_text() == original.with_suffix(".txt").read_text()
    assert content_of(folder) == before


def test_every_image_has_a_mask_under_its_own_name(folder, tmp_path):
    write(folder / "sub" / "cut.jpg", jpeg(seed=9))
    write(folder / "sub" / "cut.txt", "another cut")
    prepare_copy(folder, tmp_path / "copy", DataOptions(transparency="mask"))
    copied, masks = tmp_path / "copy" / "images", list((tmp_path / "copy" / "masks").iterdir())
    images = [path for path in copied.rglob("*") if path.suffix != ".txt" and path.is_file()]
    assert sorted(path.stem for path in images) == sorted(path.stem for path in masks)
    assert len(images) == 9
    assert (copied / "sub" / "sub_cut_jpg.txt").read_text() == "another cut"
    for path in masks:
        assert np.unique(np.asarray(Image.open(path))).tolist() == [100 if path.stem == "cut" else 255]


def test_videos_controls_and_names_by_which_masks_are_found_are_the_hosts(tmp_path):
    folder, target = tmp_path / "photos", tmp_path / "copy"
    images, texts = target / "images", ("cut.mp4", "clip.MP4", "clip.txt", "song.flac", "b/_controls/1.depth.jpg")
    for name in ("cut.png", "a/1.png", "b/1.png"):
        write(folder / name, cutout(100))
    for name in texts:
        write(folder / name, f"content of {name}")
    assert len(prepare_copy(folder, target)) == 3
    copied = {path.relative_to(images).as_posix() for path in images.rglob("*") if path.is_file()}
    assert copied == {"cut.png", "a/1.png", "b/1.png", *texts}
    assert all((images / name).read_text() == f"content of {name}" for name in texts)
    cache = write(images / "_latent_cache" / "clip_x.safetensors", b"")
    prepare_copy(folder, target)
    assert cache.exists()
    write(folder / "clip.MP4", "another clip")
    prepare_copy(folder, target)
    assert not cache.exists()
    prepare_copy(folder, tmp_path / "kept", keep=frozenset({folder / "a" / "1.png"}))
    assert [path.name for path in (tmp_path / "kept" / "images").rglob("*.*")] == ["1.png"]


def test_a_loss_mask_from_alpha_keeps_it_and_its_colours(tmp_path):
    """What ai-toolkit reads right is linked; it dies on photos without four channels."""
    folder, whole, half_clear = tmp_path / "photos", noise(seed=4), noise(seed=4)
    half_clear.putalpha(Image.linear_gradient("L").resize(whole.size))
    write(folder / "right.png", encoded(half_clear, "PNG"))
    assert prepare_copy(folder, tmp_path / "copy", alpha_mask=True) is None
    write(folder / "turned.png", encoded(half_clear, "PNG", exif=turned(6)))
    write(folder / "opaque.png", encoded(whole, "PNG"))
    corrected = prepare_copy(folder, tmp_path / "copy", DataOptions(transparency="mask"), alpha_mask=True)
    assert {path.name for path in corrected} == {"turned.png", "opaque.png"}
    assert not (tmp_path / "copy" / "masks").exists()
    upright = half_clear.transpose(Image.Transpose.ROTATE_270)
    for name, photo in (("right.png", half_clear), ("turned.png", upright), ("opaque.png", whole.convert("RGBA"))):
        copy = tmp_path / "copy" / "images" / name
        assert copy.is_symlink() == (name == "right.png")
        assert np.array_equal(np.asarray(Image.open(copy)), np.asarray(photo)), name


def test_the_copy_is_used_again_while_photos_and_policy_are_the_same(folder, tmp_path, monkeypatch):
    made = []
    make = prepare_module._make
    monkeypatch.setattr(prepare_module, "_make", lambda path, *rest: (made.append(path.name), make(path, *rest)))
    target = tmp_path / "copy"
    images = target / "images"
    corrected = prepare_copy(folder, target)
    assert len(made) == 8
    cache = write(images / "_latent_cache" / "cut_x.safetensors", b"")
    write(folder / "cut.txt", "another caption")
    (folder / "sideways.txt").unlink()
    assert prepare_copy(folder, target) == corrected
    assert len(made) == 8
    assert cache.exists()
    assert (images / "cut.txt").read_text() == "another caption"
    assert not os.path.lexists(images / "sideways.txt")
    prepare_copy(folder, target, DataOptions(background="black"))
    assert len(made) == 16
    assert not cache.exists()
    write(folder / "cut.png", cutout(50))
    (folder / "sideways.jpg").unlink()
    prepare_copy(folder, target, DataOptions(background="black"))
    assert len(made) == 16 + 7
    assert not (images / "sideways.png").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_was_killed_leaves_the_old_copy_and_is_finished_by_the_next(folder, tmp_path, monkeypatch):
    prepare_copy(folder, tmp_path / "whole", DataOptions(background="black"))
    target = tmp_path / "copy"
    prepare_copy(folder, target)
    before = content_of(target)
    made = []

    def killed(*arguments, make=prepare_module._make):
        made.append(arguments)
        if len(made) == 5:
            raise KeyboardInterrupt
        make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_make", killed)
        patch.setattr("coat_flux.base.files.discard", lambda path: None)  # as SIGKILL leaves it
        with pytest.raises(KeyboardInterrupt):
            prepare_copy(folder, target, DataOptions(background="black"))
    assert content_of(target) == before
    prepare_copy(folder, target, DataOptions(background="black"))
    expected = {name: content for name, (content, _) in content_of(tmp_path / "whole").items()}
    assert {name: content for name, (content, _) in content_of(target).items()} == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "photos", "whole"]


@pytest.mark.parametrize("way", ["symlink", "link", "copy"])
def test_where_links_cannot_be_made_files_are_copied(folder, tmp_path, monkeypatch, way):
    refused = Mock(side_effect=OSError("no privilege"))
    if way != "symlink":
        monkeypatch.setattr(prepare_module.os, "symlink", refused)
    if way == "copy":
        monkeypatch.setattr(prepare_module.os, "link", refused)
    prepare_copy(folder, tmp_path / "copy")
    copy, original = tmp_path / "copy" / "images" / "good0.jpg", folder / "good0.jpg"
    assert copy.read_bytes() == original.read_bytes()
    assert (copy.is_symlink(), copy.samefile(original)) == (way == "symlink", way != "copy")


def test_what_cannot_be_copied_is_an_error(folder, tmp_path, monkeypatch):
    with pytest.raises(DatasetError, match="within the dataset"):
        prepare_copy(folder, folder / "run" / "data")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_make", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(DatasetError, match="No space left on device"):
            prepare_copy(folder, tmp_path / "copy")
    assert not (folder / "run").exists()
    assert not (tmp_path / "copy").exists()
    write(folder / "bad.jpg", half(jpeg()))
    with pytest.raises(DatasetError, match=r"bad\.jpg: cannot be read"):
        prepare_copy(folder, tmp_path / "copy")
