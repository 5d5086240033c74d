"""How operators are registered: what torch.library.custom_op promises, without its autograd kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.ops.norm import norm_modulate


def _arguments(requires_grad: bool = False) -> tuple[Any, ...]:
    x = torch.randn(1, 4, 16, requires_grad=requires_grad)
    return x, None, 0, torch.randn(1, 16), torch.randn(1, 16), 1e-6, torch.float32


def test_a_call_outside_of_an_autograd_function_has_no_gradient_and_says_so() -> None:
    y = norm_modulate(*_arguments(requires_grad=True))
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="coat::norm_modulate: has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        assert not norm_modulate(*_arguments(requires_grad=True)).requires_grad


def test_keywords_are_those_of_the_body() -> None:
    x, *codes, scale, shift, eps, dtype = _arguments()
    found = norm_modulate(x, *codes, dtype=dtype, shift=shift, scale=scale, eps=eps)
    assert torch.equal(found, norm_modulate._init_fn(x, *codes, scale, shift, eps, dtype))
    assert norm_modulate.__doc__ == norm_modulate._init_fn.__doc__


def test_a_kernel_is_called_without_the_dispatcher_unless_someone_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

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
    with Watches():
        watched = norm_modulate(*args)
    assert torch.equal(watched, found)
    assert called == ["kernel", "coat.norm_modulate.default"]


class Other(torch.Tensor):
    """Not a plain tensor."""


def test_torch_compile_never_traces_into_a_body() -> None:
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
