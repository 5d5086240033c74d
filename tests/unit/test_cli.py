"""`coat-flux`: what it prints, where, and with which exit code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image

from coat_flux.base.errors import UserError
from coat_flux.blocks.apply import FallbackError
from coat_flux.cli.entry import main
from coat_flux.data.files import DatasetError
from coat_flux.export.layouts import ExportError
from coat_flux.saves.errors import ResumeError, SaveError
from coat_flux.trainers.standalone.workers import LaunchError
from coat_flux.watch.guard import DeadRunError
from coat_flux.watch.oom import OutOfMemory

JOB = {
    "job": "extension",
    "config": {
        "name": "run",
        "process": [
            {
                "type": "coat_flux_trainer",
                "training_folder": "output",
                "network": {"type": "lora", "linear": 16},
                "datasets": [{"folder_path": "photos"}],
                "train": {"steps": 7, "optimizer": "coat_fp8_adamw", "dtype": "bf16"},
                "model": {"name_or_path": "m", "is_flux": True},
                "sample": {"neg": "ugly"},
            }
        ],
    },
}


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    return path


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for the engine's module; `.run` is what `train()` does, `.jobs` what it was given."""
    seen = SimpleNamespace(jobs=[], run=lambda: None)

    class COATTrainer:
        def __init__(self, job):
            seen.jobs.append(job)

        def train(self, **_):
            return seen.run()

    monkeypatch.setitem(sys.modules, "coat_flux.trainers.standalone.trainer", SimpleNamespace(COATTrainer=COATTrainer))
    for package in ("coat_core", "coat_flux"):
        monkeypatch.setattr(logging.getLogger(package), "level", logging.NOTSET)
    return seen


def raises(error):
    def run():
        raise error

    return run


def test_check_says_what_the_run_would_be_and_what_has_no_effect(job_file, capsys):
    assert main(["check", str(job_file), "--no-data", "--elsewhere"]) == 0
    out, err = capsys.readouterr()
    assert f"warning: {job_file}: config.process[0].sample.neg: " in out
    assert f"{job_file}: no error found; 'run' would train 7 steps into " in out
    assert err == ""


def test_check_looks_at_the_photos(job_file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(job_file)]) == 2
    assert "error: datasets[0].folder_path=photos: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train"])
def test_every_finding_goes_to_stderr_with_exit_code_2_and_no_traceback(command, tmp_path, capsys, trainer):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(JOB).replace("steps: 7", "stpes: 7\n      lr: x"), encoding="utf-8")
    assert main([command, str(path)]) == 2
    out, err = capsys.readouterr()
    assert "no error found" not in out
    assert err.splitlines() == [
        f"error: {path}: config.process[0].train.stpes: unknown key; did you mean 'steps'?",
        f"error: {path}: config.process[0].train.lr='x': must be a number above 0; write a number",
    ]
    assert trainer.jobs == []


def test_train_hands_the_checked_job_to_the_engine(job_file, trainer):
    assert main(["train", str(job_file)]) == 0
    (job,) = trainer.jobs
    assert (job.name, job.train.steps, job.file) == ("run", 7, str(job_file))
    assert [note.partition(": ")[2].partition("=")[0].partition(": ")[0] for note in job.notes] == [
        "config.process[0].sample.neg",
        "config.process[0].train.lr",
    ]


def test_a_name_replaces_the_file_s(job_file, trainer):
    assert main(["train", str(job_file), "--name", "other"]) == 0
    assert trainer.jobs[0].name == "other"


def test_ctrl_c_is_130(job_file, trainer, capsys):
    trainer.run = raises(KeyboardInterrupt())
    assert main(["train", str(job_file)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "kind",
    [DatasetError, DeadRunError, ExportError, FallbackError, LaunchError, OutOfMemory, ResumeError, SaveError],
)
def test_what_the_user_can_put_right_needs_no_traceback(kind, job_file, trainer, capsys):
    trainer.run = raises(kind("photos: no images; put some there"))
    assert main(["train", str(job_file)]) == 2
    assert capsys.readouterr().err == "error: photos: no images; put some there\n"


def test_other_errors_keep_their_traceback(job_file, trainer):
    trainer.run = raises(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", str(job_file)])


def test_install_prints_what_was_done_and_passes_undo(monkeypatch, capsys):
    calls = []

    class InstallError(UserError):
        pass

    def install(folder, undo=False):
        calls.append((folder, undo))
        if folder == "nowhere":
            raise InstallError("nowhere is not a checkout; give another")
        return ["linked a", "linked b"]

    module = SimpleNamespace(install=install)
    monkeypatch.setitem(sys.modules, "coat_flux.trainers.ai_toolkit.install", module)
    assert main(["install", "ait"]) == 0
    assert main(["install", "ait", "--undo"]) == 0
    assert capsys.readouterr().out == "linked a\nlinked b\n" * 2
    assert main(["install", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: nowhere is not a checkout; give another\n"
    assert calls == [("ait", False), ("ait", True), ("nowhere", False)]


@pytest.mark.parametrize("argv", [[], ["trian", "x"], ["train"]])
def test_wrong_usage_is_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: coat-flux" in capsys.readouterr().err


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["check", "missing.yaml"]])
def test_help_and_mistakes_answer_without_importing_torch(argv):
    heavy = "{'torch', 'diffusers', 'transformers', 'peft', 'accelerate', 'triton', 'coat_core'}"
    done = run_python(
        "import sys\nfrom coat_flux.cli import main\n"
        f"try:\n    code = main({argv})\nexcept SystemExit as stop:\n    code = stop.code\n"
        f"print('HEAVY', sorted({heavy} & set(sys.modules)), code)"
    )
    expected = 2 if "missing.yaml" in argv else 0
    assert done.stdout.splitlines()[-1] == f"HEAVY [] {expected}", done.stderr


def test_the_module_form_for_accelerate_launch():
    code = [sys.executable, "-m", "coat_flux.cli", "--version"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("coat-flux ")


def test_a_console_that_cannot_show_a_name_does_not_end_the_command(tmp_path):
    code = [sys.executable, "-m", "coat_flux.cli", "check", "写真.yaml"]
    done = subprocess.run(code, capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert rb"error: \u5199\u771f.yaml: no such file" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_a_process_without_memory_ends_with_one_line(tmp_path):
    Image.new("1", (9400, 9400)).save(tmp_path / "a.png")
    code = f"""
import resource, sys
from coat_flux.cli import main
import coat_flux.data.preflight, coat_flux.data.sheet
kb = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() // 1024
resource.setrlimit(resource.RLIMIT_AS, ((kb + 200_000) * 1024,) * 2)
sys.exit(main(["data", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: out of CPU memory; close other programs")
