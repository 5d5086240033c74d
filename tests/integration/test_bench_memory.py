"""scripts/bench_memory.py at a small size."""

import pytest

from scripts import bench_memory
from tests.helpers.flux_block import make_model

HIDDEN, RANK = 256, 16
TEXT, IMAGE = 32, 96


def test_bytes_kept_by_loop_and_flow(monkeypatch):
    # rough sizes of blocks: counting them takes longer than to run them, and nothing here depends on them
    monkeypatch.setattr("coat_flux.blocks.sizes._counted", lambda *of_block: (2**18 if of_block[-1] else 2**22, 2**20))
    model = make_model(2)
    rows = [row for row in bench_memory.ROWS if row.loop == "peft" or (row.loop, row.name) == ("toolkit", "fused")]
    kept = {(row.loop, row.name): bench_memory.measure(model, row, TEXT, IMAGE) for row in rows}
    for kind, tensors, adapters in (("double", 12, 6), ("single", 10, 5)):
        fused = kept["peft", "fused"][kind]
        # the tensors, their scales, and h of each adapter; log-sum-exp and modulation vectors besides
        listed = tensors * (1 + 4 / 128) + adapters * RANK * 2 / HIDDEN
        assert listed < fused < listed + 2.0
        assert fused < kept["peft", "fused, attention bf16"][kind] < kept["peft", "generic"][kind]
        assert kept["peft", "generic"][kind] < kept["peft", "bf16"][kind] / 2
        assert kept["toolkit", "fused"][kind] == pytest.approx(fused, rel=0.02)
        assert kept["peft", "bf16, recomputed"][kind] == pytest.approx(2, rel=0.1)  # the block's input
        assert kept["peft", "recomputed from FP8"][kind] < 2
