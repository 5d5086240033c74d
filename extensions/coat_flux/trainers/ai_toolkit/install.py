"""`coat-flux install`: put COAT-FLUX into an ai-toolkit checkout, and remove it again.

The extension folder becomes one link; configs and example images are linked file by file into real folders, so that a
user's own files can be next to them and ai-toolkit's caches stay in the checkout. Where links are not allowed (Windows
without the right) a folder becomes a junction and a file a copy. What was made is listed in a manifest; undo removes
what is listed and still as it was made, and nothing else.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ...base.errors import UserError
from ...base.files import write_file
from ...config.job_file import shipped_folder

__all__ = ["MANIFEST", "InstallError", "install"]

PACKAGE = Path(__file__).resolve().parents[2]
EXTENSION = "extensions/coat_flux"
LINKED_FOLDERS = ("configs", "datasets_example")
MANIFEST = "extensions/.coat_flux_install.json"
CHECKOUT_PARTS = ("run.py", "toolkit/extension.py", "extensions")
UNLISTED = ("__pycache__", ".DS_Store")


class InstallError(UserError, RuntimeError):
    """The folder is not an ai-toolkit checkout, or something of the user's is in the way; nothing was overwritten."""


@dataclass(frozen=True)
class _Made:
    """One thing install made: `path` relative to the checkout; `kind` is link, junction, copy, folder or model."""

    path: str
    kind: str
    source: str = ""


def install(ai_toolkit_dir: str | os.PathLike[str], undo: bool = False) -> list[str]:
    """Link extension, configs and example images into a checkout and make the embedded model there, or undo that.

    Args:
        ai_toolkit_dir: the folder that holds ai-toolkit's run.py.
        undo: remove what an earlier call made.

    Returns:
        What was done, one line each. A second call changes nothing and says so.

    Raises:
        InstallError: not a checkout of ai-toolkit, or a file that is not ours is in the way.
    """
    root = Path(ai_toolkit_dir).expanduser().resolve()
    absent = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if absent:
        raise InstallError(
            f"{root} is not a checkout of ai-toolkit: {', '.join(absent)} missing; give the folder of run.py"
        )
    return _undo(root) if undo else _Installer(root).run()


class _Installer:
    def __init__(self, root: Path):
        self.root = root
        self.known = {made.path: made for made in _read_manifest(root)}
        self.lines: list[str] = []

    def run(self) -> list[str]:
        try:
            done = self._put(EXTENSION, PACKAGE)
            if done == "foreign":
                raise InstallError(f"{self.root / EXTENSION} was not made by coat-flux; move it away and install again")
            self.lines.append(f"{EXTENSION}: {done}")
            for folder in LINKED_FOLDERS:
                self._put_files(folder)
            self._make_model()
        finally:
            _write_manifest(self.root, list(self.known.values()))
        return self.lines

    def _put_files(self, folder: str) -> None:
        origin = shipped_folder(folder)
        if origin is None:
            self.lines.append(f"{folder}: not part of this installation; install from a checkout of COAT-FLUX")
            return
        counts: dict[str, int] = {}
        for source in _files(origin):
            path = source.relative_to(origin.parent).as_posix()
            done = self._put(path, source)
            counts[done] = counts.get(done, 0) + 1
            if done == "foreign":
                self.lines.append(f"{path}: left alone, it is a file of yours; ours is {source}")
        self.lines.append(f"{folder}/: " + ", ".join(f"{done} ({count} files)" for done, count in counts.items()))

    def _put(self, path: str, source: Path) -> str:
        """Make `path` stand for `source`; returns what was done: link, junction, copy, already there or foreign."""
        target = self.root / path
        copied = path in self.known and self.known[path].kind == "copy"
        if (copied and _same(target, source)) or _leads_to(target, source):
            return "already there"
        if os.path.lexists(target):
            if path not in self.known:
                return "foreign"
            _remove(target)
        self._make_folders(target.parent)
        kind = _link(source, target)
        self.known[path] = _Made(path, kind, str(source))
        return f"{kind} made"

    def _make_folders(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir()
            path = new.relative_to(self.root).as_posix()
            self.known[path] = _Made(path, "folder")

    def _make_model(self) -> None:
        from ...mini_flux.folder import EMBEDDED_MODEL, make_mini_flux

        target = self.root / EMBEDDED_MODEL
        existed = target.exists()
        self._make_folders(target.parent)
        make_mini_flux(target)
        if not existed:
            self.known[EMBEDDED_MODEL] = _Made(EMBEDDED_MODEL, "model")
        self.lines.append(f"{EMBEDDED_MODEL}: {'already there' if existed else 'embedded mini-FLUX model made'}")


def _undo(root: Path) -> list[str]:
    made = _read_manifest(root)
    if not made:
        return [f"nothing to undo: no {MANIFEST} in {root}"]
    removed, kept = 0, []
    for item in sorted(made, key=lambda entry: entry.path, reverse=True):
        target = root / item.path
        if not os.path.lexists(target):
            continue
        if _is_as_made(target, item):
            _remove(target)
            removed += 1
        else:
            kept.append(f"{item.path}: left, it holds or is something that install did not make")
    (root / MANIFEST).unlink()
    return [f"removed {removed} of {len(made)} things that install had made", *sorted(kept)]


def _is_as_made(target: Path, item: _Made) -> bool:
    if item.kind == "folder":
        return target.is_dir() and not any(target.iterdir())
    if item.kind == "model":
        from ...mini_flux.folder import MARKER_NAME

        return (target / MARKER_NAME).is_file()
    source = Path(item.source)
    if item.kind == "copy":
        return _same(target, source)
    return _leads_to(target, source)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files that belong to the repository; hidden files and folders and caches of ai-toolkit do not."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")) or path.name in UNLISTED:
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _leads_to(target: Path, source: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.lexists(target) and target.resolve() == source.resolve()
    return False


def _same(target: Path, source: Path) -> bool:
    """Whether a copy still equals its source, file by file."""
    if source.is_dir() and target.is_dir():
        names = _names(source)
        return names == _names(target) and all(_same(target / name, source / name) for name in names)
    return source.is_file() and target.is_file() and filecmp.cmp(target, source, shallow=False)


def _names(folder: Path) -> set[Path]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {name for name in files if "__pycache__" not in name.parts}


def _link(source: Path, target: Path) -> str:
    """Make `target` stand for `source`; returns how: link, junction or copy."""
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
        os.rmdir(target)  # a junction: rmdir takes the junction away, rmtree would empty what it leads to
    else:
        shutil.rmtree(target)


def _read_manifest(root: Path) -> list[_Made]:
    path = root / MANIFEST
    if not path.is_file():
        return []
    return [_Made(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["made"]]


def _write_manifest(root: Path, made: list[_Made]) -> None:
    if made:
        entries = {"made": [asdict(item) for item in made]}
        write_file(root / MANIFEST, json.dumps(entries, indent=1))
