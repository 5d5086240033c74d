"""Which photos `verify` holds out, and the folders it trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from coat_flux.data.files import find_images
from coat_flux.study import VerifyError
from coat_flux.study.held_out import choose_held_out, split_photos, validation_entry


def folder_of(root: Path, count: int) -> Path:
    root.mkdir(parents=True)
    for i in range(count):
        (root / f"{i:02d}.jpg").write_bytes(b"photo %d" % i)
        (root / f"{i:02d}.txt").write_text(f"caption {i}", encoding="utf-8")
    return root


@pytest.mark.parametrize(("photos", "expected"), [(2, 1), (10, 1), (14, 1), (16, 2), (40, 4), (155, 16), (1000, 16)])
def test_a_tenth_is_held_out(photos: int, expected: int) -> None:
    assert len(choose_held_out([Path(f"{i}.jpg") for i in range(photos)], None)) == expected


def test_held_out_photos_are_evenly_spread(tmp_path: Path) -> None:
    photos = find_images(folder_of(tmp_path / "a", 12))
    assert [path.name for path in choose_held_out(photos, 3)] == ["02.jpg", "06.jpg", "10.jpg"]
    assert [path.name for path in choose_held_out(photos, None)] == ["06.jpg"]
    assert len(set(choose_held_out(photos, 11))) == 11


@pytest.mark.parametrize("count", [0, 4, 5])
def test_a_photo_must_be_left(tmp_path: Path, count: int) -> None:
    photos = find_images(folder_of(tmp_path / "a", 4))
    with pytest.raises(VerifyError, match=rf"--hold-out {count}: must be from 1 to 3.*--validation FOLDER"):
        choose_held_out(photos, count)


def test_the_split_has_every_photo_once_with_its_caption(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "photos", 6)
    (source / "sub").mkdir()
    (source / "sub" / "06.jpg").write_bytes(b"photo 6")
    entry = {"folder_path": str(source), "num_repeats": 3, "flip_x": True, "resolution": 64}
    split = split_photos([entry], tmp_path / "out", 2)
    (train,), (held_out,) = split.train, split.held_out
    assert [path.name for path in find_images(Path(held_out["folder_path"]))] == ["01.jpg", "05.jpg"]
    assert split.names == ("01.jpg", "05.jpg")
    trained = find_images(Path(train["folder_path"]))
    assert [path.name for path in trained] == ["00.jpg", "02.jpg", "03.jpg", "04.jpg", "06.jpg"]
    assert trained[-1].parent.name == "sub"
    assert (trained[1].with_suffix(".txt")).read_text(encoding="utf-8") == "caption 2"
    assert train == {**entry, "folder_path": train["folder_path"]}
    assert (held_out["num_repeats"], held_out["flip_x"], held_out["resolution"]) == (1, False, 64)
    assert len(find_images(source)) == 7


def test_a_photo_that_two_datasets_hold_is_held_out_of_both(tmp_path: Path) -> None:
    source, other = folder_of(tmp_path / "a", 4), folder_of(tmp_path / "b", 1)
    entries = [{"folder_path": str(folder), "caption_ext": ".txt"} for folder in (source, source, other)]
    split = split_photos(entries, tmp_path / "out", 1)
    assert [len(find_images(Path(entry["folder_path"]))) for entry in split.train] == [3, 3, 1]
    assert [len(find_images(Path(entry["folder_path"]))) for entry in split.held_out] == [1]


def test_a_validation_folder_leaves_training_as_it_is(tmp_path: Path) -> None:
    entries = [{"folder_path": str(folder_of(tmp_path / "a", 2)), "num_repeats": 5}]
    split = validation_entry(entries, folder_of(tmp_path / "v", 3))
    assert split.train == tuple(entries)
    assert split.held_out[0]["folder_path"] == str(tmp_path / "v")
    assert split.held_out[0]["num_repeats"] == 1
    assert split.names == ("00.jpg", "01.jpg", "02.jpg")


def test_a_validation_folder_must_have_photos(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"--validation .*there is no such folder"):
        validation_entry([{}], tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifyError, match=r"--validation .*has no images"):
        validation_entry([{}], tmp_path / "empty")
