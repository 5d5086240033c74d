"""`install`: what it puts into an ai-toolkit checkout, what it leaves alone, and what undo removes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from coat_flux.mini_flux import EMBEDDED_MODEL, MARKER_NAME
from coat_flux.trainers.ai_toolkit import install as module
from coat_flux.trainers.ai_toolkit.install import MANIFEST, InstallError, install
from tests.helpers.aitk_standin.host import CHECKOUT, PACKAGE, REPOSITORY, copy_checkout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stand-in; the embedded model is only its marker file."""

    def make(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / MARKER_NAME).write_text("{}")
        return folder

    monkeypatch.setattr("coat_flux.mini_flux.make_mini_flux", make)
    return copy_checkout(tmp_path / "ait")


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose user may not make links."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("a required privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)


def _contents(root: Path) -> dict[str, str]:
    """Every path below `root` with what it is."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            key = path.relative_to(root).as_posix()
            if "__pycache__" not in key:
                found[key] = (
                    os.readlink(path) if path.is_symlink() else ("folder" if path.is_dir() else path.read_bytes())
                )
    return found


def _configs() -> list[Path]:
    return [path for path in (REPOSITORY / "configs").iterdir() if path.suffix == ".yaml"]


def test_links_extension_configs_images_and_model(checkout: Path) -> None:
    lines = install(checkout)
    assert (checkout / "extensions" / "coat_flux").resolve() == PACKAGE
    assert _configs()
    for config in _configs():
        assert (checkout / "configs" / config.name).resolve() == config
    images = sorted((REPOSITORY / "datasets_example" / "clothing").glob("*.txt"))
    assert images
    assert (checkout / "datasets_example" / "clothing" / images[0].name).read_text() == images[0].read_text()
    assert not (checkout / "datasets_example" / "clothing").is_symlink()
    assert (checkout / EMBEDDED_MODEL / MARKER_NAME).is_file()
    assert lines[0] == "extensions/coat_flux: link made"
    assert lines[-1] == f"{EMBEDDED_MODEL}: embedded mini-FLUX model made"


def test_undo_leaves_the_checkout_as_it_was(checkout: Path) -> None:
    before = _contents(checkout)
    install(checkout)
    installed = _contents(checkout)
    assert all("already there" in line for line in install(checkout))
    assert _contents(checkout) == installed
    made = len(json.loads((checkout / MANIFEST).read_text())["made"])
    assert install(checkout, undo=True) == [f"removed {made} of {made} things that install had made"]
    assert _contents(checkout) == before
    assert install(checkout, undo=True)[0].startswith("nothing to undo")


def test_without_the_right_to_link_files_are_copied(checkout: Path, no_links: None) -> None:
    before = _contents(checkout)
    assert install(checkout)[0] == "extensions/coat_flux: copy made"
    assert (checkout / "extensions" / "coat_flux" / "__init__.py").read_text() == (PACKAGE / "__init__.py").read_text()
    assert all("already there" in line for line in install(checkout))
    (checkout / "extensions" / "coat_flux" / "__init__.py").write_text("old version")
    install(checkout)
    assert (checkout / "extensions" / "coat_flux" / "__init__.py").read_text() == (PACKAGE / "__init__.py").read_text()
    install(checkout, undo=True)
    assert _contents(checkout) == before


def test_files_of_the_user_are_left_alone(checkout: Path) -> None:
    name = _configs()[0].name
    (checkout / "configs").mkdir()
    (checkout / "configs" / name).write_text("mine")
    (checkout / "configs" / "other.yaml").write_text("mine too")
    lines = install(checkout)
    assert any(line.startswith(f"configs/{name}: left alone, it is a file of yours") for line in lines)
    install(checkout, undo=True)
    assert {path.name: path.read_text() for path in (checkout / "configs").iterdir()} == {
        name: "mine",
        "other.yaml": "mine too",
    }


def test_undo_keeps_what_was_added_or_changed_since(checkout: Path, no_links: None) -> None:
    install(checkout)
    config = checkout / "configs" / _configs()[0].name
    config.write_text("edited by the user")
    cache = checkout / "datasets_example" / "clothing" / ".aitk_size.json"
    cache.write_text("{}")
    lines = install(checkout, undo=True)
    assert config.read_text() == "edited by the user"
    assert cache.exists()
    assert any(line.startswith(f"configs/{config.name}: left") for line in lines)
    assert not (checkout / "extensions" / "coat_flux").exists()


def test_a_foreign_extension_folder_is_not_replaced(checkout: Path) -> None:
    target = checkout / "extensions" / "coat_flux"
    shutil.copytree(CHECKOUT / "jobs", target)
    before = _contents(target)
    with pytest.raises(InstallError, match=r"extensions/coat_flux was not made by coat-flux; move it away"):
        install(checkout)
    assert _contents(target) == before


def test_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("")
    with pytest.raises(
        InstallError, match=r"is not a checkout of ai-toolkit: toolkit/extension\.py, extensions missing"
    ):
        install(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.py"]


def test_installed_without_a_checkout_says_what_is_missing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shipped_folder", lambda name: None)
    lines = install(checkout)
    assert "configs: not part of this installation; install from a checkout of COAT-FLUX" in lines
    assert not (checkout / "configs").exists()
