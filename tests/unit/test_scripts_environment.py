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

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.calls.append([*arguments])
        failed = any(name in arguments for name in self.missing)
        return subprocess.CompletedProcess(arguments, int(failed), "pip's own words" if failed else "")


def _machine(monkeypatch, environment, *, gpu: bool, torch=None, cuda=(), missing: tuple[str, ...] = ()) -> Pip:
    """A machine with this torch; `cuda` says of each torch that is asked whether it is a CUDA build."""
    pip, builds = Pip(missing), iter(cuda)
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "_torch_release", lambda: torch)
    monkeypatch.setattr(environment, "_torch_has_cuda", lambda: next(builds))
    monkeypatch.setattr(environment, "_pip_install", pip)
    return pip


CPU_BUILD, DEFAULT_BUILD = f"torch=={VERSION}+cpu", f"torch=={VERSION}"
MACHINES = {  # what is there, the index given → what pip is asked for
    "a CPU": ({"gpu": False}, None, [[CPU_BUILD]]),
    "a CPU, no CPU build on the index": (
        {"gpu": False, "missing": (CPU_BUILD,)},
        None,
        [[CPU_BUILD], [DEFAULT_BUILD]],
    ),
    "a torch that fits": ({"gpu": False, "torch": (2, 9)}, None, []),
    "a CUDA torch on a GPU": ({"gpu": True, "torch": (2, 9), "cuda": [True]}, None, []),
    "an old torch": ({"gpu": False, "torch": (2, 8)}, None, [[CPU_BUILD]]),
    "a GPU": ({"gpu": True, "cuda": [True]}, None, [[DEFAULT_BUILD]]),
    "a CPU build on a GPU, an index": (
        {"gpu": True, "torch": (2, 13), "cuda": [False, True]},
        "some-index",
        [["--force-reinstall", DEFAULT_BUILD, "--index-url", "some-index"]],
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_which_torch_a_machine_gets(monkeypatch, environment, name: str) -> None:
    machine, index, asked = MACHINES[name]
    pip = _machine(monkeypatch, environment, **machine)
    environment._install_torch(index)
    assert pip.calls == asked


@pytest.mark.parametrize(
    ("machine", "words", "calls"),
    [
        ({"gpu": True, "cuda": [False]}, "--torch-index-url", 1),
        ({"gpu": True, "torch": (2, 13), "cuda": [False, False]}, "--torch-index-url", 0),
        ({"gpu": False, "missing": (CPU_BUILD, DEFAULT_BUILD)}, "pip failed", 2),
    ],
    ids=["a CPU build was installed on a GPU", "a CPU build is there on a GPU", "pip fails"],
)
def test_what_cannot_be_installed_is_an_error(monkeypatch, environment, machine, words: str, calls: int) -> None:
    pip = _machine(monkeypatch, environment, **machine)
    with pytest.raises(environment.SetupError, match=words):
        environment._install_torch(None)
    assert len(pip.calls) == calls


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
    pip.missing = (f"{tmp_path}[test]",)
    with pytest.raises(environment.SetupError, match="pip failed"):
        environment._install_package("test")
    pip.missing = ()
    assert environment._install_package("test")  # what failed is tried again
    assert not environment._install_package("test")
    assert len(pip.calls) == 4


@pytest.mark.parametrize(
    ("base", "no_venv", "installs", "reruns"),
    [
        ("here", "", False, [Path("of the venv")]),
        ("here", "1", False, []),
        ("elsewhere", "", False, []),
        ("elsewhere", "", True, [Path("python")]),
    ],
)
def test_when_the_script_starts_over(monkeypatch, environment, base: str, no_venv: str, installs: bool, reruns) -> None:
    """Outside an environment, and after an installation: in the test `_rerun_in` returns."""
    started = []
    monkeypatch.setattr(sys, "prefix", "here")
    monkeypatch.setattr(sys, "base_prefix", base)
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.setenv(environment.NO_VENV_VARIABLE, no_venv)
    monkeypatch.setattr(environment, "_create_venv", lambda: Path("of the venv"))
    monkeypatch.setattr(environment, "_install_torch", lambda index_url: None)
    monkeypatch.setattr(environment, "_install_package", lambda extra: installs)
    monkeypatch.setattr(environment, "_rerun_in", started.append)
    environment.prepare(None)
    assert started == reruns


def test_old_python_is_named(monkeypatch, environment) -> None:
    monkeypatch.setattr(environment, "PYTHON_MINIMUM", (99, 0))
    with pytest.raises(SystemExit, match=r"must be 3.10 or newer") as stopped:
        environment.prepare(None)
    assert sys.executable in str(stopped.value)


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
