"""A diverged run, a damaged state, a full disk inside ai-toolkit: what is printed brings the run to its good end."""

from __future__ import annotations

import shlex
import shutil

import pytest

from coat_flux.saves.errors import SaveError
from coat_flux.watch.guard import DeadRunError
from tests.helpers.aitk_standin.host import Host, standin_host  # noqa: F401
from tests.integration.test_aitk_trust import _entry, _state, assert_same_end


def test_a_diverged_run_goes_back_by_the_command_it_prints_and_ends_as_the_good_one(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    from coat_flux.cli.entry import main

    host.run(training_folder=str(host.root / "whole"), **_entry())
    host.run(**_entry(steps=6))
    with pytest.raises(DeadRunError, match=r"weights have grown .*lower train\.lr.*then go back to step 4 and") as end:
        host.run(**_entry(lr=1e4))
    command = str(end.value).partition("start the job again: ")[2]
    words = shlex.split(
        command
    )  # "coat-flux rewind ...", or Python and the path of coat_flux/cli where it is not on PATH
    assert main(words[words.index("rewind") :]) == 0
    assert "moved to" in capsys.readouterr().out
    host.run(**_entry())
    assert "[coat] resume: continues after step 4" in capsys.readouterr().out
    assert_same_end(host, "whole", "out")


@pytest.mark.parametrize("file", ["aitk/state.json", "aitk/rng.safetensors", "optimizer.pt", "commit/files.json"])
def test_a_damaged_byte_falls_back_to_the_older_state(
    host: Host, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    host.run(training_folder=str(host.root / "whole"), **_entry())
    host.run(**_entry(steps=6))
    damaged = bytearray((_state(host) / file).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (_state(host) / file).write_bytes(damaged)
    host.run(**_entry())
    out = capsys.readouterr().out
    assert "the run resumes from step 4" in out
    assert "delete" not in out
    assert (host.save_folder / "coat" / "set-aside-000000004" / "state-000000006" / file).read_bytes() == damaged
    assert_same_end(host, "whole", "out")


def test_a_disk_without_room_for_a_save_ends_the_run_before_its_first_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("."))(0, 0, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SaveError, match=r"one save takes .* are free; free some of this disk"):
        host.run(**_entry())
    assert not list(host.save_folder.glob("*.safetensors"))
