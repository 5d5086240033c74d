"""What a wheel holds is enough: the ready-made configs, the example photos and the mini-FLUX, far from any checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "coat_core", "extensions", "configs", "datasets_example")


def _run(command: list[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel, built from a copy of the sources, as pip would unpack it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__", "_*cache"))
        else:
            (folder / "src").mkdir(exist_ok=True)
            shutil.copy(source, folder / "src" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "."]
    _run([*build, "./src"], folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site-packages")
    return folder / "site-packages"


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*.*") if path.is_file())
    inside = ((path.relative_to(folder), path) for path in files)
    return {name.as_posix(): path.read_bytes() for name, path in inside if not name.parts[0].startswith("_")}


def test_it_holds_configs_photos_and_the_mini_flux(installed: Path) -> None:
    package = installed / "coat_flux"
    assert _files(package / "configs") == _files(ROOT / "configs")
    photos = _files(package / "datasets_example")
    assert len(photos) == 33
    assert photos.items() <= _files(ROOT / "datasets_example").items()
    mini_flux = _files(package / "tiny_flux" / "mini_flux")
    assert mini_flux == _files(ROOT / "extensions" / "coat_flux" / "tiny_flux" / "mini_flux")


def test_the_shipped_config_trains_from_it(installed: Path, tmp_path: Path) -> None:
    def coat_flux(*arguments: str) -> str:
        return _run([sys.executable, "-m", "coat_flux.cli", *arguments], tmp_path, PYTHONPATH=str(installed))

    assert "datasets_example: 33 files copied" in coat_flux("examples")
    config = tmp_path / "configs" / "flux_clothing_tiny.yaml"
    text = config.read_text(encoding="utf-8")
    shortened, count = re.subn(r"(?m)^( +)steps: \d+ ", r"\1steps: 1 ", text)
    assert count == 1
    config.write_text(shortened)
    coat_flux("train", "configs/flux_clothing_tiny.yaml")
    assert (tmp_path / "output" / "flux_clothing_tiny" / "flux_clothing_tiny.safetensors").stat().st_size > 10_000
    again = coat_flux("examples")
    assert "flux_clothing_tiny.yaml: left as it is, it differs from" in again
    assert "datasets_example: 0 files copied" in again
    assert "steps: 1 " in config.read_text(encoding="utf-8")
