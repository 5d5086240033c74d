"""torch.library.opcheck for operators that return FP8."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.ops import dispatch

# without test_schema, which compares tensors by allclose: torch has none for FP8
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor")


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
    return op._init_fn(*(moved(arg, "cpu") for arg in args))


def check_layout(op: Any, args: tuple[Any, ...], results: Any) -> None:
    """Assert that results are laid out as the reference's on the meta device, and share no memory."""
    found = tensors_in(results)
    promised = op._init_fn(*(moved(x, "meta") for x in args))
    for x, wanted in zip(found, tensors_in(promised), strict=True):
        assert (x.dtype, x.shape, _steps(x)) == (wanted.dtype, wanted.shape, _steps(wanted)), op._qualname
    given = {x.untyped_storage()._cdata for x in tensors_in(args) if x.numel()}
    made = [x.untyped_storage()._cdata for x in found if x.numel()]
    assert len(set(made)) == len(made), f"{op._qualname}: results share memory"
    assert not set(made) & given, f"{op._qualname}: a result is an argument"


def tensors_in(x: Any) -> list[Tensor]:
    """Every tensor of an argument, of a result, or of a list or tuple of them."""
    if isinstance(x, (list, tuple)):
        return [tensor for element in x for tensor in tensors_in(element)]
    return [x] if isinstance(x, Tensor) else []


def moved(x: Any, device: Any) -> Any:
    """An operator's argument on another device."""
    if isinstance(x, (list, tuple)):
        return type(x)(moved(element, device) for element in x)
    return x.to(device) if isinstance(x, Tensor) else x


def _steps(x: Tensor) -> list[int]:
    """Strides of the dimensions that have a next element, which are all that torch.compile checks."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def bits(x: Tensor) -> Tensor:
    """The tensor's bytes."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
