"""`coat-flux`: what it prints, where, and with which exit code."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from coat_flux.base.errors import UserError
from coat_flux.cli.entry import main
from tests.reliability.bad_configs import job_with, yaml_of


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml_of(job_with({"train.steps": 7, "sample.neg": "ugly"})), encoding="utf-8")
    return path


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for the engine's class."""
    trainer = Mock()
    monkeypatch.setitem(sys.modules, "coat_flux.trainers.standalone.trainer", SimpleNamespace(COATTrainer=trainer))
    for package in ("coat_core", "coat_flux"):
        monkeypatch.setattr(logging.getLogger(package), "level", logging.NOTSET)
    return trainer


@pytest.mark.parametrize("command", ["check", "train"])
def test_every_finding_goes_to_stderr_with_exit_code_2_and_no_traceback(command, tmp_path, capsys, trainer):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml_of(job_with({"train.stpes": 7, "train.lr": "x"})), encoding="utf-8")
    assert main([command, str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    start = f"error: {path}: config.process[0].train."
    assert sorted(line.removeprefix(start).split(":")[0] for line in lines) == ["lr='x'", "stpes"]
    assert not trainer.called


def test_train_hands_the_checked_job_to_the_engine(job_file, trainer):
    assert main(["train", str(job_file)]) == main(["train", str(job_file), "--name", "other"]) == 0
    job, renamed = (call.args[0] for call in trainer.call_args_list)
    assert (job.name, job.train.steps, job.file, renamed.name) == ("run", 7, str(job_file), "other")
    assert ["config.process[0].sample.neg" in note for note in job.notes] == [True]


def test_errors_of_the_user_need_no_traceback_and_other_ones_keep_theirs(job_file, trainer, capsys):
    for error, code, text in (
        (UserError("photos: no images; put some there"), 2, "error: photos: no images; put some there\n"),
        (MemoryError(), 2, "error: out of CPU memory"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):
        trainer.return_value.train.side_effect = error
        assert main(["train", str(job_file)]) == code
        assert capsys.readouterr().err.startswith(text)
    trainer.return_value.train.side_effect = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", str(job_file)])


def test_wrong_usage_is_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trian", "x"])
    assert "usage: coat-flux" in capsys.readouterr().err
    assert main(["check", "n" * 300]) == 2  # a path that no system allows


def test_help_and_mistakes_answer_without_importing_torch_and_show_names_that_the_console_cannot():
    code = """
import logging
import sys
from coat_flux.cli import main
for argv in (["--help"], ["--version"], ["train", "--help"], ["check", "写真.yaml"]):
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    heavy = {"torch", "diffusers", "transformers", "peft", "accelerate", "triton", "coat_core"} & set(sys.modules)
    print("HEAVY", sorted(heavy), code)
logging.getLogger("torchao.x").warning("Failed to load /x.so")
logging.getLogger("torchao.x").warning("a warning")
"""
    console = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=console)
    lines = [line for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    assert lines == ["HEAVY [] 0"] * 3 + ["HEAVY [] 2"], done.stderr
    error, *noise = done.stderr.splitlines()
    assert error.startswith(r"error: \u5199\u771f.yaml: no such file")
    assert noise == ["WARNING: a warning"]
