"""scripts/test_versions.py: which versions a cell gets. And the Colab notebook runs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart_colab.ipynb"
QUICKSTART_RUN = ROOT / "output" / "coat_quickstart"
THIS = ".".join(platform.python_version_tuple()[:2])


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("_test_versions", ROOT / "scripts" / "test_versions.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_has_one_lowest_version_of_each_dependency(versions: ModuleType, python: str) -> None:
    pins = [Requirement(pin) for pin in versions.lowest_bounds()]
    active = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [pin.name for pin in active]
    assert len(set(names)) == len(names)
    assert {*versions.SHOWN, "safetensors", "pyyaml"} <= set(names)
    assert all(len(pin.specifier) == 1 and next(iter(pin.specifier)).operator == "==" for pin in active)


def test_what_it_names_is_there(versions: ModuleType) -> None:
    minimum = ".".join(map(str, versions._environment.TORCH_MINIMUM))
    assert f"torch=={minimum}" in versions.lowest_bounds()
    assert [name for name in versions.TESTS + versions.QUICK_TESTS if not (ROOT / name).exists()] == []


class Notebook:
    """Runs code cells as Colab does: `!` lines in a shell, `%cd`, `%env`, and Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.ran = folder, {}, []
        self.environment = {**os.environ, "GIT_CONFIG_COUNT": "0"}

    def run(self, cell: str) -> None:
        python = []
        for line in cell.splitlines():
            if line.startswith("!"):
                self._shell(line[1:].format(**self.names))
            elif line.startswith("%cd "):
                self.folder = self.folder / line.split()[1]
            elif line.startswith("%env "):
                name, _, value = line.removeprefix("%env ").partition("=")
                self.environment[name] = value
            else:
                assert not line.startswith("%"), line
                python.append(line)
                if line.startswith("REPOSITORY"):
                    self.names["REPOSITORY"] = ROOT
        exec("\n".join(python), self.names | {"REPOSITORY": ROOT})

    def _shell(self, command: str) -> None:
        """Run a command; of those that train or that another test runs, only that they are there."""
        self.ran.append(command)
        if command.startswith("python scripts/"):
            command = f"{sys.executable} {command.split()[1]} --help"
        elif command.startswith("coat-flux "):
            return
        subprocess.run(command, shell=True, cwd=self.folder, env=self.environment, check=True, capture_output=True)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="it clones the repository")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code cell but for the training, whose pictures the last quickstart here has left, or are drawn."""
    import PIL.Image

    shown: list[str] = []
    display = ModuleType("IPython.display")
    display.display = shown.append
    display.Image = lambda filename, width=None: PIL.Image.open(filename).size and filename
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, display)
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in content["cells"] if cell["cell_type"] == "code")
    notebook = Notebook(tmp_path)
    for cell in cells[:2]:
        notebook.run(cell)
    assert notebook.folder == tmp_path / "coat-flux"
    assert notebook.environment["COAT_NO_VENV"] == "1"
    assert notebook.ran[-1] == "python scripts/quickstart.py"
    if (QUICKSTART_RUN / "samples").is_dir():
        (notebook.folder / "output").symlink_to(ROOT / "output")
    else:
        for name in ("coat/without_and_with_lora.png", "samples/1__000000000_0.jpg"):
            picture = notebook.folder / "output" / QUICKSTART_RUN.name / name
            picture.parent.mkdir(parents=True)
            PIL.Image.new("RGB", (64, 64)).save(picture)
    monkeypatch.chdir(notebook.folder)
    for cell in cells[2:]:
        notebook.run(cell)
    assert Path(shown[0]).name == "without_and_with_lora.png"
    assert len(shown) >= 2
    assert notebook.ran[-2:] == ["coat-flux doctor", "coat-flux plan configs/flux_clothing_coat.yaml --gpu 16"]
