"""Files and folders, written so that a crash, also of the machine, leaves the old or the new one.

Whatever is being written has a name that begins with `.writing-`, next to its target, so that one rename on one file
system makes it whole and the next start knows what to remove.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "TEMP_PREFIX",
    "discard",
    "file_sha256",
    "link_or_copy",
    "remove",
    "replacing",
    "staging_path",
    "sync_file",
    "sync_folder",
    "write_bytes",
]

logger = logging.getLogger(__name__)

TEMP_PREFIX = ".writing-"
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems without fsync of folders


def staging_path(path: Path) -> Path:
    """Where `path` is made before it takes its place."""
    return path.parent / f"{TEMP_PREFIX}{os.getpid()}-{path.name}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it when the block ends well, and is removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = staging_path(path)
    try:
        yield temp
        sync_file(temp)
        os.replace(temp, path)
        sync_folder(path.parent)
    finally:
        discard(temp)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk, where the system can; Windows has no such call."""
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
    """Make `target` a second name of `source`, or a copy of it on file systems without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, where there is one; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove what is of no use any more; that this fails is said, and must not hide what happened before."""
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
