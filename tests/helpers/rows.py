"""What kernels that make and quantize rows are tested with: inputs of every kind, and codes that are their values'."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from coat_core.casts import declarations
from coat_core.formats import format_of
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.int8 import quantize_int8, rotate, rotation_size
from coat_core.ops.dispatch import launcher_of
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_layout, moved, reference, tensors_in
from tests.tolerances import KERNEL_ROW_RTOL, NORM_BACKWARD_BF16_FLOOR_DB, NORM_BACKWARD_FP32_FLOOR_DB

CPU = torch.device("cpu")
FLOOR = {torch.float32: NORM_BACKWARD_FP32_FLOOR_DB, torch.bfloat16: NORM_BACKWARD_BF16_FLOOR_DB}
GRANULARITIES = [PER_TENSOR, per_group(16), per_group(128)]  # of saved codes
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16), ("e4m3", 256)]
SPECS = [
    *(("e4m3", "none"), ("e4m3", "per_row"), ("e5m2", "per_row"), ("e4m3", "per_tensor"), ("e5m2", "per_tensor")),
    ("int8", "per_row"),
]
LAYOUTS = ["dense", "strided", "slice"]
CASES = [  # shape and layout of x, its codes, its saved codes: every one of each, and none of them twice together
    ((2, 7, 48), "dense", SPECS[0], SAVED[2]),
    ((1, 19, 40), "slice", SPECS[1], SAVED[1]),
    ((3, 5, 130), "strided", SPECS[2], SAVED[3]),
    ((1, 4, 2100), "strided", SPECS[3], SAVED[0]),
    ((2, 5, 130), "slice", SPECS[4], SAVED[2]),
    ((2, 4, 768), "slice", SPECS[5], SAVED[1]),
]


def rows(shape: tuple[int, ...], layout: str = "slice") -> Tensor:
    """fp32 [..., K], in turn a plain row, one of zeros, one with an outlier and one with heavy tails."""
    width = {"dense": shape[-1], "strided": 2 * shape[-1], "slice": shape[-1] + 16}[layout]
    x = torch.randn(*shape[:-1], width)
    x = x[..., ::2] if layout == "strided" else x[..., -shape[-1] :]
    for number, place in enumerate(itertools.product(*map(range, shape[:-1]))):
        if number % 4 == 1:
            x[place] = 0.0
        elif number % 4 == 2:
            x[place][shape[-1] // 2] = -1e4
        elif number % 4 == 3:
            x[place] /= torch.rand(shape[-1]).clamp_min(1e-3)
    return x


def turned(*shape: int) -> Tensor:
    """fp32 [..., n, m], dense, with the strides of its transpose."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def read_cases(x: Tensor) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """x as an operator of the backward pass reads it: as it is, and as codes with their scale; and the group size."""
    yield x, None, 16
    if x.numel():
        yield *quantize(x, "e4m3", per_group(16))[:2], 16


def kernel_of(op: Any) -> Any:
    """The launcher, which is interpreted on a CPU."""
    return launcher_of(op._qualname)


def assert_follows(op: Any, args: tuple[Any, ...], device: torch.device, rtol: float = KERNEL_ROW_RTOL) -> Any:
    """Assert that values are the reference's up to `rtol` of a row, codes those of values, and the layout meta's."""
    given = moved(args, device)
    results = kernel_of(op)(*given)
    check_layout(op, given, results)
    expected_results = reference(op, *args)
    check_layout(op, args, expected_results)
    for result, expected in zip(tensors_in(results), tensors_in(expected_results), strict=True):
        if result.dtype.itemsize > 1 and result.numel():
            assert_rows_close(result, expected, rtol)
    if op._qualname in declarations:
        assert_casts(op, results, args)
    return results


def assert_casts(op: Any, results: Any, args: tuple[Any, ...], *values: Tensor) -> None:
    """Assert all codes to be the CPU's of what an operator declares to have cast: of `values` if there are any."""
    casts = declarations[op._qualname](moved(results, "cpu"), *moved(args, "cpu"))
    assert len(casts) == sum(x.dtype.itemsize == 1 and x.numel() > 0 for x in tensors_in(results))
    for cast, wanted in zip(casts, values or [cast.values for cast in casts], strict=True):
        if cast.codes.dtype == torch.int8:  # declared values are rotated
            wanted = rotate(wanted, rotation_size(wanted.shape[-1])) if values else wanted
            expected = quantize_int8(cast.values, 1, cast.factors)
        else:
            multiplied = cast.values if cast.factors is None else cast.values.float() * cast.factors
            expected = quantize(multiplied, format_of(cast.codes.dtype).name, cast.granularity)
        assert_bitwise(cast.values.contiguous(), wanted.contiguous())
        assert_bitwise(cast.scale, expected.scale)
        assert_bitwise(cast.codes.view(torch.uint8), expected.codes.view(torch.uint8))


def assert_rows_close(found: Tensor, expected: Tensor, rtol: float) -> None:
    """Assert same dtype and shape, and that no element is off by more than `rtol` of its row's largest magnitude."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    off = (found.cpu().double() - expected.cpu().double()).abs()
    allowed = rtol * expected.cpu().double().abs().amax(-1, keepdim=True)
    assert bool((off <= allowed).all()), f"off by {float((off / allowed).max()):.3g} of what is allowed"


def diffusers_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = RMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm(x).detach()
