"""No figures from code whose tests fail: the matching tests run first, where the repository's tests are there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = {
    "op": ("tests/kernels", "tests/autograd"),
    "block": ("tests/kernels", "tests/autograd"),
    "step": ("tests/kernels", "tests/autograd", "tests/optim"),
    "optimizer": ("tests/kernels", "tests/optim"),
}
NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}  # module: package


@dataclass(frozen=True)
class Verdict:
    """Whether figures may be given.

    Attributes:
        passed: False refuses.
        text: what ran, with what result; or why nothing did.
        output: of the tests, where they failed.
    """

    passed: bool
    text: str
    output: str = ""


def run_tests(levels: Sequence[str], repository: Path | None = None) -> Verdict:
    """Run the tests that belong to these levels.

    Args:
        levels: what will be measured.
        repository: folder that holds `tests`; by default the one this package is in.

    Raises:
        UserError: the tests are there, but not what runs them.
    """
    root = repository or REPOSITORY
    folders = list(dict.fromkeys(folder for level in levels for folder in TESTS[level] if (root / folder).is_dir()))
    if not folders:
        return Verdict(True, "no tests were run: this is an installation without the repository")
    listed = " ".join(folders)
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            f"the tests that come before figures need {', '.join(missing)}; pip install -e '{root}[bench]', "
            "or give --skip-tests, which the results will say"
        )
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *folders]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode:
        return Verdict(False, f"{listed}: red ({summary})", done.stdout + done.stderr)
    return Verdict(True, f"{listed}: green ({summary})")
