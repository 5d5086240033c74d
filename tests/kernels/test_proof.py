"""The self-test of kernels: each broken kind is seen, and only its operator is replaced, through the CUDA path."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.formats import E4M3
from coat_core.granularity import PER_ROW, per_group
from coat_core.ops import dispatch, launch, proof
from coat_core.ops.gate import gated_sum
from coat_core.ops.norm import norm_modulate, norm_modulate_quantize
from coat_core.ops.quantize import _quantize, dequantize
from coat_core.quantize import quantize
from tests.helpers.operators import as_on_cuda
from tests.kernels.test_adamw import Problem

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs kernels where there is no GPU"),
]
CPU = torch.device("cpu")
STEP = proof.ADAMW


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with as_on_cuda(monkeypatch):
        yield
    dispatch.use_kernels("auto")


def calls() -> list[proof.Call]:
    """Of three operators: one that casts, one of values, one that reads codes."""
    x = torch.randn(2, 40, 96)[..., :48]
    scale, shift = torch.randn(2, 6 * 48).chunk(6, dim=1)[1:3]
    codes, code_scale, _ = quantize(x, "e4m3", per_group(16))
    with proof.recorded_calls() as recorded:
        for _ in range(2):
            norm_modulate_quantize(x, scale, shift, 1e-6, "e4m3", "per_row", "e4m3", 16)
            norm_modulate(codes, code_scale, 16, scale, shift, 1e-6, torch.float32)
            gated_sum(x, scale, x, None, None, "none", 0)
            dequantize(*quantize(x[0].contiguous(), "e4m3", PER_ROW))
    return recorded


def test_recorded_are_the_calls_of_one_signature_with_their_layout():
    recorded = {call.operator.removeprefix("coat::"): call for call in calls()}
    assert list(recorded) == ["norm_modulate_quantize", "norm_modulate", "gated_sum", "dequantize"]
    x = recorded["norm_modulate_quantize"].args[0]
    assert (x.shape, x.strides, x.rows.shape) == ((2, 40, 48), (3840, 96, 1), (2, proof.SAMPLED_ROWS, 48))
    again = proof.Buffers(CPU).restore(x)
    assert (again.shape, again.stride(), again.data_ptr() % 16) == (x.shape, x.strides, x.alignment)
    assert torch.equal(again[:, 17:34], x.rows)


def test_right_kernels_have_no_fault():
    assert [proof.fault(call, CPU) for call in calls()] == [""] * 4


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"formats": ("e4m3", None)}], ids=str)
def test_the_optimizers_kernel_is_compared_by_moves_and_moments(options, monkeypatch):
    seen: list[proof.Call] = []
    problem = Problem(CPU, **options)
    dispatch.show_first_call(STEP, lambda *call: seen.append(proof.Call.of(*call)))
    for step in (1, 2):
        problem.step(step, problem.grads(step), dispatch.on_cuda[STEP])
    assert len(seen) == 1
    later = replace(seen[0], args=(*seen[0].args[:7], [0.5] * 7, *seen[0].args[8:]))
    assert later.signature() == seen[0].signature()  # of a resumed run, at another step and learning rate
    assert proof.fault(seen[0], CPU) == ""
    kernel = dispatch.launcher_of(STEP)

    def late(params: list[Tensor], *args: Any) -> None:  # weight decay of a step that forgets its moments
        kept = [x.clone() for x in args[1:3]]
        kernel(params, *args)
        for x, before in zip(args[1:3], kept, strict=True):
            x.copy_(before)

    monkeypatch.setattr(dispatch, "launcher_of", lambda name: late)
    assert proof.fault(seen[0], CPU).startswith("exp_avg")


def argument_changed(kernel: Any, x: Tensor, *args: Any) -> Any:
    result = kernel(x, *args)
    x.zero_()
    return result


def write_beyond(kernel: Any, *args: Any) -> Any:
    result = kernel(*args)
    result.as_strided((1,), (1,), result.storage_offset() - 1).fill_(1.0)
    return result


def read_beyond(kernel: Any, x: Tensor, *args: Any) -> Any:
    return kernel(x, *args) + x.as_strided((1,), (1,), x.storage_offset() - 1).float()


FAULTS = [
    (lambda kernel, *args: 2 * kernel(*args), "values are off by 1"),
    (lambda kernel, *args: launch.empty(args[0].shape, torch.float32, CPU), "nobody wrote"),
    (lambda kernel, *args: kernel(*args)[:1], "returns"),
    (argument_changed, "changes an argument"),
    (write_beyond, "writes outside"),
    (read_beyond, "NaN"),
]


@pytest.mark.parametrize(("broken", "said"), FAULTS)
def test_each_kind_of_fault_is_seen(broken, said, monkeypatch):
    call = calls()[1]
    kernel = dispatch.launcher_of(call.operator)
    monkeypatch.setattr(dispatch, "launcher_of", lambda name: lambda *args: broken(kernel, *args))
    assert said in proof.fault(call, CPU)


def test_codes_that_are_not_their_values_are_seen(monkeypatch):
    call = calls()[0]
    kernel = dispatch.launcher_of(call.operator)

    def shifted(*args: Any) -> Any:
        n, codes, *others = kernel(*args)
        return n, (codes.view(torch.uint8) & 0xFD).view(E4M3.dtype), *others

    monkeypatch.setattr(dispatch, "launcher_of", lambda name: shifted)
    assert proof.fault(call, CPU) == "codes are off by 2"


# --- in another process ---
BREAK = """
import importlib.util, os, signal, sys, time

