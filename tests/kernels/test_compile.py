"""Every kernel, as its launcher starts it at FLUX.1's shapes, compiles for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# of the script's: FP8 by integers, by instruction, and both newer dot products; each case for one of them in turn, for
# that is what time allows
TARGETS = 86, 89, 90, 120
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compile")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(SCRIPT), "--json", str(folder / "rows.json"), "--in-turn"]
    command += ["--sm", *map(str, TARGETS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (folder / "rows.json").exists(), run.stderr
    return json.loads((folder / "rows.json").read_text("utf-8"))["rows"]


@pytest.mark.triton
def test_no_kernel_spills_registers(rows: list[dict[str, Any]]) -> None:
    assert {row["sm"] for row in rows} == set(TARGETS)
    assert [row for row in rows if row["stack_bytes"] > 0] == []


@pytest.mark.triton
def test_fp8_is_converted_by_instruction(rows: list[dict[str, Any]]) -> None:
    converting = [row for row in rows if row["fp8_by_instruction"] is not None]
    assert len(converting) > len(rows) / 3
    assert [row for row in converting if not row["fp8_by_instruction"]] == []


@pytest.mark.triton
def test_every_kernel_is_compiled(rows: list[dict[str, Any]]) -> None:
    from tests.helpers.kernel_cases import launcher_modules

    names = {name for module in launcher_modules() for name in vars(module)}
    kernels = {name for name in names if name.startswith("_") and name.endswith("_kernel")}
    assert kernels == {row["kernel"] for row in rows}
