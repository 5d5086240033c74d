"""A step reads nothing back per parameter and launches no more for more parameters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.ops import adamw
from coat_core.optim import FP8AdamW
from tests.optim.common import make_params, nearest, run, set_grads


class CountOps(TorchDispatchMode):
    """Counts the operators that reach the device, by name; views and per-list operators count once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted_step(n_params: int) -> Counter[str]:
    params = make_params([(4, 32)] * n_params)
    optimizer = FP8AdamW(params, fp8_config=nearest())  # by kernel the draws are no operators of their own
    run(optimizer, params, range(1))
    set_grads(params, 1)
    with CountOps() as mode:
        optimizer.step()
    return mode.counts


def test_operators_of_a_step_do_not_grow_with_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_fp8_adamw_step", adamw._fp8_adamw_step._init_fn)  # to see into the operator
    few, many = counted_step(2), counted_step(100)
    assert few == many
    assert few.total() < 250


@pytest.mark.parametrize("read", ["item", "tolist", "__float__", "__bool__"])
def test_values_read_back_do_not_grow_with_the_parameters(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    original = getattr(torch.Tensor, read)
    for n_params in (2, 60):
        params = make_params([(4, 32)] * n_params)
        optimizer = FP8AdamW(params)
        run(optimizer, params, range(1))
        set_grads(params, 1)
        calls = 0

        def counting(self, *args, original=original):
            nonlocal calls
            calls += 1
            assert self.device.type == "cpu"
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, read, counting)
            optimizer.step()
        counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[0] <= 1
