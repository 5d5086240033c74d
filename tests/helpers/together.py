"""Several processes of one run as forks of this one: everything is imported already, so they start in no time."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from coat_flux.trainers.standalone.trainer import COATTrainer
from tests.reliability.forks import fork, wait

__all__ = ["Together", "needs_fork", "train_together"]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, with which processes start at once")

# as `accelerate launch` passes configs/accelerate/fsdp2.yaml on
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
DEADLINE_S = 240


class Together:
    """Processes that train a job over gloo; `children` are their numbers, by rank."""

    def __init__(self, job: dict[str, Any], processes: int, *, fsdp2: bool = False) -> None:
        self._job = job
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = job["config"]
        self._output = Path(config["process"][0]["training_folder"]) / f"{config['name']}.txt"
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text("")
        self._environment = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        self._environment |= {"MASTER_PORT": port, **(FSDP2 if fsdp2 else {})}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a fork of a process with threads may wait for ever for a lock
        try:
            self.children = [fork(lambda rank=rank: self._train(rank), DEADLINE_S) for rank in range(processes)]
        finally:
            torch.set_num_threads(threads)

    def _train(self, rank: int) -> None:
        output = os.open(self._output, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        own = {**self._environment, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in own.items()})
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            COATTrainer(self._job).train()
        except SystemExit as end:  # of one that leaves it to another to say why
            os._exit(int(end.code))

    def end(self) -> tuple[list[int], str]:
        """Wait for all; exit codes by rank, and what they printed."""
        codes = [wait(child) for child in self.children]
        return codes, self._output.read_text(encoding="utf-8")


def train_together(job: dict[str, Any], processes: int, *, fsdp2: bool = False) -> str:
    """Train a job in several processes; returns what they printed."""
    codes, output = Together(job, processes, fsdp2=fsdp2).end()
    assert codes == [0] * processes, output[-3000:]
    return output
