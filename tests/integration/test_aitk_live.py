"""`validation:` and the live page's commands in the stand-in of ai-toolkit; in a real one: test_aitk_real_live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coat_flux.saves.errors import ResumeError
from coat_flux.watch.live import give_command, read_status
from tests.helpers.aitk_standin.host import Host, make_entry, standin_host  # noqa: F401
from tests.integration.test_aitk_trust import _at_step, _entry, _state, assert_same_end


def test_the_live_page_samples_saves_and_stops_between_steps(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host.run(training_folder=str(host.root / "whole"), **_entry())
    prompts = {"sample": {"sampler": "flowmatch", "prompts": ["a sks shirt"], "sample_every": 100}}

    def ask(*names: str) -> None:
        status = read_status(host.save_folder)
        assert (status.alive, status.takes) == (True, ("sample", "save", "stop"))
        for name in names:
            give_command(host.save_folder, name)

    with monkeypatch.context() as patch:
        _at_step(host, patch, 2, lambda loss: ask("sample", "save"))
        process = host.run(**_entry(steps=3), **prompts)
    assert process.drawn_at[-2:] == [2, 3]  # asked for, and the last
    said = capsys.readouterr().out
    assert "after 2 steps" in said
    with monkeypatch.context() as patch:
        _at_step(host, patch, 3, lambda loss: ask("stop"))
        with pytest.raises(SystemExit) as ended:
            host.run(**_entry(), **prompts)
    assert ended.value.code == 130
    assert "the live page asks to stop" in capsys.readouterr().out
    assert (_state(host).name, read_status(host.save_folder).ended) == ("state-000000006", "stopped")
    host.run(**_entry(), **prompts)
    assert read_status(host.save_folder).ended == "finished"
    assert_same_end(host, "whole", "out")


def test_photos_held_out_are_in_no_data_set_and_measured_when_due(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(make_entry(host.root, "any")["datasets"][0]["folder_path"])
    kept = sorted(path.name for path in folder.glob("*.png") if path.name != "1.png")
    measured: list[int] = []

    def measure(photos: Any, done: int) -> float:
        measured.append(done)
        photos.curve.append((done, 1.0 / done if done else 2.0))
        return photos.curve[-1][1]

    host.start()
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.encode", lambda photos: None)
    monkeypatch.setattr("coat_flux.trainers.ai_toolkit.photos.HeldOutPhotos.measure", measure)
    asked = {"validation": {"hold_out": ["1.png"], "every": 3}}
    process = host.run(**_entry(steps=5), **asked)
    read = Path(process.dataset_configs[0].folder_path)
    assert sorted(path.name for path in read.glob("*.png")) == kept
    assert [path.name for path in (host.save_folder / "coat" / "held_out" / "0").rglob("*.png")] == ["1.png"]
    host.run(**_entry(steps=8), **asked)
    assert measured == [0, 4, 5, 7, 8]
    table = (host.save_folder / "coat" / "validation.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in table] == ["step", "0", "4", "5", "7", "8"]
    assert "lowest held-out loss 0.125000 at step 8 (" in capsys.readouterr().out
    with pytest.raises(ResumeError, match=r"datasets\[0\]\.held_out"):
        host.run(**_entry(steps=9))
