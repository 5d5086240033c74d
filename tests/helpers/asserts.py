"""Assertions on tensors that say what is wrong."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coat_core.quantize import sqnr_db

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_sqnr(x: Tensor, x_hat: Tensor, floor_db: float) -> None:
    """Assert that x_hat is finite and within `floor_db` of x."""
    assert x_hat.to(torch.float32).isfinite().all(), "x_hat has NaN or inf"
    measured = sqnr_db(x, x_hat)
    assert measured >= floor_db, f"SQNR {measured:.2f} dB is below the floor of {floor_db:.2f} dB"


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.detach().double().flatten(), y.detach().double().flatten(), 0).item()


def assert_bitwise(a: Tensor, b: Tensor) -> None:
    """Assert same dtype, shape and bits (so -0.0 differs from 0.0), naming the first coordinate that differs."""
    assert a.dtype == b.dtype, f"dtype {a.dtype} != {b.dtype}"
    assert a.shape == b.shape, f"shape {tuple(a.shape)} != {tuple(b.shape)}"
    assert a.device == b.device, f"device {a.device} != {b.device}"
    bits = _BITS[a.element_size()]
    different = a.detach().contiguous().view(bits) != b.detach().contiguous().view(bits)
    count = int(different.sum())
    if count:
        first = tuple(different.nonzero()[0].tolist())
        left, right = a.detach()[first].cpu().to(torch.float64).item(), b.detach()[first].cpu().to(torch.float64).item()
        raise AssertionError(f"{count} of {a.numel()} elements differ, first at {first}: {left!r} != {right!r}")


def assert_all_bitwise(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Assert the same names and bits, naming the first tensor that differs."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        try:
            assert_bitwise(tensor, other[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
