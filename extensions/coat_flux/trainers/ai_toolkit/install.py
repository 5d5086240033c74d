"""`coat-flux install`: put COAT-FLUX into an ai-toolkit checkout, or remove it.

The extension folder becomes one link, configs and example images a link each; where links are not allowed (Windows) a
folder becomes a junction and a file a copy. Undo removes the manifest's unchanged entries.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections import Counter
from pathlib import Path

from ...base.errors import UserError
from ...base.files import write_file
from ...config.job_file import shipped_folder

PACKAGE = Path(__file__).resolve().parents[2]
EXTENSION = "extensions/coat_flux"
LINKED_FOLDERS = ("configs", "datasets_example")
MANIFEST = "extensions/.coat_flux_install.json"
CHECKOUT_PARTS = ("run.py", "toolkit/extension.py", "extensions")


class InstallError(UserError, RuntimeError):
    """Not an ai-toolkit checkout, or a user's file is in the way."""


def install(ai_toolkit_dir: str | os.PathLike[str], undo: bool = False) -> list[str]:
    """Install into the folder of ai-toolkit's run.py, or undo that; returns log lines. Raises InstallError."""
    root = Path(ai_toolkit_dir).expanduser().resolve()
    missing = [part for part in CHECKOUT_PARTS if not (root / part).exists()]
    if missing:
        raise InstallError(
            f"{root} is not a checkout of ai-toolkit: {', '.join(missing)} missing; give the folder of run.py"
        )
    manifest, made = root / MANIFEST, {}
    if manifest.is_file():
        made = json.loads(manifest.read_text(encoding="utf-8"))["made"]
    if undo:
        return _undo(root, made)
    try:
        return _install(root, made)
    finally:
        if made:
            write_file(manifest, json.dumps({"made": made}, indent=1))


def _install(root: Path, made: dict[str, str]) -> list[str]:
    """Link everything into `root`; `made` gets each path with its source."""
    result = _put(root, made, EXTENSION, PACKAGE)
    if result == "foreign":
        raise InstallError(f"{root / EXTENSION} was not made by coat-flux; move it away")
    lines = [f"{EXTENSION}: {result}"]
    for folder in LINKED_FOLDERS:
        origin = shipped_folder(folder)
        if origin is None:
            lines.append(f"{folder}: not part of this installation; install from a checkout of COAT-FLUX")
            continue
        results: Counter[str] = Counter()
        for source in sorted(origin.rglob("*")):
            inside = source.relative_to(origin)
            if not source.is_file() or any(part.startswith((".", "_")) for part in inside.parts):
                continue
            path = f"{folder}/{inside.as_posix()}"
            result = _put(root, made, path, source)
            results[result] += 1
            if result == "foreign":
                lines.append(f"{path}: left alone, it is yours; ours is {source}")
        counts = ", ".join(f"{result} ({count} files)" for result, count in results.items())
        lines.append(f"{folder}/: {counts}")
    return lines


def _put(root: Path, made: dict[str, str], path: str, source: Path) -> str:
    """Link or copy `source` to `path`, unless a user's file is there; returns what was done."""
    target = root / path
    if target.resolve() == source.resolve() or (path in made and _is_copy(target, source)):
        return "already there"
    if os.path.lexists(target):
        if path not in made:
            return "foreign"
        _remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made[path] = str(source)
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
        return "link made"
    except OSError:
        if source.is_dir() and os.name == "nt":
            import _winapi

            _winapi.CreateJunction(str(source), str(target))
            return "junction made"
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
        return "copy made"


def _undo(root: Path, made: dict[str, str]) -> list[str]:
    if not made:
        return [f"nothing to undo: no {MANIFEST} in {root}"]
    removed, left = 0, []
    for path, source in made.items():
        target = root / path
        if not os.path.lexists(target):
            continue
        if target.resolve() == Path(source).resolve() or _is_copy(target, Path(source)):
            _remove(target)
            removed += 1
        else:
            left.append(f"{path}: left, it was changed since")
        for folder in target.relative_to(root).parents[:-1]:
            if folder.as_posix() not in CHECKOUT_PARTS and not any((root / folder).iterdir()):
                (root / folder).rmdir()
    (root / MANIFEST).unlink()
    return [f"removed {removed} of {len(made)} entries", *sorted(left)]


def _is_copy(target: Path, source: Path) -> bool:
    if not (source.is_dir() and target.is_dir()):
        return source.is_file() and target.is_file() and filecmp.cmp(target, source, shallow=False)
    files = []
    for folder in (source, target):
        inside = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        files.append({path for path in inside if "__pycache__" not in path.parts})
    return files[0] == files[1] and all(_is_copy(target / path, source / path) for path in files[0])


def _remove(target: Path) -> None:
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.resolve() != target.parent.resolve() / target.name:
        os.rmdir(target)  # a junction: rmdir removes it, rmtree would empty its target
    else:
        shutil.rmtree(target)
