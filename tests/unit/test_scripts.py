"""Scripts at a small size, which torch their environment gets, and what the Colab notebook runs."""

import json
import math
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import _environment as environment
from scripts import bench_memory, language_model
from tests.helpers.flux_block import make_model

ROOT = Path(__file__).parents[2]
VERSION = "2.13.0"
CPU_BUILD, DEFAULT_BUILD = f"torch=={VERSION}+cpu", f"torch=={VERSION}"


@pytest.mark.parametrize(
    ("machine", "index", "asked", "error"),
    [
        ({"gpu": False}, None, [[CPU_BUILD]], None),
        ({"gpu": False, "missing": (CPU_BUILD,)}, None, [[CPU_BUILD], [DEFAULT_BUILD]], None),
        ({"gpu": False, "torch": (2, 8)}, None, [[CPU_BUILD]], None),
        ({"gpu": False, "missing": (CPU_BUILD, DEFAULT_BUILD)}, None, [[CPU_BUILD], [DEFAULT_BUILD]], "pip failed"),
        ({"gpu": True, "torch": (2, 9), "cuda": [True]}, None, [], None),
        ({"gpu": True, "torch": (2, 13), "cuda": [False, False]}, None, [], "--torch-index-url"),
        ({"gpu": True, "cuda": [True]}, "some-index", [[DEFAULT_BUILD, "--index-url", "some-index"]], None),
    ],
)
def test_which_torch_a_machine_gets(monkeypatch, machine, index, asked, error):
    """`cuda` says of each torch that is asked whether it is a CUDA build; pip fails for requirements in `missing`."""
    calls: list[list[str]] = []

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        calls.append([*arguments])
        failed = any(name in arguments for name in machine.get("missing", ()))
        return subprocess.CompletedProcess(arguments, int(failed), "pip's own words")

    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: machine["gpu"])
    monkeypatch.setattr(environment, "_torch_release", lambda: machine.get("torch"))
    monkeypatch.setattr(environment, "_torch_has_cuda", Mock(side_effect=machine.get("cuda", ())))
    monkeypatch.setattr(environment, "_pip_install", pip)
    if error is None:
        environment._install_torch(index)
    else:
        with pytest.raises(environment.SetupError, match=error):
            environment._install_torch(index)
    assert calls == asked


def test_the_notebook_installs_here_and_names_files_that_exist():
    content = json.loads((ROOT / "notebooks" / "quickstart_colab.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    compile("\n".join(line for line in lines if not line.startswith(("!", "%"))), "notebook", "exec")
    assert {"%env COAT_NO_VENV=1", "!python scripts/quickstart.py"} <= set(lines)
    quickstart = (ROOT / "scripts" / "quickstart.py").read_text(encoding="utf-8")
    for name in ("coat_quickstart", "without_and_with_lora.png"):
        assert name in quickstart
        assert name in "".join(lines)


def test_language_models_learn_from_the_same_start_and_bytes_are_counted(tmp_path):
    language_model.main(["--size", "tiny", "--seeds", "1", "--arms", "bf16", "coat", "--out", str(tmp_path)])
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


def test_bytes_kept_by_loop_and_flow(monkeypatch):
    hidden, rank, text, image = 256, 16, 32, 96
    # rough sizes of blocks: counting them takes longer than to run them, and nothing here depends on them
    monkeypatch.setattr("coat_flux.blocks.sizes._counted", lambda *of_block: (2**18 if of_block[-1] else 2**22, 2**20))
    model = make_model(2)
    rows = [row for row in bench_memory.ROWS if row.loop == "peft" or (row.loop, row.name) == ("toolkit", "fused")]
    kept = {(row.loop, row.name): bench_memory.measure(model, row, text, image) for row in rows}
    for kind, tensors, adapters in (("double", 12, 6), ("single", 10, 5)):
        fused = kept["peft", "fused"][kind]
        # the tensors, their scales, and h of each adapter; log-sum-exp and modulation vectors besides
        listed = tensors * (1 + 4 / 128) + adapters * rank * 2 / hidden
        assert listed < fused < listed + 2.0
        assert fused < kept["peft", "fused, attention bf16"][kind] < kept["peft", "generic"][kind]
        assert kept["peft", "generic"][kind] < kept["peft", "bf16"][kind] / 2
        assert kept["toolkit", "fused"][kind] == pytest.approx(fused, rel=0.02)
        assert kept["peft", "bf16, recomputed"][kind] == pytest.approx(2, rel=0.1)  # the block's input
        assert kept["peft", "recomputed from FP8"][kind] < 2
