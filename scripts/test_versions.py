"""Try every supported Python with the lowest and the newest dependencies: `python scripts/test_versions.py`.

Each cell of the table is a new virtual environment, made and removed one after the other:

1. torch is installed: for `lowest` the lowest one of which there is a CPU build, else the one the quickstart takes.
2. `scripts/quickstart.py` installs this package and everything it needs, trains, draws and checks. For `lowest`, pip is
   held to the lower bounds of setup.py.
3. pytest runs what both trainers share.

    python scripts/test_versions.py                                  # all cells; 10 to 20 minutes each on 2 cores
    python scripts/test_versions.py --python 3.11 --which lowest     # one
    python scripts/test_versions.py --quick                          # lowest, this Python, short training, few tests

Pythons are looked for on PATH and below pyenv's folder. Exit code 0 only when every cell was tried and is green.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import _environment

ROOT = _environment.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
WHICH = ("lowest", "newest")
SHOWN = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pillow")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "ml_dtypes", "setuptools>=70")
TESTS = ("tests/unit", "tests/autograd", "tests/optim", "tests/integration/test_engine_train.py")
TESTS += ("tests/integration/test_readme_commands.py",)
QUICK_TESTS = ("tests/unit/test_check.py", "tests/unit/test_config_job.py", "tests/unit/test_data_images.py")
QUICK_TESTS += ("tests/unit/test_scripts.py",)  # the notebook shows the pictures of the training before
QUICK_STEPS = 20
LOSS = re.compile(r"validation loss ([\d.]+ -> [\d.]+)")
RESULT = re.compile(r"\d+ (?:passed|failed|error).* in [\d.]+s")


@dataclass
class Cell:
    """One row of the table; what was not reached stays a dash."""

    python: str
    which: str
    versions: dict[str, str] = field(default_factory=dict)
    training: str = "-"
    tests: str = "-"
    green: bool = False


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, metavar="X.Y", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--which", nargs="+", choices=WHICH, help="default: both")
    parser.add_argument("--quick", action="store_true", help="lowest, this Python, a short training, fewer tests")
    options = parser.parse_args()
    this = ".".join(platform.python_version_tuple()[:2])
    options.python = options.python or ([this] if options.quick else PYTHONS)
    options.which = options.which or (["lowest"] if options.quick else WHICH)
    return options


def lowest_bounds() -> list[str]:
    """The requirements of setup.py, pinned to their lower bounds."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTALL_REQUIRES":
            return [bound.replace(">=", "==", 1) for bound in ast.literal_eval(node.value)]
    raise LookupError("setup.py: INSTALL_REQUIRES is not assigned at its top level")


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), shutil.which("python3")]
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for path in filter(None, candidates):
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


class Environment:
    """A virtual environment in a folder of its own, and the commands that run in it."""

    def __init__(self, folder: Path, base: str, pins: list[str]) -> None:
        subprocess.run([base, "-m", "venv", str(folder)], check=True, capture_output=True)
        self.python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables["PIP_ONLY_BINARY"] = ":all:"  # what has no wheel here is an error, not a matter for compilers
        if pins:
            constraints = folder / "lowest.txt"
            constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
            self.variables["PIP_CONSTRAINT"] = str(constraints)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the repository's root, standard error with the output; the end of a failed one is printed."""
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        done = subprocess.run([self.python, *arguments], cwd=ROOT, env=self.variables, check=False, **outputs)
        if done.returncode:  # set in, so that it is not read as this program's own result
            print("\n".join(f"    {line}" for line in done.stdout.splitlines()[-200:]), flush=True)
        return done

    def pip_install(self, *arguments: str) -> bool:
        """Whether pip could install it."""
        return self.run("-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments).returncode == 0

    def versions(self) -> dict[str, str]:
        """Return what is installed of `SHOWN`."""
        code = (
            "import importlib.metadata as m, json\n"
            "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
        )
        installed = json.loads(self.run("-c", code).stdout)
        return {name: installed[name] for name in SHOWN if name in installed}


def install_torch(environment: Environment, which: str) -> bool:
    """Install the lowest torch of which there is a CPU build, or the quickstart's; none where a GPU needs CUDA's."""
    if _environment.has_nvidia_gpu():
        return True  # the quickstart installs a CUDA build
    local = "+cpu" if sys.platform == "linux" else ""
    lowest = f"{'.'.join(map(str, _environment.TORCH_MINIMUM))}.0"
    wanted = [lowest, _environment.TORCH_VERSION] if which == "lowest" else [_environment.TORCH_VERSION]
    return any(environment.pip_install(f"torch=={version}{local}") for version in wanted)


def try_cell(cell: Cell, base: str, *, quick: bool) -> None:
    """Make the environment, train and test in it, and fill in the row."""
    pins = [pin for pin in lowest_bounds() if not pin.startswith("torch==")] if cell.which == "lowest" else []
    with tempfile.TemporaryDirectory(prefix="coat-versions-", ignore_cleanup_errors=True) as folder:
        environment = Environment(Path(folder) / "venv", base, pins)
        if not install_torch(environment, cell.which):
            cell.training = "no CPU build of torch for this Python on pip's index"
            return
        trained = environment.run("scripts/quickstart.py", *(["--steps", str(QUICK_STEPS)] if quick else []))
        loss = LOSS.search(trained.stdout)
        cell.training = f"rc {trained.returncode}, {loss[1] if loss else 'no loss'}"
        cell.versions = environment.versions()
        environment.pip_install(*TOOLS)
        options = ["-q", "-p", "no:cacheprovider", "-m", "not aitk and not gpu"]
        tested = environment.run("-m", "pytest", *options, *(QUICK_TESTS if quick else TESTS))
        results = RESULT.findall(tested.stdout)
        cell.tests = results[-1] if results else "not run"
        cell.green = trained.returncode == 0 and tested.returncode == 0


def table(cells: list[Cell]) -> str:
    """The cells as a Markdown table."""
    head = ["Python", "which", *SHOWN, "training: validation loss", "tests"]
    lines = [head, ["---"] * len(head)]
    for cell in cells:
        versions = [cell.versions.get(name, "-") for name in SHOWN]
        lines.append([cell.python, cell.which, *versions, cell.training, cell.tests])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Try every cell and print the table."""
    options = parse_arguments()
    cells: list[Cell] = []
    for version in options.python:
        base = find_python(version)
        for which in options.which:
            cell = Cell(version, which)
            cells.append(cell)
            if base is None:
                cell.training = f"no Python {version} on PATH or below pyenv's folder"
            else:
                print(f"Python {version} ({base}), {which} versions", flush=True)
                try_cell(cell, base, quick=options.quick)
            print(f"{cell.python} {which}: {cell.training}; {cell.tests}", flush=True)
    print(f"\n{table(cells)}")
    return 0 if all(cell.green for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
