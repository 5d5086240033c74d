"""scripts/_environment.py: which torch a machine gets, when pip runs, its errors. And what the Colab notebook runs."""

import json
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import _environment as environment

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
