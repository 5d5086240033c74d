"""How operators are registered, as torch.library.custom_op promises, and which kernel runs."""

import importlib.util
import logging
from typing import Any

import pytest
import torch

from coat_core.ops import dispatch
from coat_core.ops.norm import norm_modulate
from tests.helpers.operators import OperatorLog

CUDA = torch.device("cuda", 0)

dispatch.load_operators()


def test_every_operator_of_ours_is_launched_by_triton_or_by_torch():
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("coat::")}
    assert ours - set(dispatch.launchers) == {"coat::fp8_mm"}  # torch._scaled_mm on CUDA


def test_without_triton_the_reference_runs_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    dispatch.triton_obstacle.cache_clear()
    with caplog.at_level(logging.WARNING):
        reasons = [dispatch.triton_obstacle(CUDA) for _ in range(3)]
    dispatch.triton_obstacle.cache_clear()
    assert reasons == ["triton is not installed (pip install triton; on Windows triton-windows)"] * 3
    assert len(caplog.records) == 1
    assert "reference runs instead" in caplog.text


@pytest.mark.triton
def test_what_keeps_triton_from_a_card_is_named(monkeypatch):
    from coat_core.ops import quantize_kernel

    def fails(device: torch.device) -> bool:
        raise FileNotFoundError("no C compiler\nand more")

    capability = [(7, 5), (9, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability.pop(0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert str(dispatch._find_obstacle(CUDA)).startswith("compute capability 7.5")
    monkeypatch.setattr(quantize_kernel, "agrees_with_reference", fails)
    assert dispatch._find_obstacle(CUDA) == "FileNotFoundError: no C compiler"
    monkeypatch.setattr(quantize_kernel, "agrees_with_reference", lambda device: False)
    assert dispatch._find_obstacle(CUDA) == "a trial gave wrong codes"


@pytest.mark.triton
def test_a_capture_is_no_place_for_the_trial_and_gives_no_answer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch.triton_obstacle.cache_clear()
    with pytest.raises(RuntimeError, match="in a CUDA graph's capture: do a step before it"):
        dispatch.triton_obstacle(CUDA)
    assert dispatch.triton_obstacle.cache_info().currsize == 0


@pytest.mark.triton
def test_the_trial_agrees_whatever_torchs_defaults_are_and_sees_wrong_codes(monkeypatch):
    from coat_core.ops import quantize_kernel as quantize

    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        assert quantize.agrees_with_reference(here)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    right = quantize.quantize
    monkeypatch.setattr(quantize, "quantize", lambda x, *how: right(x * 1.1, *how))
    assert not quantize.agrees_with_reference(here)


def _arguments(requires_grad: bool = False) -> tuple[Any, ...]:
    x = torch.randn(1, 4, 16, requires_grad=requires_grad)
    return x, None, 0, torch.randn(1, 16), torch.randn(1, 16), 1e-6, torch.float32


def test_a_call_outside_of_an_autograd_function_has_no_gradient_and_says_so():
    y = norm_modulate(*_arguments(requires_grad=True))
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="coat::norm_modulate: has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        assert not norm_modulate(*_arguments(requires_grad=True)).requires_grad


def test_a_kernel_is_called_without_the_dispatcher_unless_someone_watches(monkeypatch):
    called: list[str] = []

    def kernel(*args: Any) -> torch.Tensor:
        called.append("kernel")
        return norm_modulate._init_fn(*args)

    args, subclass = _arguments(), torch.Tensor._make_subclass(Other, torch.randn(1, 4, 16))
    monkeypatch.setitem(norm_modulate.kernels, "cpu", kernel)
    found = norm_modulate(*args)
    assert called == ["kernel"]
    norm_modulate(subclass, *args[1:])
    with torch.profiler.profile() as profile:
        norm_modulate(*args)
    assert "coat::norm_modulate" in {event.name for event in profile.events()}
    assert called == ["kernel"]
    with OperatorLog(lambda func, _: called.append(str(func))):
        watched = norm_modulate(*args)
    assert torch.equal(watched, found)
    assert called == ["kernel", "coat.norm_modulate.default"]


class Other(torch.Tensor):
    """Not a plain tensor."""


def test_torch_compile_never_traces_into_a_body():
    called: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        called.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    def caller(*args: Any) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()  # inside try: this function runs eager, what it calls is looked at by itself
            return torch.ops.coat.norm_modulate(*args) + norm_modulate(*args)
        except ValueError:
            raise

    args = _arguments()
    try:
        found = torch.compile(caller, backend=backend)(*args)
    finally:
        torch._dynamo.reset()
    assert torch.equal(found, 2 * norm_modulate(*args))
    assert set(called) == {norm_modulate._opoverload}
