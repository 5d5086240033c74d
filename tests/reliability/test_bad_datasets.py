"""Every usual way a folder of photos and captions is wrong, each answered with one clear finding."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from coat_flux.config.coat import DataOptions
from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.files import DatasetError
from coat_flux.data.images import survey
from coat_flux.data.preflight import DataReport
from tests.reliability.photos import animation, cutout, encoded, good_folder, half, jpeg, noise, png, write
from tests.tolerances import BAD_DATASET_SECONDS

TRIGGER = "ohwx"
Files = dict[str, bytes | str]


class Bad(NamedTuple):
    """One malformed dataset: files that are written into a good folder, or what else spoils it.

    The finding is about `file` and says `words`.
    """

    name: str
    made: Files | Callable[[Path], Any]
    file: str
    words: str
    is_error: bool = True
    trigger: str | None = TRIGGER
    settings: tuple[tuple[str, Any], ...] = ()  # of the dataset, or of the pre-flight

    def spoil(self, folder: Path) -> None:
        if not isinstance(self.made, dict):
            self.made(folder)
            return
        for name, content in self.made.items():
            path = write(folder / name, content)
            if path.suffix in (".jpg", ".png") and not path.with_suffix(".txt").exists():
                write(path.with_suffix(".txt"), "a photo of ohwx in a field")


def captions(*texts: bytes | str) -> Files:
    return {f"good{i}.txt": text for i, text in enumerate(texts)}


def renamed(extension: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for path in folder.glob("*.txt"):
            path.rename(path.with_suffix(extension))

    return make


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def folder_as_caption(folder: Path) -> None:
    (folder / "good1.txt").unlink()
    (folder / "good1.txt").mkdir()


def linked_folder(folder: Path) -> None:
    good_folder(folder.parent / "elsewhere", 1)
    (folder / "more").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


PNG = encoded(noise(seed=5), "PNG")
FLIPPED = PNG[:400] + bytes([PNG[400] ^ 0xFF]) + PNG[401:]
BLACK = encoded(Image.new("RGB", (64, 64)), "PNG")
COPY = encoded(noise((128, 128), seed=100).resize((96, 96)), "PNG")
FOURTH, MASKED = {"good3.jpg": jpeg(seed=103)}, (("transparency", "mask"),)
PLACES = ("at sea", "in rain", "on snow", "by night")
GARMENT = FOURTH | captions(*(f"ohwx, blue denim jacket {where}" for where in PLACES))
STRANGERS = FOURTH | captions("red hat", "blue sky", "big tree", "old car")
ERRORS = [
    # files that are no image, or damaged
    Bad("web page", {"bad.png": "<!DOCTYPE html><p>403"}, "bad.png", "<!DOCTYPE"),
    Bad("half a jpeg", {"bad.jpg": half(jpeg())}, "bad.jpg", "truncated"),
    Bad("png pixels", {"bad.png": FLIPPED}, "bad.png", "cannot be read"),
    Bad("bomb", {"bad.png": png(30000, 30000, 1, 0, b"\0" * 1000)}, "bad.png", "exceeds limit"),
    # images that cannot be trained on
    Bad("animated png", {"bad.png": animation("PNG")}, "bad.png", "animation of 2 frames"),
    Bad("tracking pixel", {"bad.png": encoded(noise((64, 31)), "PNG")}, "bad.png", "64x31 pixels"),
    Bad("all transparent", {"bad.png": cutout(0)}, "bad.png", "transparent all over"),
    # files and folders that are none
    Bad("no folder", shutil.rmtree, "photos", "folder not found"),
    Bad("a file", file_instead, "photos", "this is a file, not a folder"),
    Bad("empty folder", emptied, "photos", "the folder has no images"),
    # captions
    Bad("latin-1", captions("a", "robe d'été".encode("latin-1")), "good1.txt", "0xe9 at offset 7"),
    Bad("utf-16 without mark", captions("a", "ohwx".encode("utf-16-le")), "good1.txt", "zero bytes"),
    Bad("folder as caption", folder_as_caption, "good1.txt", "cannot be read"),
    Bad("all captions .caption", renamed(".caption"), "photos", "caption_ext: caption"),
    Bad("captions in a list", renamed(".jsonl"), "photos", "may hold captions"),
]
WARNINGS = [
    Bad("no caption", lambda f: (f / "good1.txt").unlink(), "photos", "1 of 3 images have no .txt caption"),
    Bad("empty caption", {"good1.txt": ""}, "photos", "1 captions are empty (first: that of good1.jpg)"),
    Bad("photo.jpg.txt", {"good1.jpg.txt": b"x"}, "photos", "belong to no image (first: good1.jpg.txt)"),
    Bad("[trigger]", captions("a [trigger]", "one [name]"), "photos", "2 captions use [trigger]", trigger=None),
    Bad("nothing in common", STRANGERS, "photos", "no word in common", trigger=None),
    Bad("trigger in a word", captions("a foxglove", "the fox runs"), "photos", "1 captions have", trigger="fox"),
    Bad("other capitals", captions("a photo of Ohwx", "ohwx by the sea"), "photos", "1 captions have the trigger word"),
    Bad("captions of the garment", GARMENT, "photos", "'blue', 'denim', 'jacket'"),
    Bad("near duplicate", {"copy.png": COPY}, "photos", "(first: good0.jpg, like copy.png)"),
    Bad("same stem", {"good1.png": encoded(noise(seed=55), "PNG")}, "photos", "good1.jpg and good1.png share"),
    Bad("too small", {}, "photos", "trains at 64x64", settings=(("resolution", (512,)),)),
    Bad("a strip", {"bad.jpg": jpeg((2000, 40), seed=3)}, "photos", "lose more than 27% of their area"),
    Bad("camera photos", {"IMG_1.CR2": b"x"}, "photos", "1 images are not read (first: IMG_1.CR2)"),
    Bad("all black", {"bad.png": BLACK}, "bad.png", "shows one colour all over"),
    Bad("cmyk", {"bad.jpg": encoded(noise(seed=8).convert("CMYK"), "JPEG")}, "bad.jpg", "CMYK without"),
    Bad("mask without alpha", {}, "coat.data.transparency", "no photo has transparent", settings=MASKED),
]
if sys.platform != "win32":
    ERRORS += [Bad("broken link", lambda f: (f / "bad.jpg").symlink_to("nowhere.jpg"), "bad.jpg", "broken link")]
    WARNINGS += [Bad("linked folder", linked_folder, "more", "which is not entered")]
CASES = [*ERRORS, *(case._replace(is_error=False) for case in WARNINGS)]


def inspect(folder: Path, trigger: str | None = TRIGGER, **settings: Any) -> DataReport:
    policy = {key: settings.pop(key) for key in ("background", "transparency") if key in settings}
    section = DatasetSection(folder_path=str(folder), **({"resolution": (64,), "caption_ext": "txt"} | settings))
    return DataReport([section], trigger, DataOptions(**policy))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_is_answered_with_one_clear_finding(case, tmp_path):
    folder = good_folder(tmp_path / "photos")
    case.spoil(folder)
    start = time.process_time()
    report = inspect(folder, case.trigger, **dict(case.settings))
    assert time.process_time() - start < BAD_DATASET_SECONDS
    assert (report.errors, report.warnings)[case.is_error] == []
    (line,) = report.errors if case.is_error else report.warnings
    subject, text = line.split(": ", 1)
    assert case.file in subject
    assert case.words in text
    assert line.isprintable()


def test_training_is_refused_with_the_same_errors_and_prints_the_same_warnings(tmp_path, caplog):
    folder = good_folder(tmp_path / "photos")
    write(folder / "lone.txt", "x")
    section = DatasetSection(folder_path=str(folder), resolution=(64,))
    assert len(DataReport([section], TRIGGER).usable()) == 3
    assert [record.getMessage() for record in caplog.records] == DataReport([section], TRIGGER).warnings
    for i in range(7):
        write(folder / f"bad{i}.jpg", b"")
    with pytest.raises(DatasetError) as caught:
        DataReport([section], TRIGGER).usable()
    report = DataReport([section], TRIGGER)
    assert str(caught.value).splitlines() == [*report.errors[:5], "... and 2 more; `coat-flux data` lists them all"]


def test_all_errors_of_a_folder_are_found_at_once_and_said_once(tmp_path):
    folder = good_folder(tmp_path / "photos")
    assert (inspect(folder).errors, inspect(folder).warnings) == ([], [])
    write(folder / "bad.jpg", half(jpeg()))
    write(folder / "good1.txt", b"\xff")
    write(folder / "worse.png", "text")
    entries = [DatasetSection(folder_path=str(folder), resolution=(size,)) for size in (64, 96)]
    report = DataReport(entries, TRIGGER)
    assert len(report.errors) == 3
    assert {path.name for path in report.unreadable} == {"bad.jpg", "worse.png"}
    names = ["good0.jpg", "good1.jpg", "good2.jpg"]
    assert [sample.image_path.name for sample in report.samples] == names * 2


def test_a_photo_is_read_once_while_it_does_not_change(tmp_path, monkeypatch):
    folder = good_folder(tmp_path / "photos")
    inspect(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded again"))
        assert inspect(folder).errors == []
    write(folder / "good1.jpg", half(jpeg()))
    assert len(inspect(folder).errors) == 1


def test_the_table_shows_buckets_crops_and_corrections(tmp_path):
    folder = tmp_path / "photos"
    write(folder / "a.jpg", jpeg((128, 64), seed=1))
    write(folder / "b.png", cutout(128))
    exif = Image.Exif()
    exif[0x0112] = 6
    write(folder / "c.jpg", jpeg((90, 64), seed=2, exif=exif))
    (table,) = inspect(folder, resolution=(128,)).tables
    assert [line.split() for line in table.splitlines()[2:-1]] == [
        ["128", "64x64", "1", "0.0%", "0.0%"],
        ["128", "64x96", "1", "7.2%", "7.2%"],
        ["128", "128x64", "1", "0.0%", "0.0%"],
    ]
    assert table.splitlines()[-1] == "  corrected while reading: 1 EXIF orientation, 1 transparency"


def test_a_photo_that_is_gone_since_it_was_listed_is_an_error(tmp_path):
    (error,) = survey([tmp_path / "gone.jpg"]).values()
    assert isinstance(error, DatasetError)
    assert "gone.jpg: cannot be opened" in str(error)
