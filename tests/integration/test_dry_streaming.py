"""What is in CPU memory, on the dry GPU: `memory.stream_blocks` and `optimizer.offload`.

Copies and products of several streams wait for each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coat_core.config import FP8QuantizationConfig
from coat_core.optim import FP8AdamW, offload
from coat_flux.blocks.held import HeldTensors
from tests.helpers.dry_gpu import COMPARED, dry_gpu, dry_session
from tests.integration.test_dry_gpu import BASE, nested

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/integration/test_gpu_step.py"),
]


@pytest.mark.parametrize("memory", [{}, {"memory.checkpointing": "all"}], ids=["kept", "recomputed"])
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


class HeldByCard(HeldTensors):
    """Counts what operators make on the card."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            super()._add(storage)


CONFIG = FP8QuantizationConfig(moment_rounding="stochastic", stochastic_rounding=True)
SIZES = (5008, 64, 2048, 48)


def small_slots(patch: pytest.MonkeyPatch) -> list[torch.nn.Parameter]:
    """Slots of 1024 elements, and parameters on the card."""
    patch.setattr(offload, "chunk_elements", lambda _: 1024)
    return [torch.nn.Parameter(torch.empty(size, device="cuda", dtype=torch.bfloat16)) for size in SIZES]


def updates(optimizer: FP8AdamW, params: list[torch.nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for param in reversed(params):
            param.grad = torch.empty_like(param)
            optimizer.step_parameter(param)
            param.grad = None


def test_the_card_holds_no_moments_but_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the start nor in updates, for which the host does not wait."""
    with dry_gpu(monkeypatch) as gpu:
        params = small_slots(monkeypatch)
        optimizer = FP8AdamW(params, capturable=True, fp8_config=CONFIG, offload="cpu")
        with HeldByCard() as held:
            optimizer.make_states()
            slots = offload.staging_bytes(CONFIG, SIZES, params[0].device)
            counted = len(SIZES) * (4 + 2 * 2 * 4)  # steps and draws
            assert held.now == slots + counted
            assert optimizer.state_bytes() > 2 * sum(SIZES)
            with gpu.operators.step({}):
                updates(optimizer, params, 2)
            assert held.peak < slots + counted + 2 * 5000 + 5000  # a gradient, tables
        state = optimizer.state_dict()["state"]
        assert {x.device.type for one in state.values() for key, x in one.items() if key != "step"} == {"cpu"}
        assert gpu.operators.memory.copies == 2 * (5 + 1 + 2 + 1) * 8  # two kinds of codes, six rows of numbers
    assert gpu.launches["_fp8_adamw_step_kernel"] == 2 * (5 + 1 + 2 + 1)


def test_a_graph_cannot_hold_copies_of_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    with dry_gpu(monkeypatch):
        params = small_slots(monkeypatch)
        optimizer = FP8AdamW(params, capturable=True, offload="cpu")
        updates(optimizer, params, 1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for param in params:
            param.grad = torch.empty_like(param)
        with pytest.raises(RuntimeError, match="offload='cpu': a CUDA graph cannot hold the copies of moments"):
            optimizer.step()


@pytest.mark.parametrize("fused", [True, False], ids=["in backward", "after it"])
def test_full_fine_tuning_with_moments_in_host_memory(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the engine; the update waits for nothing but its gradient."""
    flat = {**BASE, "optimizer.offload": "cpu", "include": ["single_transformer_blocks.0.attn.*"]}
    with dry_gpu(monkeypatch) as gpu:
        train = {"fused_backward": fused, "ema_config": {"use_ema": False}}
        session = dry_session(nested(flat), monkeypatch, blocks=(0, 1), train=train, full=True)
        gpu.steps(session, 2)
        gpu.steps(session, 1, closer={})
    elements = sum(param.numel() for param in session.lora.values())
    assert elements > 3 * 3072**2
    assert session.optimizer.state_bytes() > 2 * elements
    assert sum(x.nbytes for x in session.optimizer.staging) < session.optimizer.state_bytes() * 3
    assert gpu.launches["_fp8_adamw_step_kernel"] >= 3 * (len(session.lora) if fused else 2)
