"""The tables by which one launch takes many tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import bits
from tests.kernels.test_adamw import Problem, kernel


@pytest.mark.triton
@pytest.mark.parametrize("tensors", [1, 50])
def test_one_launch_whatever_the_number_of_tensors(
    tensors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import adamw_kernel as kernels

    launches: list[str] = []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args, **kwargs: (launches.append(args[0]), launch(*args, **kwargs)))
    problem = Problem(device, shapes=[(4, 40)] * tensors)
    problem.step(1, problem.grads(1), kernel)
    assert len(launches) == 1


@pytest.mark.triton
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("int8_ratio", "uint8_log"), (None, None)])
def test_tensors_one_by_one_have_the_bits_of_one_launch_and_equal_sizes_share_a_table(
    formats: tuple[str | None, str | None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import adamw_kernel as kernels
    from coat_core.ops import tables

    made: list[tuple[int, ...]] = []
    programs = kernels._programs
    monkeypatch.setattr(kernels, "_programs", lambda *args: (made.append(args[0]), programs(*args))[1])
    monkeypatch.setattr(tables, "_uploaded", type(tables._uploaded)())
    together, apart = (Problem(device, formats, shapes=[(40, 25), (300,), (40, 25), (25, 40)]) for _ in range(2))
    for step in (1, 2):
        grads = together.grads(step)
        together.step(step, grads, kernel)
        made.clear()
        every = apart.params, apart.first_blocks
        for i, grad in enumerate(grads):
            apart.params, apart.first_blocks = [every[0][i]], [every[1][i]]
            apart.step(step, [grad], kernel)
        apart.params, apart.first_blocks = every
        assert made == ([(1000,), (300,)] if step == 1 else [])
        made.clear()
    for ours, theirs in zip(apart.params, together.params, strict=True):
        assert_bitwise(ours, theirs)
    for ours, theirs in zip(apart.moments, together.moments, strict=True):
        assert torch.equal(bits(ours.codes), bits(theirs.codes))
        assert_bitwise(ours.numbers, theirs.numbers)


@pytest.mark.triton
def test_tables_are_uploaded_when_they_change_and_forgotten_in_time(device: torch.device) -> None:
    from coat_core.ops import tables

    made: list[int] = []

    def table(*numbers: int) -> Tensor:
        return tables.device_table(("test", numbers), lambda: (made.append(1), numbers)[1], device)

    assert table(1, 2**40).tolist() == [1, 2**40]
    assert table(1, 2**40) is table(1, 2**40)
    assert table(3).tolist() == [3]
    assert len(made) == 2
    for number in range(tables.KEPT_TABLES):
        table(number, 0)
    assert len(tables._uploaded) == tables.KEPT_TABLES
    table(3)
    assert len(made) == 3 + tables.KEPT_TABLES
