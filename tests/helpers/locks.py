"""Another process that holds the lock of a run's folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOLD = """
import sys
from pathlib import Path
from coat_flux.saves.repair import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


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
