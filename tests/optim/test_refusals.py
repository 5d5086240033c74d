"""What FP8AdamW refuses, and that the message names it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from coat_core.optim import FP8AdamW
from tests.helpers.asserts import assert_bitwise
from tests.optim.common import make_params, run


@pytest.mark.parametrize("name", ["amsgrad", "foreach", "differentiable", "fused"])
def test_torch_options_are_refused_by_name_when_on(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=True: not supported by FP8AdamW"):
        FP8AdamW(make_params(), **{name: True})
    with pytest.raises(ValueError, match=rf"{name}=True"):
        FP8AdamW([{"params": make_params(), name: True}])
    params = make_params()
    run(FP8AdamW(params, **{name: False}), params, range(1))
    assert not torch.equal(params[0], make_params()[0])


def test_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match=r"block_size=64: FP8AdamW has no such option"):
        FP8AdamW(make_params(), block_size=64)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, "lr of shape"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (1.0, 0.999)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
    ],
)
def test_hyper_parameters_out_of_range(option: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8AdamW(make_params(), **option)
    optimizer = FP8AdamW(make_params()[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make_params()[1:], **option})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ValueError, match=f"seed={seed}"):
        FP8AdamW(make_params(), seed=seed)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_dtypes_are_refused_by_position(dtype: torch.dtype) -> None:
    bad = Parameter(torch.zeros(3, 2, dtype=dtype))
    with pytest.raises(ValueError, match=rf"param_groups\[0\]\['params'\]\[1\] of shape \(3, 2\) has dtype {dtype}"):
        FP8AdamW([Parameter(torch.zeros(2)), bad])


def test_sparse_gradient_is_refused_by_position_before_anything_moves() -> None:
    dense = Parameter(torch.ones(4))
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = FP8AdamW([{"params": [dense]}, {"params": embedding.parameters()}])
    dense.grad = torch.ones(4)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"param_groups\[1\]\['params'\]\[0\] of shape \(5, 3\) has a sparse"):
        optimizer.step()
    assert_bitwise(dense.detach(), torch.ones(4))
    assert not optimizer.state


@pytest.mark.parametrize(("key", "value"), [("fp8", {"block_size": 16}), ("capturable", True), ("seed", 3)])
def test_what_is_the_same_for_all_groups(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"'{key}': it is the same for all groups"):
        FP8AdamW([{"params": make_params(), key: value}])
