"""torch.library.opcheck for operators that return FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# without test_schema: it compares tensors by allclose, which torch lacks for FP8
WITHOUT_SCHEMA = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def check_operator(op: Any, args: tuple[Any, ...]) -> None:
    """Run opcheck on a functional operator; its schema's promise, that no input is changed or returned, apart."""
    torch.library.opcheck(op, args, test_utils=WITHOUT_SCHEMA)
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    before = [bits(x).clone() for x in inputs]
    results = op(*args)
    assert all(torch.equal(bits(x), copy) for x, copy in zip(inputs, before, strict=True)), "an input was changed"
    storages = {x.untyped_storage()._cdata for x in inputs}
    found = results if isinstance(results, tuple) else (results,)
    assert all(x.untyped_storage()._cdata not in storages for x in found), "an output shares an input's memory"


def bits(x: Tensor) -> Tensor:
    """The tensor's bytes."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
