"""`coat-flux install`: put COAT-FLUX into an ai-toolkit checkout, or remove it.

The extension folder becomes one link, configs and example images a link each, next to a user's own files. Where links
are not allowed (Windows) a folder becomes a junction and a file a copy. Undo removes the manifest's unchanged entries.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ...base.errors import UserError
from ...base.files import write_file
from ...config.job_file import shipped_folder

PACKAGE = Path(__file__).resolve().parents[2]
EXTENSION = "extensions/coat_flux"
LINKED_FOLDERS = ("configs", "datasets_example")
MANIFEST = "extensions/.coat_flux_install.json"
CHECKOUT_PARTS = ("run.py", "toolkit/extension.py", "extensions")
CACHES = ("__pycache__", ".DS_Store")


class InstallError(UserError, RuntimeError):
    """Not an ai-toolkit checkout, or something of the user's is in the way."""


def install(ai_toolkit_dir: str | os.PathLike[str], undo: bool = False) -> list[str]:
    """Install into the folder of ai-toolkit's run.py, or undo that; returns what was done, line by line.

    Raises:
        InstallError: not a checkout, or a foreign file is in the way.
    """
    root = Path(ai_toolkit_dir).expanduser().resolve()
    missing = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if missing:
        raise InstallError(
            f"{root} is not a checkout of ai-toolkit: {', '.join(missing)} missing; give the folder of run.py"
        )
    installer = _Installer(root)
    if undo:
        return installer.undo()
    try:
        return installer.run()
    finally:
        installer.write_manifest()


class _Installer:
    """The manifest of an install: path → source; "folder" and "model" have none."""

    def __init__(self, root: Path):
        self.root, self.manifest = root, root / MANIFEST
        self.made: dict[str, str] = {}
        if self.manifest.is_file():
            self.made = json.loads(self.manifest.read_text(encoding="utf-8"))["made"]

    def write_manifest(self) -> None:
        if self.made:
            write_file(self.manifest, json.dumps({"made": self.made}, indent=1))

    def run(self) -> list[str]:
        from ...mini_flux import EMBEDDED_MODEL, make_mini_flux

        result = self._put(EXTENSION, PACKAGE)
        if result == "foreign":
            raise InstallError(f"{self.root / EXTENSION} was not made by coat-flux; move it away and install again")
        lines = [f"{EXTENSION}: {result}"]
        for folder in LINKED_FOLDERS:
            origin = shipped_folder(folder)
            if origin is None:
                lines.append(f"{folder}: not part of this installation; install from a checkout of COAT-FLUX")
                continue
            results: Counter[str] = Counter()
            for source in _shipped_files(origin):
                path = source.relative_to(origin.parent).as_posix()
                result = self._put(path, source)
                results[result] += 1
                if result == "foreign":
                    lines.append(f"{path}: left alone, it is a file of yours; ours is {source}")
            counts = ", ".join(f"{result} ({count} files)" for result, count in results.items())
            lines.append(f"{folder}/: {counts}")
        model = self.root / EMBEDDED_MODEL
        result = "already there" if model.exists() else "embedded mini-FLUX model made"
        self._make_folders(model.parent)
        make_mini_flux(model)
        if result != "already there":
            self.made[EMBEDDED_MODEL] = "model"
        return [*lines, f"{EMBEDDED_MODEL}: {result}"]

    def _put(self, path: str, source: Path) -> str:
        target = self.root / path
        if target.resolve() == source.resolve() or (path in self.made and _is_copy(target, source)):
            return "already there"
        if os.path.lexists(target):
            if path not in self.made:
                return "foreign"
            _remove(target)
        self._make_folders(target.parent)
        self.made[path] = str(source)
        return f"{_link(source, target)} made"

    def _make_folders(self, folder: Path) -> None:
        if not folder.exists():
            self._make_folders(folder.parent)
            folder.mkdir()
            self.made[folder.relative_to(self.root).as_posix()] = "folder"

    def undo(self) -> list[str]:
        if not self.made:
            return [f"nothing to undo: no {MANIFEST} in {self.root}"]
        removed, left = 0, []
        for path, source in sorted(self.made.items(), reverse=True):
            target = self.root / path
            if not os.path.lexists(target):
                continue
            if _is_as_made(target, source):
                _remove(target)
                removed += 1
            else:
                left.append(f"{path}: left, it holds or is something that install did not make")
        self.manifest.unlink()
        return [f"removed {removed} of {len(self.made)} things that install had made", *sorted(left)]


def _is_as_made(target: Path, source: str) -> bool:
    from ...mini_flux import MARKER_NAME

    if source == "folder":
        return target.is_dir() and not any(target.iterdir())
    if source == "model":
        return (target / MARKER_NAME).is_file()
    return target.resolve() == Path(source).resolve() or _is_copy(target, Path(source))


def _shipped_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")) or path.name in CACHES:
            continue
        if path.is_dir():
            yield from _shipped_files(path)
        else:
            yield path


def _is_copy(target: Path, source: Path) -> bool:
    if source.is_dir() and target.is_dir():
        names = _names(source)
        return names == _names(target) and all(_is_copy(target / name, source / name) for name in names)
    return source.is_file() and target.is_file() and filecmp.cmp(target, source, shallow=False)


def _names(folder: Path) -> set[Path]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {name for name in files if "__pycache__" not in name.parts}


def _link(source: Path, target: Path) -> str:
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
        return "link"
    except OSError:
        if source.is_dir() and os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(source), str(target))
            return "junction"
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
        return "copy"


def _remove(target: Path) -> None:
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.resolve() != target.parent.resolve() / target.name:
        os.rmdir(target)  # a junction: rmdir removes it, rmtree would empty its target
    else:
        shutil.rmtree(target)
