"""`memory.stream_blocks` on the dry GPU: copies and products of two streams wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.dry_gpu import COMPARED, RaceError, Stream, dry_gpu, dry_session
from tests.integration.test_dry_gpu import BASE, nested

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/integration/test_gpu_step.py"),
]


@pytest.mark.parametrize(
    "memory", [{}, pytest.param({"memory.checkpointing": "all"}, marks=pytest.mark.slow)], ids=["kept", "recomputed"]
)
def test_codes_are_copied_while_blocks_run(memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and products wait for each other, and the host for neither; in a capture as well."""
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested({**BASE, **memory, "memory.stream_blocks": "all"}), monkeypatch, blocks=(1, 3))
        gpu.steps(session, 3)
        before = gpu.operators.memory.copies
        gpu.steps(session, 1, closer=COMPARED)  # eagerly, then captured
        gpu.steps(session, 1, closer={})
    assert gpu.captures == 1
    assert not session.graphs.failed
    # of four blocks two are there when backward begins, and two when the next step does; a capture trusts in none
    assert gpu.operators.memory.copies - before == 4 + 6


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_a_copy_that_nobody_waits_for_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with dry_gpu(monkeypatch) as gpu:
        session = dry_session(nested({**BASE, "memory.stream_blocks": "all"}), monkeypatch, blocks=(1, 3))
        monkeypatch.setattr(Stream, forgotten, lambda *_: None)
        with pytest.raises(RaceError):
            gpu.steps(session, 1)