ACTIONS = {actions!r}  # operator -> what its kernel does, and returns


class Finder:
    def find_spec(self, name, path, target=None):
        package, _, module = name.rpartition(".")
        if package != "coat_core.ops" or not module.endswith("_kernel"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(loaded):
            load(loaded)
            for operator, action in ACTIONS.items():
                if hasattr(loaded, operator):
                    names = {{"kernel": getattr(loaded, operator), "os": os, "signal": signal, "time": time}}
                    exec("def broken(*args, **kwargs):\\n    " + action, names)
                    setattr(loaded, operator, names["broken"])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


def proved(actions: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The verdicts of a process in which these kernels do something else."""
    (folder / "sitecustomize.py").write_text(BREAK.format(actions=actions), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    verdicts = proof.prove(calls(), CPU, hang_s=5)
    return {operator.removeprefix("coat::"): why for operator, why in verdicts.items()}


def test_broken_kernels_are_found_and_no_others(tmp_path, monkeypatch):
    verdicts = proved({"norm_modulate": "return kernel(*args, **kwargs) * 2"}, tmp_path, monkeypatch)
    assert verdicts.pop("norm_modulate").startswith("values are off by 1")
    assert verdicts == {"norm_modulate_quantize": "", "gated_sum": "", "dequantize": ""}


def test_a_kernel_that_ends_its_process_or_hangs_leaves_the_others_their_verdicts(tmp_path, monkeypatch):
    actions = {
        "norm_modulate_quantize": "import torch; torch.zeros = None; raise RuntimeError('illegal memory access')",
        "norm_modulate": "os.kill(os.getpid(), signal.SIGKILL)",
        "gated_sum": "time.sleep(1000)",
    }
    assert proved(actions, tmp_path, monkeypatch) == {
        "norm_modulate_quantize": "RuntimeError: illegal memory access",  # and the context stays broken
        "norm_modulate": "its process ended: exit code -9",
        "gated_sum": "no end after 5 s",
        "dequantize": "",
    }


def test_without_time_nothing_is_said_of_a_kernel():
    assert proof.prove(calls(), CPU, budget_s=0.0) == {}


def test_a_process_that_does_not_start_says_nothing_of_kernels(tmp_path, monkeypatch, caplog):
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert proof.prove(calls(), CPU) == {}
    assert "exit code 3" in caplog.text


# --- in a step ---
def test_a_kernel_that_fails_in_a_step_is_replaced_and_the_call_repeated(monkeypatch, caplog):
    x = torch.randn(4, 48)
    expected = _quantize._init_fn(x, "e4m3", "per_row", 16, None)
    kernel, failures = dispatch.launcher_of, []

    def launcher_of(name: str) -> Any:
        if name == "coat::quantize":
            failures.append(name)
            raise ValueError("out of resources")
        return kernel(name)

    monkeypatch.setattr(dispatch, "launcher_of", launcher_of)
    for _ in range(3):
        codes, _ = _quantize(x, "e4m3", "per_row", 16, None)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert failures == ["coat::quantize"]
    assert dispatch.replaced == {"coat::quantize": "ValueError: out of resources"}
    assert caplog.text.count("quantize: PyTorch reference in place of its kernel") == 1
    dispatch.use_kernels("all")
    with pytest.raises(ValueError, match="out of resources"):
        _quantize(x, "e4m3", "per_row", 16, None)


@pytest.mark.parametrize(("policy", "left_out", "launched"), [
    ("none", (), []),
    ("auto", ("quantize",), ["coat::dequantize"]),
    ("all", (), ["coat::quantize", "coat::dequantize"]),
])  # fmt: skip
def test_the_policy_says_whose_kernels_run(policy, left_out, launched, monkeypatch):
    kernel, seen = dispatch.launcher_of, []
    monkeypatch.setattr(dispatch, "launcher_of", lambda name: (seen.append(name), kernel(name))[1])
    dispatch.use_kernels(policy, left_out)
    codes, scale = _quantize(torch.randn(4, 48), "e4m3", "per_row", 16, None)
    dequantize(codes, scale, PER_ROW)
    assert seen == launched
