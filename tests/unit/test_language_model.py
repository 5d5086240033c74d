"""scripts/language_model.py: it learns in bf16 and with COAT, counts bytes, and pairs seeds."""

import json
import math

import pytest
import torch

from scripts import language_model as script


def test_both_learn_from_the_same_start_and_bytes_are_counted(tmp_path):
    script.main(["--size", "tiny", "--seeds", "1", "--arms", "bf16", "coat", "--out", str(tmp_path)])
    found = {path.stem.split("-")[2]: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    for result in found.values():
        assert result["losses"][0] == pytest.approx(math.log(256), abs=0.1)
        assert result["losses"][-1] < 0.8 * result["losses"][0]
        assert result["loss"] < 0.8 * math.log(256)
    assert found["bf16"]["losses"] != found["coat"]["losses"]
    assert found["bf16"]["losses"] == pytest.approx(found["coat"]["losses"], rel=0.02)
    assert found["bf16"]["state_bytes"] == pytest.approx(8.0, abs=0.01)
    assert 2.0 < found["coat"]["state_bytes"] < 2.5  # many parameters are shorter than a block
    assert found["coat"]["saved_bytes"] < 0.8 * found["bf16"]["saved_bytes"]


def test_gaps_are_paired_by_seed():
    losses = {"bf16": (1.0, 2.0, 3.0), "coat": (1.1, 2.1, 3.4)}
    runs = {arm: [script.Result(loss, [], 8.0, 100.0, 0.1) for loss in each] for arm, each in losses.items()}
    text = script.table(runs)
    half = 4.303 * math.sqrt(0.03) / math.sqrt(3)  # of the gaps 0.1, 0.1, 0.4
    assert f"| COAT, moments e4m3 expanded | 2.2000 | +0.2000 ± {half:.4f} |" in text
    assert "standard deviation 1.0000" in text


def test_held_out_files_are_not_trained_on():
    train, held_out = (part.to(torch.uint8).numpy().tobytes() for part in script.standard_library(1e3))
    assert 0.05 < len(held_out) / len(train) < 0.2
    assert held_out[2000:3000] not in train
