"""scripts/test_versions.py: which versions a cell gets. And what the Colab notebook runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("_test_versions", ROOT / "scripts" / "test_versions.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_every_python_has_one_lowest_version_of_each_dependency(versions: ModuleType, python: str) -> None:
    pins = [Requirement(pin) for pin in versions.lowest_bounds()]
    active = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [pin.name for pin in active]
    assert len(set(names)) == len(names)
    assert {*versions.SHOWN, "safetensors", "pyyaml"} <= set(names)
    assert all(len(pin.specifier) == 1 and next(iter(pin.specifier)).operator == "==" for pin in active)
    minimum = ".".join(map(str, versions._environment.TORCH_MINIMUM))
    assert f"torch=={minimum}" in versions.lowest_bounds()
    assert [name for name in versions.TESTS + versions.QUICK_TESTS if not (ROOT / name).exists()] == []


def test_the_notebook_installs_here_and_names_files_that_exist() -> None:
    content = json.loads((ROOT / "notebooks" / "quickstart_colab.ipynb").read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    compile("\n".join(line for line in lines if not line.startswith(("!", "%"))), "notebook", "exec")
    assert "%env COAT_NO_VENV=1" in lines
    quickstart = (ROOT / "scripts" / "quickstart.py").read_text(encoding="utf-8")
    for name in ("coat_quickstart", "without_and_with_lora.png"):
        assert name in quickstart
        assert name in "".join(lines)
    commands = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "python scripts/quickstart.py" in commands
    named = re.findall(r"(?:scripts|configs)/[\w.]+", "\n".join(commands))
    assert [name for name in named if not (ROOT / name).exists()] == []
