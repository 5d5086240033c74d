"""scripts/bench_memory.py and scripts/gradient_error.py at a small size, as processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tolerances import (
    BLOCK_GRADIENT_FLOOR_DB,
    BLOCK_OUTPUT_FLOOR_DB,
    KEPT_TWO_COUNTS_RTOL,
    SMALL_BLOCK_GRADIENT_FLOOR_DB,
)

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, RANK = 256, 16
SMALL = ["--heads", "2", "--text-tokens", "32", "--image-tokens", "96"]


def run(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *SMALL, *options], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_bytes_kept_by_loop_and_flow(tmp_path: Path) -> None:
    loops = ["--loop", "peft", "--loop", "toolkit"]
    out = run("bench_memory.py", *loops, "--json", str(tmp_path / "b.json"), "--picture", str(tmp_path / "b.png"))
    rows = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["rows"]
    kept = {(row["loop"], row["name"]): row["bytes"] for row in rows}
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "a stand-in for ai-toolkit's LoRA modules" in out
    for loop in ("peft", "toolkit"):
        for kind, tensors, adapters in (("double", 12, 6), ("single", 10, 5)):
            found = kept[loop, "fused"][kind]
            # the tensors, their scales, and h of each adapter; log-sum-exp and modulation vectors besides
            listed = tensors * (1 + 4 / 128) + adapters * RANK * 2 / HIDDEN
            assert listed < found < listed + 2.0
            assert found < kept[loop, "fused, attention bf16"][kind] < kept[loop, "generic"][kind]
            assert kept[loop, "generic"][kind] < kept[loop, "bf16"][kind] / 2
    for row in rows:  # two ways to count agree
        seen = row["hooks"]
        assert (seen is None) == (row["name"] in ("bf16, recomputed", "generic", "recomputed from FP8"))
        assert seen is None or seen == pytest.approx(row["bytes"], rel=KEPT_TWO_COUNTS_RTOL)
    for kind in ("double", "single"):
        assert kept["peft", "fused"][kind] == pytest.approx(kept["toolkit", "fused"][kind], rel=0.02)
        assert kept["peft", "bf16, recomputed"][kind] == pytest.approx(2, rel=0.1)  # the block's input
        assert kept["peft", "recomputed from FP8"][kind] < 2
    assert rows[0]["flux_dev_gb"]["1024"]["single"] == pytest.approx(
        38 * rows[0]["bytes"]["single"] * 4608 * 3072 / 1e9
    )


def test_gradient_errors_of_every_adapter(tmp_path: Path) -> None:
    out = run("gradient_error.py", "--setting", "fused, per_row", "--json", str(tmp_path / "g.json"))
    results = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    assert [(r["block"], r["outliers"]) for r in results] == [
        (kind, outliers) for kind in ("double", "single") for outliers in (1.0, 30.0)
    ]
    for result in results:
        adapters = dict(result["rows"])
        assert adapters.pop("output")["db"] > BLOCK_OUTPUT_FLOOR_DB
        assert len(adapters) == {"double": 2 * 14, "single": 2 * 6}[result["block"]]  # A and B of each linear
        decibels = [row["db"] for row in adapters.values()]
        assert statistics.median(decibels) > BLOCK_GRADIENT_FLOOR_DB
        assert min(decibels) > SMALL_BLOCK_GRADIENT_FLOOR_DB
    assert out.count("\n| fused, per_row |") == 4
