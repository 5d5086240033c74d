"""Is this the comparison, and are these the runs, that are to be gone on with?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import VerifyError

__all__ = ["require_same", "require_same_job"]


def require_same_job(run: Path, raw: Mapping[str, Any]) -> None:
    """Refuse to go on with, or take as it is, a run of another job.

    Args:
        run: its folder, or where it will be.
        raw: the job it must have.

    Raises:
        VerifyError: names the first key that differs, with both values.
    """
    path = run / "config.yaml"
    if path.exists():
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        require_same(saved.get("config"), raw["config"], path, "is of a run with other settings", run)


def require_same(saved: Any, now: Any, path: Path, what: str, folder: Path) -> None:
    """Refuse what differs from what was saved.

    Args:
        saved: plain JSON or YAML.
        now: likewise.
        path: of the file it was saved in.
        what: the file is, where they differ.
        folder: what the comparison would go on with.

    Raises:
        VerifyError: names the first key that differs, with both values.
    """
    differing = list(_differences("", saved, now))
    if differing:
        key, old, new = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise VerifyError(f"{path}: {what} ({key} {old!r} -> {new!r}{more}); choose another --name; {folder} stays")


def _differences(path: str, saved: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}):
            yield from _differences(f"{path}.{key}" if path else key, saved.get(key), now.get(key))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (old, new) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{path}[{number}]", old, new)
    elif saved != now:
        yield path, saved, now
