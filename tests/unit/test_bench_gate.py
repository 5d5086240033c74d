"""The benchmark gives no figures from code whose tests fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from coat_flux.bench import gate
from coat_flux.bench.configurations import LEVELS
from coat_flux.cli.entry import main

TINY = ["--double", "1", "--single", "1", "--heads", "2", "--rank", "4", "--device", "cpu"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a green test for kernels and a red one for the optimizer."""
    for folder, line in (("kernels", "assert 1 + 1 == 2"), ("optim", "assert 1 + 1 == 3")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(f"def test_sum():\n    {line}\n")
    return tmp_path


def test_the_tests_of_the_level_decide(repository: Path) -> None:
    green = gate.run_tests(["op"], repository)
    assert green.passed
    assert green.text.startswith("tests/kernels: green (1 passed in ")
    red = gate.run_tests(["op", "optimizer"], repository)
    assert not red.passed
    assert red.text.startswith("tests/kernels tests/optim: red (1 failed, 1 passed in ")
    assert "assert (1 + 1) == 3" in red.output


def test_the_folders_exist_in_this_repository() -> None:
    assert set(gate.TESTS) == set(LEVELS)
    for folders in gate.TESTS.values():
        assert all((gate.REPOSITORY / folder).is_dir() for folder in folders)


def test_an_installation_without_tests_says_so(tmp_path: Path) -> None:
    verdict = gate.run_tests(["step"], tmp_path)
    assert verdict == gate.Verdict(True, "no tests were run: this is an installation without the repository")


def test_without_pytest_the_command_says_what_to_install(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "REPOSITORY", repository)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--level", "optimizer", *TINY]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the tests that come before figures need pytest, pytest-timeout, hypothesis; pip ")
    assert len(error.splitlines()) == 1


def test_the_bench_extra_holds_what_its_tests_need() -> None:
    setup = (gate.REPOSITORY / "setup.py").read_text(encoding="utf-8")
    extra = setup[setup.index('"bench": [') : setup.index('"test": [')]
    assert [package for package in gate.NEEDED.values() if f'"{package}>=' not in extra] == []


def test_red_tests_give_exit_code_1_and_no_figures(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "REPOSITORY", repository)
    assert main(["bench", "--level", "optimizer", *TINY, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("tests: tests/kernels tests/optim: red (1 failed")
    assert "no figures from code whose tests fail" in captured.err
    assert "assert (1 + 1) == 3" in captured.err
    assert not (tmp_path / "out").exists()


def test_arguments_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (
        (["--configs", "bf17"], "invalid choice: 'bf17'"),
        (["--resolution", "500"], "'500': must be a multiple of 16, such as 512"),
        (["--rounds", "0"], "'0': must be a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *wrong])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "--level", "optimizer", "--configs", "bf16", "--skip-tests"]) == 2
    assert "--configs bf16: none is measured at --level optimizer" in capsys.readouterr().err
