"""How operators are registered: what torch.library.custom_op promises, without its autograd kernel."""

from __future__ import annotations

import pytest
import torch

from coat_core.kernels.gate import gate_residual


def _arguments(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 4, 16, requires_grad=requires_grad)
    return x, torch.randn(1, 16), torch.randn(1, 4, 16)


def test_a_call_outside_of_an_autograd_function_has_no_gradient_and_says_so() -> None:
    y = gate_residual(*_arguments(requires_grad=True))
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="coat::gate_residual: has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        assert not gate_residual(*_arguments(requires_grad=True)).requires_grad


def test_keywords_are_those_of_the_body() -> None:
    residual, gate, result = _arguments()
    found = gate_residual(result=result, residual=residual, gate=gate)
    assert torch.equal(found, gate_residual._init_fn(residual, gate, result))
    assert gate_residual.__doc__ == gate_residual._init_fn.__doc__


def test_torch_compile_never_traces_into_a_body() -> None:
    called: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        called.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    def caller(*args: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()  # inside try: this function runs eager, what it calls is looked at by itself
            return torch.ops.coat.gate_residual(*args) + gate_residual(*args)
        except ValueError:
            raise

    args = _arguments()
    try:
        found = torch.compile(caller, backend=backend)(*args)
    finally:
        torch._dynamo.reset()
    assert torch.equal(found, 2 * gate_residual(*args))
    assert set(called) == {gate_residual._opoverload}
