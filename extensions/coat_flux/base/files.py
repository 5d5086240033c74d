"""Files and folders, written so that a crash, also of the machine, leaves the old or the new one.

What is under way has a name that begins with `.writing-`, in the folder of its target: one rename on one file system
completes it, and the next start knows what to remove.

The policy, for every file that a reader or a resume depends on: the content is written under that name and flushed to
the disk (fsync), renamed, and then the folder is flushed. Without the first flush a power failure can leave the new
name with no content, without the second the old file. `sync=False` leaves both out where a reader finds out by a
checksum and the content can be recomputed (caches), or where the content is on the disk already (links).
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
    """A new name for what will take the place of `path`; not the process id, which containers share."""
    return path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex[:12]}-{path.name[-NAME_TAIL:]}"


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block ends well, and is removed when it does not."""
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
    """Replace the content of a file as a whole; text is UTF-8."""
    with replacing(path) as temp:
        temp.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_folder(made: Path, target: Path, aside: Path) -> None:
    """Rename the folder `made` to `target`; a folder that is there is moved to `aside`, and back if that fails."""
    if target.exists():
        remove(aside)
        os.replace(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system can; Windows has no such call."""
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
    """Remove what is no longer needed; a failure is logged, and must not hide an earlier error."""
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
