"""scripts/_environment.py: which torch a machine gets, when pip runs, and what a user reads when it cannot work."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "2.13.0"


@pytest.fixture
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_environment", ROOT / "scripts" / "_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pip:
    """Stands in for pip: remembers the arguments, fails for the requirements named in `missing`."""

    def __init__(self, missing: tuple[str, ...] = ()):
        self.calls: list[list[str]] = []
        self.missing = missing

    def __call__(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        failed = any(name in arguments for name in self.missing)
        return subprocess.CompletedProcess(arguments, int(failed), "pip's own words" if failed else "")


def _machine(monkeypatch, environment, *, gpu: bool, torch=None, cuda: str = "", missing: tuple[str, ...] = ()) -> Pip:
    pip = Pip(missing)
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "_torch_release", lambda: torch)
    monkeypatch.setattr(environment, "_torch_cuda", lambda: cuda)
    monkeypatch.setattr(environment, "_pip_install", pip)
    return pip


CPU_BUILD, DEFAULT_BUILD = f"torch=={VERSION}+cpu", f"torch=={VERSION}"
MACHINES = {  # what is there → what pip is asked for
    "a CPU": ({"gpu": False}, [CPU_BUILD]),
    "a CPU, no CPU build on the index": ({"gpu": False, "missing": (CPU_BUILD,)}, [CPU_BUILD, DEFAULT_BUILD]),
    "a torch that fits": ({"gpu": False, "torch": (2, 9)}, []),
    "a CUDA torch on a CPU": ({"gpu": False, "torch": (2, 9), "cuda": "12.8"}, []),
    "a CUDA torch on a GPU": ({"gpu": True, "torch": (2, 9), "cuda": "12.8"}, []),
    "an old torch": ({"gpu": False, "torch": (2, 8)}, [CPU_BUILD]),
    "a GPU": ({"gpu": True, "cuda": "12.8"}, [DEFAULT_BUILD]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_which_torch_a_machine_gets(monkeypatch, environment, name: str) -> None:
    machine, asked = MACHINES[name]
    pip = _machine(monkeypatch, environment, **machine)
    environment._install_torch(None)
    assert pip.calls == [[requirement] for requirement in asked]


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"gpu": True, "cuda": ""}, "--torch-index-url"),
        ({"gpu": True, "torch": (2, 13), "cuda": ""}, "--torch-index-url"),
        ({"gpu": False, "missing": (CPU_BUILD, DEFAULT_BUILD)}, "pip failed"),
    ],
    ids=["a CPU build was installed on a GPU", "a CPU build is there on a GPU", "pip fails"],
)
def test_what_cannot_be_installed_is_an_error(monkeypatch, environment, machine, words: str, capsys) -> None:
    pip = _machine(monkeypatch, environment, **machine)
    with pytest.raises(environment.SetupError, match=words):
        environment._install_torch(None)
    assert ("pip's own words" in capsys.readouterr().out) == ("missing" in machine)
    assert len(pip.calls) == {"torch": 0, "missing": 2}.get(next(iter({"torch", "missing"} & set(machine)), ""), 1)


def test_a_cpu_torch_is_replaced_from_the_index_given(monkeypatch, environment) -> None:
    pip = _machine(monkeypatch, environment, gpu=True, torch=(2, 13), cuda="")
    builds = iter(["", "12.8"])
    monkeypatch.setattr(environment, "_torch_cuda", lambda: next(builds))
    environment._install_torch("some-index")
    assert pip.calls == [["--force-reinstall", DEFAULT_BUILD, "--index-url", "some-index"]]


def test_the_package_is_installed_once_per_setup_py(monkeypatch, environment, tmp_path) -> None:
    pip = _machine(monkeypatch, environment, gpu=False)
    (tmp_path / "env").mkdir()
    (tmp_path / "setup.py").write_text("one")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for _ in range(2):
        environment._install_package("test")
    assert pip.calls == [["-e", f"{tmp_path}[test]"]]
    environment._install_package("")
    assert pip.calls[1:] == [["-e", str(tmp_path)]]
    (tmp_path / "setup.py").write_text("two")
    environment._install_package("test")
    assert len(pip.calls) == 3


def test_a_failed_installation_is_tried_again(monkeypatch, environment, tmp_path) -> None:
    (tmp_path / "setup.py").write_text("one")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    _machine(monkeypatch, environment, gpu=False, missing=(str(tmp_path),))
    with pytest.raises(environment.SetupError, match="coat-flux: pip failed"):
        environment._install_package("")
    pip = _machine(monkeypatch, environment, gpu=False)
    assert environment._install_package("") is True
    assert environment._install_package("") is False
    assert pip.calls == [["-e", str(tmp_path)]]


@pytest.mark.parametrize("installed", [True, False])
def test_only_a_new_install_starts_a_new_interpreter(monkeypatch, environment, installed: bool) -> None:
    reruns = []
    monkeypatch.setattr(environment, "_in_environment", lambda: True)
    monkeypatch.setattr(environment, "_install_torch", lambda index_url: None)
    monkeypatch.setattr(environment, "_install_package", lambda extra: installed)
    monkeypatch.setattr(environment, "_rerun_in", reruns.append)
    environment.prepare(None)
    assert reruns == ([Path(sys.executable)] if installed else [])


def test_old_python_is_named(monkeypatch, environment, capsys) -> None:
    monkeypatch.setattr(environment, "PYTHON_MINIMUM", (99, 0))
    with pytest.raises(SystemExit) as stopped:
        environment.prepare(None)
    assert "must be 3.10 or newer" in str(stopped.value)
    assert sys.executable in str(stopped.value)


@pytest.mark.parametrize(
    ("base", "conda_name", "expected"),
    [("elsewhere", None, True), ("here", None, False), ("here", "photos", True), ("here", "base", False)],
)
def test_what_counts_as_an_environment(monkeypatch, environment, base: str, conda_name, expected: bool) -> None:
    monkeypatch.setattr(sys, "prefix", "here")
    monkeypatch.setattr(sys, "base_prefix", base)
    monkeypatch.delenv(environment.NO_VENV_VARIABLE, raising=False)
    for name, value in (("CONDA_PREFIX", conda_name and "here"), ("CONDA_DEFAULT_ENV", conda_name)):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    assert environment._in_environment() is expected
    monkeypatch.setenv(environment.NO_VENV_VARIABLE, "1")
    assert environment._in_environment()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize("code", [0, 9])
def test_nvidia_gpu_is_found_without_torch(monkeypatch, environment, tmp_path, code: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    device_node = Path("/dev/nvidia0").exists()
    assert environment.has_nvidia_gpu() is (code == 0 or device_node)
    tool.unlink()
    assert environment.has_nvidia_gpu() is device_node


def test_index_url_comes_from_option_or_variable(monkeypatch, environment) -> None:
    import argparse

    monkeypatch.setenv("COAT_TORCH_INDEX_URL", "from-variable")
    parser = argparse.ArgumentParser()
    environment.add_options(parser)
    assert parser.parse_args([]).torch_index_url == "from-variable"
    assert parser.parse_args(["--torch-index-url", "from-option"]).torch_index_url == "from-option"
