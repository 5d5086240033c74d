"""Every kernel, as its launcher starts it at FLUX.1's shapes, compiles for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coat_flux.bench.limits import ENOUGH_WARPS

# of the script's: FP8 by integers, by instruction, and both newer dot products; each launch for one of them in turn, as
# time allows, and for all where it needs much shared memory
TARGETS = 86, 89, 90, 120
FEW_WARPS = {  # kernels that hold tiles of products or whole rows in registers: bound by latency too
    "_int8_mm_fwd_kernel",
    "_qkv_rope_fwd_kernel",
    "_cast_down_fwd_kernel",
    "_norm_modulate_bwd_kernel",
    "_gated_sum_fwd_kernel",
    "_gated_sum_bwd_kernel",
    "_lora_up_gradients_kernel",
}
SPILLS = [("_fp8_adamw_step_kernel", "adamw integers block 16", 120, 8)]  # bytes, by triton 3.7.1; by 3.9.0 none
SHARED_KB = {86: 99, 89: 99, 90: 227, 120: 99}  # of a program, at most
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compile")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(SCRIPT), "--json", str(folder / "rows.json"), "--in-turn"]
    command += ["--sm", *map(str, TARGETS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(run.stdout)  # the table: `pytest -s`
    assert (folder / "rows.json").exists(), run.stderr
    return json.loads((folder / "rows.json").read_text("utf-8"))["rows"]


@pytest.mark.triton
def test_no_kernel_spills_registers(rows):
    assert {row["sm"] for row in rows} == set(TARGETS)
    spilling = [row for row in rows if row["stack_bytes"] > 0]
    assert [(row["kernel"], row["case"], row["sm"], row["stack_bytes"]) for row in spilling] in ([], SPILLS)


@pytest.mark.triton
def test_shared_memory_fits_every_card(rows):
    assert [row for row in rows if row["shared_bytes"] > SHARED_KB[row["sm"]] * 1024] == []
    large: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row["shared_bytes"] > 64 * 1024:
            key = row["kernel"], row["case"]
            large[key] = {other["sm"] for other in rows if (other["kernel"], other["case"]) == key}
    assert "_lora_up_gradients_kernel" in {kernel for kernel, _ in large}
    assert [key for key, cards in large.items() if cards != set(TARGETS)] == []


@pytest.mark.triton
def test_enough_warps_fit_a_multiprocessor(rows):
    assert {row["kernel"] for row in rows if row["resident_warps"] < ENOUGH_WARPS} <= FEW_WARPS


@pytest.mark.triton
def test_fp8_is_converted_by_instruction(rows):
    converting = [row for row in rows if row["fp8_by_instruction"] is not None]
    assert len(converting) > len(rows) / 3
    assert [row for row in converting if not row["fp8_by_instruction"]] == []


@pytest.mark.triton
def test_every_kernel_is_compiled(rows):
    from tests.helpers.kernel_cases import launcher_modules

    names = {name for module in launcher_modules() for name in vars(module)}
    kernels = {name for name in names if name.startswith("_") and name.endswith("_kernel")}
    assert kernels == {row["kernel"] for row in rows}
