"""Try every supported Python with the lowest and the newest dependencies: `python scripts/test_versions.py`.

Each cell of the table is a new virtual environment, made and removed one after the other:

1. torch is installed (the lowest one where a CPU build of it is to be had, else the one that the quickstart takes).
2. `scripts/quickstart.py` installs this package and everything it needs, trains, draws and checks. For `lowest`, pip is
   held to the lower bounds of setup.py.
3. pytest runs what both trainers share.

    python scripts/test_versions.py                                  # all cells; 10 to 20 minutes each on 2 cores
    python scripts/test_versions.py --python 3.11 --which lowest     # one
    python scripts/test_versions.py --quick                          # what CI runs: lowest, this Python, short

Pythons are looked for on PATH, below pyenv's folder and with Windows' `py`; `--pythons` names others. A cell whose
Python or whose torch is not to be had says so. Exit code 0 only when every cell was tried and is green.
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
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _environment

ROOT = _environment.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
WHICH = ("lowest", "newest")
SHOWN = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pillow")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "ml_dtypes", "setuptools>=70")
TESTS = (
    "tests/unit",
    "tests/autograd",
    "tests/optim",
    "tests/reliability/test_photo_colours.py",
    "tests/reliability/test_resume.py",
    "tests/integration/test_aitk_jobs.py",
    "tests/integration/test_aitk_standin.py",
    "tests/integration/test_data_cache.py",
    "tests/integration/test_engine_train.py",
    "tests/integration/test_lora_attach.py",
    "tests/integration/test_options_visible.py",
    "tests/integration/test_readme_commands.py",
)
QUICK_TESTS = (
    *(f"tests/unit/test_data_{name}.py" for name in ("captions", "dataset", "images", "prepare", "sheet", "survey")),
    "tests/unit/test_check.py",
    "tests/unit/test_config_job.py",
    "tests/unit/test_config_coat.py",
    "tests/unit/test_export.py",
    "tests/unit/test_engine_network.py",
    "tests/unit/test_scripts_versions.py",  # the notebook shows the pictures of the training that has just run
)
QUICK_STEPS = 20
INSTALLED = re.compile(r"installed coat-flux in (\d+) s")
LOSS = re.compile(r"validation loss ([\d.]+ -> [\d.]+)")


@dataclass
class Cell:
    """One row of the table; what was not reached stays a dash."""

    python: str
    which: str
    versions: dict[str, str] = field(default_factory=dict)
    installed: str = "-"
    training: str = "-"
    tests: str = "-"
    green: bool = False

    def row(self) -> str:
        """The row as Markdown."""
        cells = [self.python, self.which, *(self.versions.get(name, "-") for name in SHOWN)]
        return "| " + " | ".join([*cells, self.installed, self.training, self.tests]) + " |"


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, metavar="X.Y", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--which", nargs="+", choices=WHICH, help="default: both")
    parser.add_argument("--pythons", nargs="+", default=[], metavar="FILE", help="interpreters to take before others")
    parser.add_argument("--quick", action="store_true", help="lowest, this Python, a short training, fewer tests")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of the training (default: all)")
    parser.add_argument("--cuda-torch", action="store_true", help="take a CUDA build (gigabytes) without a CPU build")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too, after every cell")
    _environment.add_options(parser)
    options = parser.parse_args()
    options.python = options.python or ([".".join(platform.python_version_tuple()[:2])] if options.quick else PYTHONS)
    options.which = options.which or (["lowest"] if options.quick else WHICH)
    options.steps = options.steps or (QUICK_STEPS if options.quick else None)
    return options


def lowest_bounds() -> dict[str, str]:
    """Requirement pinned to setup.py's lower bound → the bound as setup.py has it."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "INSTALL_REQUIRES"]
    return {bound.replace(">=", "==", 1): bound for bound in ast.literal_eval(values[0])}


