"""Install what the tests need and run them: `python scripts/test.py [pytest arguments]`.

Runs ruff (lint and format), mypy and pytest, all of them even when one fails, and exits non-zero when any did. `--all`
adds the tests that take minutes each (`ALL_ONLY` in tests/conftest.py) and a short run with the lowest versions of
setup.py (`scripts/test_versions.py --quick`). Makes a virtual environment in `.venv` when it is not started from one.
Tests that need a GPU, triton or an ai-toolkit checkout skip themselves and say why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import _environment

MAX_WORKERS = 4  # each holds PyTorch and a small model or two: about 1.5 GB


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return our own options and what is left for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also what takes minutes, and the lowest versions")
    _environment.add_options(parser)
    return parser.parse_known_args()


def run_stage(name: str, arguments: list[str]) -> tuple[str, int, float]:
    """Run `python arguments` from the repository's root and return (name, exit code, seconds)."""
    print(f"\n=== {name} ===", flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, *arguments], cwd=_environment.ROOT, check=False).returncode
    return name, code, time.monotonic() - started


def side_by_side(pytest_arguments: list[str]) -> list[str]:
    """Return options that run test files side by side on the cores there are, unless `-n` is given."""
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    if workers == 1 or any(argument.startswith("-n") for argument in pytest_arguments):
        return []
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes started from here
    return ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]  # in the order of tests/conftest.py


def main() -> int:
    """Run every stage and print the summary."""
    options, pytest_arguments = parse_arguments()
    if options.all:
        pytest_arguments = ["--all", *pytest_arguments]
    started = time.monotonic()
    _environment.prepare(options.torch_index_url, extra="test")
    install_s = time.monotonic() - started
    results = [
        run_stage("ruff check", ["-m", "ruff", "check", "."]),
        run_stage("ruff format", ["-m", "ruff", "format", "--check", "."]),
        run_stage("mypy", ["-m", "mypy"]),
        run_stage("pytest", ["-m", "pytest", *side_by_side(pytest_arguments), *pytest_arguments]),
    ]
    if options.all:
        results.append(run_stage("lowest versions", ["scripts/test_versions.py", "--quick"]))
    print("\n=== summary ===")
    print(f"{'install':<12} {'ok':<7} {install_s:7.1f} s")
    for name, code, seconds in results:
        print(f"{name:<12} {'ok' if code == 0 else 'FAILED':<7} {seconds:7.1f} s")
    failed = [name for name, code, _ in results if code]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
