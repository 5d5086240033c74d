"""torch.library.opcheck for operators that return FP8."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from coat_core.ops import dispatch

# without test_schema, which compares tensors by allclose: torch has none for FP8
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor")


class OperatorLog(TorchDispatchMode):
    """Calls `seen` with every operator and its arguments, then the operator."""

    def __init__(self, seen: Callable[[Any, tuple[Any, ...]], object]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen(func, args)
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_cuda(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send CPU tensors the way of CUDA ones, to the launchers, which Triton interprets."""
    dispatch.load_operators()
    patch.setattr(dispatch, "triton_obstacle", lambda device: None)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(dispatch, "replaced", {})
    patch.setattr(dispatch, "instead", {})
    with torch.library._scoped_library("coat", "IMPL") as library:
        for name, op in dispatch.launchers.items():
            library.impl(name, dispatch.on_cuda[name], "CPU")
            if isinstance(op, dispatch.Operator):
                patch.setitem(op.kernels, "cpu", dispatch.on_cuda[name])
        yield


def check_operator(op: Any, args: tuple[Any, ...]) -> None:
    """Run opcheck on a functional operator; its schema's promise, that no input is changed or returned, apart."""
    torch.library.opcheck(op._opoverload, args, test_utils=WITHOUT_SCHEMA)
    inputs = tensors_in(args)
    before = [bits(x).clone() for x in inputs]
    results = op(*args)
    assert all(torch.equal(bits(x), copy) for x, copy in zip(inputs, before, strict=True)), "an input was changed"
    storages = {x.untyped_storage()._cdata for x in inputs}
    found = tensors_in(results)
    assert all(x.untyped_storage()._cdata not in storages for x in found), "an output shares an input's memory"


def reference(op: Any, *args: Any) -> Any:
    """What an operator's body returns for these arguments on the CPU: torch's CUDA operators round otherwise."""
    return op._init_fn(*moved(args, "cpu"))


def check_layout(op: Any, args: tuple[Any, ...], results: Any) -> None:
    """Assert that results are laid out as the reference's on the meta device, and share no memory."""
    found = tensors_in(results)
    promised = tensors_in(op._init_fn(*moved(args, "meta")))
    for x, wanted in zip(found, promised, strict=True):
        assert (x.dtype, x.shape, _steps(x)) == (wanted.dtype, wanted.shape, _steps(wanted)), op._qualname
    given = {x.untyped_storage()._cdata for x in tensors_in(args) if x.numel()}
    made = [x.untyped_storage()._cdata for x in found if x.numel()]
    assert len(set(made)) == len(made), f"{op._qualname}: results share memory"
    assert not set(made) & given, f"{op._qualname}: a result is an argument"


def tensors_in(x: Any) -> list[Tensor]:
    """Every tensor of an argument, of a result, or of a list or tuple of them."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def moved(x: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), x)


def _steps(x: Tensor) -> list[int]:
    """Strides of the dimensions that have a next element, which are all that torch.compile checks."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)
