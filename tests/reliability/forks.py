"""Children of this process that are killed, or meet a broken disk, at a chosen file operation, or hold a lock.

A fork has everything imported and loaded, so a kill costs milliseconds. File operations are seen by Python's audit
events; what an open file is given between two of them is not, but a kill there leaves the same as at the next one.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

KILLED, FAILED = 9, 70
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")
DEADLINE_S = 60
HOLD = """
import sys
from pathlib import Path
from coat_flux.saves.repair import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def quick_forks() -> Iterator[None]:
    """A fork of a process with threads may wait for ever for a lock."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def content(path: Path) -> Any:
    """Bytes of a file; of safetensors, whose metadata come in any order, the header as a mapping beside the rest."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def fork(work: Callable[[], None], deadline_s: int = DEADLINE_S) -> int:
    """Start a child that does `work` and ends, with 0, or FAILED and a traceback on stderr; returns its number."""
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        # tqdm's lock is shared with the parent, which would wait forever for that of a killed child
        tqdm.set_lock(threading.RLock())
        signal.alarm(deadline_s)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Exit code of a child; that of a killed one is the negative signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_operation(number: int, folder: Path, act: Callable[[], None]) -> None:
    """From here on in this process: `act`, which may raise, just before an operation on files of `folder`, from 0.

    Names relative to an open folder, as `shutil.rmtree` uses them, count as well.
    """
    counter = itertools.count()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in OPERATIONS:
            return
        paths = [os.fsdecode(arg) for arg in args if isinstance(arg, str | bytes | os.PathLike)]
        relative = any(path and os.sep not in path for path in paths[:1])
        if (relative or any(path.startswith(str(folder)) for path in paths)) and next(counter) == number:
            act()

    sys.addaudithook(hook)


@contextmanager
def held_by_another_process(run_dir: Path) -> Iterator[None]:
    """Let another process hold the lock inside the block; it is killed at the end, not asked to let go."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            other.kill()
