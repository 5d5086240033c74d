"""`coat-flux data`: report, contact sheet, exit code."""

import numpy as np
import pytest
import yaml
from PIL import Image

from coat_flux.cli.entry import main
from tests.helpers.engine_job import engine_job
from tests.reliability.photos import good_folder, jpeg, write

GREEN = (0, 160, 64)


def run(*arguments: object) -> int:
    return main(["data", *map(str, arguments)])


def test_a_good_folder_is_reported_and_drawn(tmp_path, capsys):
    folder = good_folder(tmp_path / "photos")  # 3 photos, which are few
    sheet = tmp_path / "sheets" / "a.png"
    assert run(folder, "--resolution", 64, "--trigger", "ohwx", "--sheet", sheet) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"datasets[0].folder_path={folder}: 3 images, 3 captions"
    assert [line.split(":")[1] for line in out if line.startswith(("warning", "error"))] == [" datasets"]
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert (pixels == GREEN).all(axis=-1).sum() > 3 * 4 * 60


def test_errors_are_printed_counted_and_drawn(tmp_path, capsys, monkeypatch):
    folder = good_folder(tmp_path / "photos")
    write(folder / "bad.jpg", b"")
    write(folder / "good1.txt", "a [trigger]")
    monkeypatch.chdir(tmp_path)
    assert run(folder) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {folder / 'bad.jpg'}: cannot be read as an image (it is not JPEG, PNG or WebP")
    assert ("warning: " in captured.out, "trigger_word" in captured.out) == (True, False)  # a YAML may have one
    assert (tmp_path / "output" / "data" / "photos.png").is_file()
    assert run(tmp_path / "nowhere") == 2
    assert "folder not found" in capsys.readouterr().err


def test_a_yaml_says_everything_itself(tmp_path, capsys):
    folder = good_folder(tmp_path / "photos")
    write(folder / "c.jpg", jpeg(seed=4))
    job = engine_job(
        "shirt", model=tmp_path / "m", images=folder, out=tmp_path / "out", coat={"data": {"background": "black"}}
    )
    path = write(tmp_path / "job.yaml", yaml.safe_dump(job))
    sheet = tmp_path / "sheet.png"
    assert run(path, "--sheet", sheet) == 0
    out = capsys.readouterr().out
    assert "4 images, 3 captions" in out
    assert "warning: " in out
    assert sheet.is_file()
    assert run(path, "--resolution", 64) == 2
    assert "error: --resolution: " in capsys.readouterr().err
    assert run(write(tmp_path / "empty.yaml", "")) == 2
    assert run(folder, "--sheet", tmp_path / "sheet.what") == 2
    assert "--sheet" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(folder, "--resolution", "12")
    assert "from 32 to 8192" in capsys.readouterr().err
