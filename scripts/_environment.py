"""Make sure a script runs in a virtual environment with torch and this package in it.

Used by `quickstart.py` and `test.py`. Standard library only, and the module itself still parses on an old Python, so
that the version check below is what a user of one sees.

1. Not in a virtual environment: create `.venv` in the repository and start over inside it. The environment variable
   COAT_NO_VENV says that this Python is the one to install into.
2. Install torch first. A machine with an NVIDIA GPU must end up with a CUDA build, any other machine gets the CPU build
   where the configured package index has one. An importable torch that fits is kept.
3. Install this package in editable mode; a stamp in the environment skips this while setup.py is unchanged.

pip is quiet on success; its whole output is shown on failure.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV_DIR = ROOT / ".venv"
TORCH_VERSION = "2.13.0"
TORCH_MINIMUM = (2, 9)
PYTHON_MINIMUM = (3, 10)
INDEX_VARIABLE = "COAT_TORCH_INDEX_URL"
NO_VENV_VARIABLE = "COAT_NO_VENV"  # set to anything: install into the Python that runs the script (Colab, a container)


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what to change."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both scripts share."""
    parser.add_argument(
        "--torch-index-url",
        default=os.environ.get(INDEX_VARIABLE),
        metavar="URL",
        help=f"package index to install torch from (default: pip's configuration, or ${INDEX_VARIABLE})",
    )


def prepare(torch_index_url: str | None, extra: str = "") -> None:
    """Return only when this process runs in an environment with torch and this package; else re-run the script in it.

    Args:
        torch_index_url: index to take torch from; None is pip's configuration.
        extra: the extra of setup.py to install, "" or "test".
    """
    # idle OpenMP threads that spin make a run several times slower wherever other programs want the cores too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if sys.version_info < PYTHON_MINIMUM:
            version = ".".join(map(str, sys.version_info[:3]))
            raise SetupError(f"Python {version} ({sys.executable}): must be 3.10 or newer; run this with a newer one")
        if sys.prefix == sys.base_prefix and not os.environ.get(NO_VENV_VARIABLE):
            _rerun_in(_create_venv())
        _install_torch(torch_index_url)
        if _install_package(extra):
            _rerun_in(Path(sys.executable))  # an editable install is seen by interpreters that start after it
    except SetupError as error:
        sys.exit(f"error: {error}")


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, found without torch."""
    if Path("/dev/nvidia0").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and _run([tool, "-L"]).returncode == 0


def _say(message: str) -> None:
    print(f"[setup] {message}", flush=True)


def _create_venv() -> Path:
    """Return the Python of `.venv`, made when it is not there or broken."""
    python = VENV_DIR / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if python.exists() and _run([str(python), "-m", "pip", "--version"]).returncode == 0:
        return python
    _say(f"creating a virtual environment in {VENV_DIR}")
    try:
        venv.EnvBuilder(with_pip=True, clear=True).create(VENV_DIR)
    except (subprocess.CalledProcessError, OSError) as error:
        shutil.rmtree(VENV_DIR, ignore_errors=True)
        raise SetupError(
            f"{VENV_DIR}: Python's venv module could not make it ({error}); on Debian and Ubuntu install the package "
            f"python3-venv, or run this script from a virtual environment of your own"
        ) from error
    return python


def _rerun_in(python: Path) -> None:
    """Replace this process by the same script under another Python. Does not return."""
    command = [str(python), *sys.argv]
    sys.stdout.flush()
    if os.name == "nt":  # os.execv on Windows detaches from the console and loses the exit code
        sys.exit(subprocess.run(command, check=False).returncode)
    os.execv(str(python), command)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )


def _pip_install(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments])


def _must(result: subprocess.CompletedProcess[str], what: str, remedy: str) -> None:
    if result.returncode:
        print(result.stdout, flush=True)
        raise SetupError(f"{what}: pip failed, its output is above; {remedy}")


def _torch_release() -> tuple[int, int] | None:
    """(major, minor) of the installed torch, None without one."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build. Fails when torch does not import."""
    result = _run([sys.executable, "-c", "import torch; print('cuda', torch.version.cuda)"])
    if result.returncode:
        print(result.stdout, flush=True)
        raise SetupError("torch: installed but cannot be imported, its error is above; reinstall it, or delete .venv")
    return not result.stdout.strip().endswith("None")


def _install_torch(index_url: str | None) -> None:
    """Leave a torch in the environment that fits the machine."""
    gpu = has_nvidia_gpu()
    release = _torch_release()
    fits = release is not None and release >= TORCH_MINIMUM
    if fits and (not gpu or _torch_has_cuda()):
        return
    if index_url or not fits:
        _say(f"installing torch {TORCH_VERSION} ({'CUDA' if gpu else 'CPU'}); this can take minutes")
        if index_url:
            flags = ["--force-reinstall"] if release is not None else []
            result = _pip_install(*flags, f"torch=={TORCH_VERSION}", "--index-url", index_url)
        else:
            build = "" if gpu else "+cpu"  # the CPU build carries no CUDA packages, where the index has one
            result = _pip_install(f"torch=={TORCH_VERSION}{build}")
            if result.returncode and build:
                result = _pip_install(f"torch=={TORCH_VERSION}")
        _must(result, f"torch=={TORCH_VERSION}", "check the network and that this Python has a wheel of it")
    if gpu and not _torch_has_cuda():
        raise SetupError(
            f"torch in {sys.prefix}: a CPU build on a machine with an NVIDIA GPU; rerun with --torch-index-url URL (or "
            f'{INDEX_VARIABLE}), the index that PyTorch\'s "Start Locally" page shows for your CUDA version'
        )


def _install_package(extra: str) -> bool:
    """Install this repository in editable mode, once per content of setup.py; True when that was done now."""
    wanted = hashlib.sha256((ROOT / "setup.py").read_bytes() + str(ROOT).encode() + extra.encode()).hexdigest()
    stamp = Path(sys.prefix) / f".coat-flux-{extra}.stamp"
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        return False
    _say(f"installing coat-flux in {sys.prefix}; this can take minutes")
    started = time.monotonic()
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    _must(_pip_install("-e", target), "coat-flux", "check the network, or delete .venv and run this script again")
    stamp.write_text(wanted, encoding="ascii")
    _say(f"installed coat-flux in {time.monotonic() - started:.0f} s")
    return True
