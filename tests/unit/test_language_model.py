"""scripts/language_model.py: it learns in bf16 and with COAT, and counts bytes."""

import json
import math

import pytest

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
