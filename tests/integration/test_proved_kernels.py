"""Kernels of a block are proved before it runs: what is wrong is replaced, and verdicts are kept."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coat_core.activation import Saving
from coat_core.granularity import Storage, per_group
from coat_core.ops import dispatch, proof
from coat_flux.blocks import proving
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.report import shared_rows
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from tests.helpers.families import made
from tests.helpers.operators import as_on_cuda
from tests.helpers.option_run import Run

CPU = torch.device("cpu")
interpreted = [pytest.mark.triton, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proving, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(dispatch, "replaced", {})
    monkeypatch.setattr(dispatch, "instead", {})
    if request.node.get_closest_marker("triton") is None:
        yield
        return
    with as_on_cuda(monkeypatch):
        yield


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The operators of each proof, which runs in this process."""
    seen: list[set[str]] = []

    def prove(calls: list[proof.Call], device: torch.device, budget_s: float) -> dict[str, str]:
        seen.append({call.operator.removeprefix("coat::") for call in calls})
        verdicts: dict[str, str] = {}
        for call in calls:
            verdicts[call.operator] = verdicts.get(call.operator) or proof.fault(call, device)
        return verdicts

    monkeypatch.setattr(proving, "prove", prove)
    return seen


def prove_double_block() -> None:
    of = made("flux double", fp8=COATConfig().linear_config(), tokens=(5, 11), adapters="peft", batch=1)
    form = fused_block(of.block, Saving(Storage(granularity=per_group(16))))
    proving.prove_block(of.block, form, of.args, {}, COATConfig())


def break_kernel(operator: str, change: Callable[[Any], Any], patch: pytest.MonkeyPatch) -> list[str]:
    """Change an operator's results; returns the list of its launches."""
    right, launches = dispatch.launcher_of, []

    def launcher_of(name: str) -> Any:
        kernel = right(name)
        if name != f"coat::{operator}":
            return kernel

        def broken(*args: Any, **kwargs: Any) -> Any:
            launches.append(name)
            return change(kernel(*args, **kwargs))

        return broken

    patch.setattr(dispatch, "launcher_of", launcher_of)
    return launches


def doubled(results: Any) -> Any:
    return 2 * results[0], *results[1:]


class TestABlock:
    pytestmark = interpreted

    def test_right_kernels_are_proved_once_and_without_memory_nothing_is_kept_of_a_proof(self, proofs, monkeypatch):
        def out_of_memory(*_: Any) -> None:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(proving, "_results", out_of_memory)
            prove_double_block()
        assert proofs == []
        prove_double_block()
        (operators,) = proofs
        assert {"norm_modulate_quantize", "qkv_rope_backward", "lora_up_gradients", "mlp_activation_down"} <= operators
        assert dispatch.replaced == {}
        prove_double_block()
        assert len(proofs) == 1  # another start reads the verdicts

    def test_a_wrong_kernel_is_replaced_alone_and_stays_so(self, proofs, monkeypatch, caplog):
        launches = break_kernel("qkv_rope", doubled, monkeypatch)
        prove_double_block()
        assert [*dispatch.replaced] == ["coat::qkv_rope"]
        assert caplog.text.count("qkv_rope: PyTorch reference in place of its kernel: values are off by 1") == 1
        tried = len(launches)
        dispatch.replaced.clear()
        dispatch.instead.clear()
        prove_double_block()
        assert [*dispatch.replaced] == ["coat::qkv_rope"]
        assert len(launches) == tried

    def test_what_only_gradients_show_is_found_and_replaced(self, proofs, monkeypatch):
        monkeypatch.setattr(proof, "fault", lambda call, device: "")
        break_kernel("norm_modulate_quantize", doubled, monkeypatch)
        prove_double_block()
        assert dispatch.replaced == {"coat::norm_modulate_quantize": "the gradients of a block are wrong with it"}


class TestARun:
    """The runner, and the options; all by references."""

    @pytest.fixture
    def proved(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        blocks: list[str] = []
        monkeypatch.setattr(proving, "prove_block", lambda block, *_: blocks.append(type(block).__name__))
        return blocks

    def test_each_class_of_block_is_proved_before_it_runs_and_the_optimizer_at_its_step(self, proved):
        for flow in ("fused", "generic"):
            Run(f"activation: {{flow: {flow}}}")
        assert proved == 2 * ["FluxTransformerBlock", "FluxSingleTransformerBlock"]
        assert [*dispatch.instead] == [proof.ADAMW]

    def test_its_proofs_share_a_minute(self, monkeypatch):
        now, budgets = iter(range(0, 1000, 45)), []
        monkeypatch.setattr(proving, "time", SimpleNamespace(monotonic=lambda: next(now)))
        monkeypatch.setattr(proving, "prove", lambda *_, budget_s: budgets.append(budget_s))
        for _ in range(2):  # runs in one process
            proving.prove_step()
            for _ in range(2):
                proving._prove([], CPU)
        assert budgets == [60.0, 15.0, 60.0, 15.0]

    @pytest.mark.parametrize(
        ("text", "got", "why"),
        [
            ("none", "PyTorch reference", "as configured: speed.kernels: none"),
            ("all, kernels_left_out: [qkv_rope]", "Triton, PyTorch reference for qkv_rope", "qkv_rope: as configured"),
        ],
    )
    def test_the_option_chooses_kernels_without_a_proof(self, text, got, why, proved, monkeypatch):
        for probe in ("triton_obstacle", "fp8_gemm_obstacle"):
            monkeypatch.setattr(f"coat_flux.blocks.report.{probe}", lambda *_: None)
        try:
            run = Run(f"activation: {{flow: fused}}\nspeed: {{kernels: {text}}}")
            references = set(dispatch.instead)
        finally:
            dispatch.use_kernels("auto")
        runner = BlockRunner.of(run.model)
        assert runner is not None
        rows = shared_rows(runner.plan, torch.device("cuda", 0), runner.ran)
        row = next(row for row in rows if row.part == "kernels")
        assert (row.got, row.why) == (got, why)
        assert proved == []
        assert references == ({*dispatch.launchers} if text == "none" else {"coat::qkv_rope"})
