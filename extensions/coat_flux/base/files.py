"""Files and folders, written so that a crash of process or machine leaves either the old or the new one.

Unfinished work has a name that begins with `.writing-`, in the folder of its target: one rename completes it, and the
next start can remove leftovers. Content is written under that name, flushed to disk (fsync) and renamed, and then the
folder is flushed. Without the first flush a power failure can leave the new name without content, without the second
the old file. `sync=False` skips both for caches, which a checksum guards, and for links.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

TEMP_PREFIX = ".writing-"
NAME_TAIL = 40  # characters of the target's name: a name of 255 bytes must not become a longer one
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems without fsync of folders


def staging_path(path: Path) -> Path:
    """A new temporary name beside `path`; random, since containers share process ids."""
    return path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex[:12]}-{path.name[-NAME_TAIL:]}"


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary file that replaces `path`, a regular file if it exists; on error it is removed."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = staging_path(path)
    try:
        yield temp
        if sync:
            sync_file(temp)
        os.replace(temp, path)
        if sync:
            sync_folder(path.parent)
    finally:
        discard(temp)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace the content of a file atomically; text is UTF-8."""
    with replacing(path) as temp:
        temp.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_folder(made: Path, target: Path, aside: Path) -> None:
    """Rename the folder `made` to `target`; an existing folder is moved to `aside`, and back on failure."""
    if target.exists():
        remove(aside)
        os.replace(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield the place for a folder, to be made, that replaces the one at `path`; on error it is removed."""
    made, aside = staging_path(path), staging_path(path)
    try:
        yield made
        replace_folder(made, path, aside)
    finally:
        discard(made)
        discard(aside)


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk; a no-op on Windows, which has no such call."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `target` to `source`, or copy on file systems without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def remove(path: Path) -> None:
    """Remove a file, link or folder if it exists; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a path that is no longer needed; failures are logged, so as not to hide an earlier error."""
    try:
        remove(path)
    except OSError as error:
        logger.warning("%s: cannot be removed (%s); it is not needed, remove it by hand", path, error)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
