"""What `scan` finds in folders, and what it says about folders that cannot be trained on."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import pytest

from coat_flux.data.buckets import Bucket
from coat_flux.data.dataset import scan
from coat_flux.data.files import DatasetError, find_images
from tests.reliability.photos import noise


def config(folder, **changes):
    settings = {
        "folder_path": str(folder),
        "caption_ext": ".txt",
        "default_caption": None,
        "resolution": [64],
        "num_repeats": 1,
        "flip_x": False,
        "buckets": True,
        "shuffle_tokens": False,
        "cache_text_embeddings": False,
    }
    return SimpleNamespace(**settings | changes)


def photo(path, size=(64, 64), caption=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(size, seed=zlib.crc32(path.name.encode())).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def test_finds_the_hosts_formats_recursively_sorted_without_hidden_files(tmp_path):
    wanted = ["B.JPG", "a.png", "c.jpeg", "sub/d.webp", "sub/deep/e.png"]
    for name in [*wanted, ".hidden.png", ".thumbs/t.png", "_controls/k.png", "f.bmp"]:
        photo(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == wanted


def test_each_image_at_each_resolution_with_its_final_caption(tmp_path):
    photo(tmp_path / "a.png", (128, 128), "a [trigger] shirt")
    photo(tmp_path / "b.png", (128, 64), "a coat")
    samples = scan([config(tmp_path, resolution=[64, 128])], "ohwx")
    assert [(s.image_path.name, s.caption, s.bucket.width, s.bucket.height) for s in samples] == [
        ("a.png", "a ohwx shirt", 64, 64),
        ("b.png", "ohwx a coat", 64, 64),
        ("a.png", "a ohwx shirt", 128, 128),
        ("b.png", "ohwx a coat", 128, 64),
    ]
    assert {s.dropped_caption for s in samples} == {"ohwx"}
    assert {s.dropped_caption for s in scan([config(tmp_path)])} == {""}


def test_repeats_flips_and_several_datasets(tmp_path):
    photo(tmp_path / "one" / "a.png", caption="a")
    photo(tmp_path / "two" / "b.png", caption="b")
    samples = scan([config(tmp_path / "one", num_repeats=2, flip_x=True), config(tmp_path / "two")])
    assert [(s.dataset_index, s.image_path.name, s.flip) for s in samples] == [
        (0, "a.png", False),
        (0, "a.png", False),
        (0, "a.png", True),
        (0, "a.png", True),
        (1, "b.png", False),
    ]


def test_without_buckets_every_image_is_square(tmp_path):
    photo(tmp_path / "a.png", (300, 40))
    assert scan([config(tmp_path, buckets=False)])[0].bucket == Bucket(64, 64)


def test_no_datasets():
    with pytest.raises(DatasetError, match=r"datasets=\[\]: there is nothing to train on; add an entry"):
        scan([])
