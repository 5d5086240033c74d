"""Every usual way a folder of photos and captions is wrong, each answered with one clear finding."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.files import DatasetError
from coat_flux.data.loader import scan
from coat_flux.data.preflight import DataReport, inspect_datasets
from tests.reliability.bad_datasets import CASES, TRIGGER, needs_posix
from tests.reliability.photos import cutout, good_folder, half, jpeg, write
from tests.tolerances import BAD_DATASET_SECONDS


def inspect(folder: Path, trigger: str | None, changes: dict[str, Any]) -> DataReport:
    policy = {key: changes.pop(key) for key in ("background", "transparency") if key in changes}
    section = DatasetSection(folder_path=str(folder), **({"resolution": (64,), "caption_ext": "txt"} | changes))
    return inspect_datasets([section], trigger, **policy)


def test_the_folder_that_is_spoilt_has_nothing_to_be_said_against(tmp_path):
    report = inspect(good_folder(tmp_path / "photos"), TRIGGER, {})
    assert (report.errors, report.warnings, len(report.samples)) == ([], [], 3)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=case.marks) for case in CASES])
def test_each_is_answered_with_one_clear_finding(case, tmp_path):
    folder = good_folder(tmp_path / "photos")
    changes = case.make(folder) or {}
    start = time.process_time()
    report = inspect(folder, case.trigger, changes)
    assert time.process_time() - start < BAD_DATASET_SECONDS
    findings = (report.errors, report.warnings) if case.error else (report.warnings, report.errors)
    assert findings[1] == []
    (line,) = findings[0]
    subject, said = line.split(": ", 1)
    assert case.says[0] in subject
    for words in case.says[1:]:
        assert words in said
    assert line.isprintable()


def test_training_is_refused_with_the_same_errors_and_prints_the_same_warnings(tmp_path, caplog):
    folder = good_folder(tmp_path / "photos")
    write(folder / "lone.txt", "x")
    section = DatasetSection(folder_path=str(folder), resolution=(64,))
    assert len(scan([section], TRIGGER)) == 3
    assert [record.getMessage() for record in caplog.records] == inspect_datasets([section], TRIGGER).warnings
    for i in range(7):
        write(folder / f"bad{i}.jpg", b"")
    with pytest.raises(DatasetError) as caught:
        scan([section], TRIGGER)
    report = inspect_datasets([section], TRIGGER)
    assert str(caught.value).splitlines() == [*report.errors[:5], "... and 2 more; `coat-flux data` lists them all"]


def test_all_errors_of_a_folder_are_found_at_once(tmp_path):
    folder = good_folder(tmp_path / "photos")
    write(folder / "bad.jpg", half(jpeg()))
    write(folder / "good1.txt", b"\xff")
    write(folder / "worse.png", "text")
    report = inspect(folder, TRIGGER, {})
    assert len(report.errors) == 3
    assert [path.name for path in report.unreadable] == ["bad.jpg", "worse.png"]
    assert [sample.image_path.name for sample in report.samples] == ["good0.jpg", "good1.jpg", "good2.jpg"]


def test_several_entries_of_one_folder_say_it_once(tmp_path):
    folder = good_folder(tmp_path / "photos")
    write(folder / "bad.jpg", b"")
    write(folder / "lone.txt", "x")
    entries = [DatasetSection(folder_path=str(folder), resolution=(size,)) for size in (64, 96)]
    report = inspect_datasets(entries, TRIGGER)
    assert len(report.errors) == 1
    assert sum("lone.txt" in line for line in report.warnings) == 1


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root reads what nobody may")
@needs_posix
@pytest.mark.parametrize("name", ["good1.jpg", "good1.txt", "sub"])
def test_what_may_not_be_read_is_named(tmp_path, name):
    folder = good_folder(tmp_path / "photos")
    good_folder(folder / "sub", 1)
    (folder / name).chmod(0)
    try:
        report = inspect(folder, TRIGGER, {})
    finally:
        (folder / name).chmod(0o700)
    (line,) = report.errors
    assert name in line
    assert "readable" in line


def test_a_photo_is_read_once_while_it_does_not_change(tmp_path, monkeypatch):
    folder = good_folder(tmp_path / "photos")
    inspect(folder, TRIGGER, {})
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded again"))
        assert inspect(folder, TRIGGER, {}).errors == []
    write(folder / "good1.jpg", half(jpeg()))
    assert len(inspect(folder, TRIGGER, {}).errors) == 1


def test_the_table_shows_buckets_crops_and_corrections(tmp_path):
    folder = tmp_path / "photos"
    write(folder / "a.jpg", jpeg((128, 64), seed=1))
    write(folder / "b.png", cutout(128))
    exif = Image.Exif()
    exif[0x0112] = 6
    write(folder / "c.jpg", jpeg((90, 64), seed=2, exif=exif))
    (table,) = inspect(folder, TRIGGER, {"resolution": (128,)}).tables
    rows = [line.split() for line in table.splitlines()[2:-1]]
    assert rows == [
        ["128", "64x64", "1", "0.0%", "0.0%"],
        ["128", "64x96", "1", "7.2%", "7.2%"],
        ["128", "128x64", "1", "0.0%", "0.0%"],
    ]
    assert table.splitlines()[-1] == "  corrected while reading: 1 EXIF orientation, 1 transparency"


def test_the_example_set_has_photos_to_correct_and_no_errors():
    folder = Path(__file__).resolve().parents[2] / "datasets_example" / "clothing"
    report = inspect(folder, TRIGGER, {"resolution": (512,)})
    assert (report.errors, report.warnings) == ([], [])
    assert sum("transparency" in facts.traits for facts in report.photos.values()) == 3
