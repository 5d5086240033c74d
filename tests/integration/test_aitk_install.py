"""`install`: what it puts into an ai-toolkit checkout, what it leaves alone, and what undo removes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from coat_flux.trainers.ai_toolkit.install import MANIFEST, InstallError, install
from tests.helpers.aitk_standin.host import CHECKOUT, PACKAGE, REPOSITORY, copy_checkout

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
EXTENSION = Path("extensions") / "coat_flux"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "ait")


def _contents(root: Path) -> dict[str, str | bytes]:
    """Every path below `root`: a link's target, a file's bytes, or "folder"."""
    contents: dict[str, str | bytes] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            if "__pycache__" in path.parts:
                continue
            key = path.relative_to(root).as_posix()
            if path.is_symlink():
                contents[key] = os.readlink(path)
            else:
                contents[key] = "folder" if path.is_dir() else path.read_bytes()
    return contents


def test_links_extension_configs_and_images_and_undo_leaves_the_checkout_as_it_was(checkout):
    before = _contents(checkout)
    assert install(checkout)[0] == "extensions/coat_flux: link made"
    assert (checkout / EXTENSION).resolve() == PACKAGE
    assert CONFIGS
    for config in CONFIGS:
        assert (checkout / "configs" / config.name).resolve() == config
    clothing = checkout / "datasets_example" / "clothing"
    captions = sorted((REPOSITORY / "datasets_example" / "clothing").glob("*.txt"))
    assert [path.resolve() for path in sorted(clothing.glob("*.txt"))] == captions
    assert not clothing.is_symlink()
    installed = _contents(checkout)
    assert all("already there" in line for line in install(checkout))
    assert _contents(checkout) == installed
    made = len(json.loads((checkout / MANIFEST).read_text())["made"])
    assert install(checkout, undo=True) == [f"removed {made} of {made} entries"]
    assert _contents(checkout) == before
    assert install(checkout, undo=True)[0].startswith("nothing to undo")


def test_without_the_right_to_link_files_are_copied_and_those_of_the_user_left_alone(checkout, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("a required privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    before = _contents(checkout)
    assert install(checkout)[0] == "extensions/coat_flux: copy made"
    copied, original = checkout / EXTENSION / "__init__.py", (PACKAGE / "__init__.py").read_text()
    assert copied.read_text() == original
    assert all("already there" in line for line in install(checkout))
    copied.write_text("old version")
    install(checkout)
    assert copied.read_text() == original
    install(checkout, undo=True)
    assert _contents(checkout) == before
    own, edited = (checkout / "configs" / config.name for config in CONFIGS[:2])
    own.parent.mkdir()
    own.write_text("mine")
    assert any(line.startswith(f"configs/{own.name}: left alone") for line in install(checkout))
    edited.write_text("edited by the user")
    cache = checkout / "datasets_example" / "clothing" / ".aitk_size.json"
    cache.write_text("{}")
    lines = install(checkout, undo=True)
    assert any(line.startswith(f"configs/{edited.name}: left") for line in lines)
    assert {path.name: path.read_text() for path in own.parent.iterdir()} == {
        own.name: "mine",
        edited.name: "edited by the user",
    }
    assert cache.exists()
    assert not (checkout / EXTENSION).exists()


def test_a_foreign_extension_folder_or_checkout_is_refused(checkout, tmp_path):
    shutil.copytree(CHECKOUT / "jobs", checkout / EXTENSION)
    before = _contents(checkout)
    with pytest.raises(InstallError, match="extensions/coat_flux was not made by coat-flux"):
        install(checkout)
    assert _contents(checkout) == before
    (tmp_path / "run.py").write_text("")
    with pytest.raises(InstallError, match=r"toolkit/extension\.py, extensions missing"):
        install(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.py", "ait"}
