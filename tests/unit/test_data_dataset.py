"""What `scan` finds in folders, and what it says about folders that cannot be trained on."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import pytest
from PIL import Image

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


def test_upright_size_decides_the_bucket(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (128, 64)).save(tmp_path / "a.jpg", exif=exif)
    assert scan([config(tmp_path, resolution=[128])])[0].bucket == Bucket(64, 128)


def test_without_buckets_every_image_is_square(tmp_path):
    photo(tmp_path / "a.png", (300, 40))
    assert scan([config(tmp_path, buckets=False)])[0].bucket == Bucket(64, 64)


@pytest.mark.parametrize(
    ("default", "caption", "said"),
    [(None, "", "the trigger word alone, or nothing"), ("a garment", "a garment", "default_caption")],
)
def test_missing_captions_are_counted_once(tmp_path, caplog, default, caption, said):
    photo(tmp_path / "a.png", caption="described")
    for name in ("b.png", "c.png"):
        photo(tmp_path / name)
    samples = scan([config(tmp_path, default_caption=default)])
    assert [s.caption for s in samples] == ["described", caption, caption]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: 2 of 3 images have no .txt caption (first: b.png); they train with {said}"
    ]


def test_placeholder_without_trigger_word_is_reported(tmp_path, caplog):
    photo(tmp_path / "a.png", caption="a [trigger] shirt")
    assert scan([config(tmp_path)])[0].caption == "a  shirt"
    assert "1 captions use [trigger] or [name] but trigger_word is not set" in caplog.text


def test_shuffling_that_the_cache_prevents_is_reported(tmp_path, caplog):
    photo(tmp_path / "a.png", caption="a, b")
    scan([config(tmp_path, shuffle_tokens=True, cache_text_embeddings=True)])
    assert "shuffle_tokens has no effect with cache_text_embeddings: true" in caplog.text


def test_no_datasets():
    with pytest.raises(DatasetError, match=r"datasets=\[\]: there is nothing to train on; add an entry"):
        scan([])


def test_missing_folder_says_path_and_what_to_put_there(tmp_path):
    with pytest.raises(DatasetError) as caught:
        scan([config(tmp_path / "nowhere", caption_ext="caption")])
    message = str(caught.value)
    assert message.startswith(f"datasets[0].folder_path={tmp_path / 'nowhere'}: there is no such folder; make it")
    assert ".jpg, .jpeg, .png, .webp" in message
    assert "photo.caption" in message


def test_empty_folder(tmp_path):
    photo(tmp_path / "full" / "a.png", caption="a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"datasets\[1\]\.folder_path=.*empty: the folder has no images; put images"):
        scan([config(tmp_path / "full"), config(tmp_path / "empty")])


def test_photos_in_formats_that_are_not_read_are_named(tmp_path, caplog):
    photo(tmp_path / "a.png", caption="a")
    (tmp_path / "IMG_1.HEIC").write_bytes(b"phone")
    assert len(scan([config(tmp_path)])) == 1
    assert "1 images are not read (first: IMG_1.HEIC); save them as one of .jpg" in caplog.text


def test_all_unreadable_images_are_named_at_once(tmp_path):
    photo(tmp_path / "good.png")
    for i in range(7):
        (tmp_path / f"bad{i}.jpg").write_bytes(b"nothing")
    with pytest.raises(DatasetError) as caught:
        scan([config(tmp_path)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert "bad0.jpg: cannot be read as an image" in lines[0]
    assert lines[-1] == "... and 2 more; `coat-flux data` lists them all"
