"""Every malformed config is answered at once, by one line that names the place, and exit code 2."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from coat_flux.cli.entry import main
from tests.reliability.bad_config import BOTH, BadConfig
from tests.reliability.configs import BAD_CONFIGS
from tests.tolerances import CONFIG_ANSWER_S

CASES = [pytest.param(case, host, id=f"{host}: {case.name}") for case in BAD_CONFIGS for host in case.hosts]


@pytest.fixture(autouse=True)
def _no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)


def test_all_differ() -> None:
    contents = {case.content() + f"{case.suffix} {case.hosts}".encode() for case in BAD_CONFIGS}
    assert len(contents) == len(BAD_CONFIGS)
    assert len({case.name for case in BAD_CONFIGS}) == len(BAD_CONFIGS)


@pytest.mark.parametrize(("case", "host"), CASES)
def test_one_clear_finding(case: BadConfig, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"job{case.suffix}"
    path.write_bytes(case.content())
    start = time.process_time()
    code = main(["check", str(path), "--host", host, "--no-data"])
    seconds = time.process_time() - start
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith(f"error: {path}: ")
    assert all(word in line for word in case.words), line
    assert line.count("; ") == 1, "one remedy"
    assert len(line) < 600
    assert seconds < CONFIG_ANSWER_S
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("host", BOTH)
def test_the_config_they_are_made_from_has_no_finding(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(BadConfig("valid", ()).content())
    assert main(["check", str(path), "--host", host, "--no-data", "--elsewhere"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == (2 if host == "standalone" else 1)
    assert "'run' would train 1500 steps into output" in out


@pytest.mark.parametrize(("host", "key"), [("standalone", "train.stpes"), ("ai-toolkit", "train.do_cgf")])
def test_the_real_command_answers_the_same(host: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(BadConfig("typo", (), changes=((key, 1),)).content())
    command = [sys.executable, "-m", "coat_flux.cli", "check", str(path), "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"config.process[0].{key}: unknown key; did you mean" in line