def find_python(version: str, given: list[str]) -> str | None:
    """Return an interpreter of this version that starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [*given, sys.executable, shutil.which(f"python{version}"), shutil.which("python3")]
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    commands = [[path] for path in candidates if path] + ([["py", f"-{version}"]] if shutil.which("py") else [])
    asked = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for command in commands:
        try:
            done = subprocess.run([*command, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found, _, path = done.stdout.strip().partition(" ")
        if found == version:
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
        """Run Python in the repository's root, standard error with the output."""
        command = [self.python, *arguments]
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        return subprocess.run(command, cwd=ROOT, env=self.variables, check=False, **kept)

    def pip_install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pip."""
        return self.run("-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments)

    def versions(self) -> dict[str, str]:
        """Return what is installed of `SHOWN`."""
        code = (
            "import importlib.metadata as m, json\n"
            "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
        )
        found = json.loads(self.run("-c", code).stdout)
        return {name: found[name] for name in SHOWN if name in found}


def install_torch(environment: Environment, which: str, options: argparse.Namespace) -> str:
    """Install a torch that fits; return "" or why there is none."""
    if _environment.has_nvidia_gpu():
        return ""  # the quickstart installs a CUDA build
    index = ["--index-url", options.torch_index_url] if options.torch_index_url else []
    wanted = [_environment.TORCH_VERSION]
    if which == "lowest":
        wanted.insert(0, f"{'.'.join(map(str, _environment.TORCH_MINIMUM))}.0")
    elif index and environment.pip_install("torch", *index).returncode == 0:
        return ""
    local = "+cpu" if sys.platform == "linux" else ""
    for version in wanted:
        if environment.pip_install(f"torch=={version}{local}", *index).returncode == 0:
            return ""
    if options.cuda_torch:
        done = environment.pip_install(f"torch=={_environment.TORCH_VERSION}")
        return "" if done.returncode == 0 else last_line(done.stdout)
    return f"no CPU build of torch {' or '.join(wanted)} for this Python on pip's index"


def try_cell(cell: Cell, base: str, options: argparse.Namespace) -> None:
    """Make the environment, train and test in it, and fill in the row."""
    pins = [pin for pin in lowest_bounds() if not pin.startswith("torch==")] if cell.which == "lowest" else []
    with tempfile.TemporaryDirectory(prefix="coat-versions-", ignore_cleanup_errors=True) as folder:
        environment = Environment(Path(folder) / "venv", base, pins)
        cell.installed = install_torch(environment, cell.which, options)
        if cell.installed:
            return
        trained = install_and_train(cell, environment, options.steps)
        cell.versions = environment.versions()
        if not cell.installed.startswith("no"):
            tests = QUICK_TESTS if options.quick else TESTS
            cell.green = run_tests(cell, environment, Path(folder), tests) and trained


def install_and_train(cell: Cell, environment: Environment, steps: int | None) -> bool:
    """Run the quickstart, which installs everything; whether it passed its own checks."""
    started = time.monotonic()
    done = environment.run("scripts/quickstart.py", *(["--steps", str(steps)] if steps else []))
    installed, loss = (pattern.search(done.stdout) for pattern in (INSTALLED, LOSS))
    cell.installed = f"{installed[1]} s" if installed else f"no: {last_line(done.stdout)}"
    if installed:
        cell.training = f"rc {done.returncode}, {loss[1] if loss else 'no loss'}, {time.monotonic() - started:.0f} s"
    if done.returncode:
        show(done.stdout)
    return done.returncode == 0


def run_tests(cell: Cell, environment: Environment, folder: Path, tests: tuple[str, ...]) -> bool:
    """Run pytest, its output kept back while it is green: a CI that reads closing lines reads another run's."""
    tools = environment.pip_install(*TOOLS)
    report = folder / "tests.xml"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not aitk and not gpu", f"--junitxml={report}"]
    done = environment.run("-m", "pytest", *options, *tests)
    if not report.exists():
        cell.tests = f"not run: {last_line(done.stdout)}"
        show(tools.stdout + done.stdout)
        return False
    suite = ET.parse(report).getroot().find("testsuite")
    count, failed, errors, skipped = (int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped"))
    cell.tests = f"{count - failed - errors - skipped} passed, {failed + errors} failed, {skipped} skipped"
    if done.returncode:
        show(done.stdout)
    return done.returncode == 0 and count > 0


def table(cells: list[Cell]) -> str:
    """The cells as a Markdown table."""
    head = ["Python", "which", *SHOWN, "installed", "training: validation loss", "tests"]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(cell.row() for cell in cells)])


def last_line(text: str) -> str:
    """Return the last line of what a command said, fit for a table; pip warns even after its error."""
    said = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING:")]
    return (said or ["no output"])[-1].replace("|", "/")[:200]


def show(text: str) -> None:
    """Print the end of what a failed command said, set in so that it is not read as this program's own result."""
    print("\n".join(f"    {line}" for line in text.splitlines()[-200:] if not line.startswith("WARNING:")), flush=True)


def run_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Try the cells, one after the other."""
    for version in options.python:
        base = find_python(version, options.pythons)
        for which in options.which:
            cell = Cell(version, which)
            if base is None:
                cell.installed = f"no Python {version} found; name one with --pythons"
            else:
                print(f"Python {version} ({base}), {which} versions", flush=True)
                try_cell(cell, base, options)
            yield cell


def main() -> int:
    """Try every cell and print the table."""
    options = parse_arguments()
    cells: list[Cell] = []
    for cell in run_cells(options):
        cells.append(cell)
        print(cell.row(), flush=True)
        if options.out:
            options.out.write_text(table(cells) + "\n", encoding="utf-8")
    print(f"\n{table(cells)}")
    return 0 if all(cell.green for cell in cells) else 1


def _name(node: ast.Assign) -> str:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
