"""INT8: rotate and quantize, rotate back, and the GEMM; operators, and their kernels against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.int8 import INT8_MAX
from coat_core.int8 import quantize_int8 as quantize_reference
from coat_core.int8 import rotate as rotate_reference
from coat_core.ops import int8 as ops
from coat_core.ops.scaled_mm import int8_mm
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator, reference
from tests.helpers.rows import extreme_values

SHAPES = [((3, 64), 64), ((2, 3, 320), 64), ((1, 4096), 256), ((7, 16), 16), ((2, 6), 1)]


KINDS = ["plain", "zeros", "outlier", "heavy tails", "tiny", "not finite", "rows apart", "bf16"]


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_kernel_has_the_references_bits(kind: str, device: torch.device) -> None:
    from coat_core.ops.int8_kernel import quantize_int8

    for shape, size in SHAPES:
        x, factors = extreme_values(kind, shape), torch.rand(shape[-1]) + 0.5
        for given in (None, factors):
            expected = quantize_reference(x, size, given)
            codes, scale = quantize_int8(x.to(device), size, None if given is None else given.to(device))
            assert_bitwise(codes.cpu(), expected.codes)
            assert_bitwise(scale.cpu().nan_to_num(nan=1e6), expected.scale.nan_to_num(nan=1e6))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_rotate_kernel_has_the_references_bits(device: torch.device) -> None:
    from coat_core.ops.int8_kernel import rotate

    for shape, size in SHAPES:
        x = torch.randn(shape)
        assert_bitwise(rotate(x.to(device), size).cpu(), rotate_reference(x, size))
    halves = torch.randn(5, 512).to(torch.bfloat16)
    assert_bitwise(rotate(halves.to(device), 256).cpu(), rotate_reference(halves, 256).to(torch.bfloat16))


def operands(m: int, n: int, k: int, one_scale: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b = (torch.randint(-INT8_MAX, INT8_MAX + 1, (rows, k), dtype=torch.int8) for rows in (m, n))
    return a, torch.rand(m, 1), b, torch.rand(()) if one_scale else torch.rand(n, 1), torch.randn(n)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemm_kernel_has_the_references_bits(dtype: torch.dtype, device: torch.device) -> None:
    from coat_core.ops import scaled_mm_kernel as int8

    for shape, one_scale in (((3, 48, 80), False), ((65, 144, 16), True), ((130, 272, 160), False)):
        a, a_scale, b, b_scale, bias = operands(*shape, one_scale)
        for given, other in ((bias, b), (None, b.t().contiguous().t())):
            on_device = [None if x is None else x.to(device) for x in (a, a_scale, other, b_scale, given)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(int8, "PROGRAMS", 1 if shape[0] > 100 else 128)  # both tiles
                found = int8.int8_mm(*on_device, dtype)
            assert_bitwise(found.cpu(), reference(int8_mm, a, a_scale, other, b_scale, given, dtype))


def test_the_gemm_is_exact() -> None:
    a, a_scale, b, b_scale, bias = operands(5, 32, 4096)
    a[0], b[0] = INT8_MAX, INT8_MAX
    exact = (a.double() @ b.double().t()).to(torch.float32) * a_scale * b_scale.t() + bias
    assert_bitwise(int8_mm(a, a_scale, b, b_scale, bias, torch.float32), exact)


def test_shapes_that_do_not_fit_are_refused() -> None:
    a, a_scale, b, b_scale, _ = operands(5, 32, 24)
    with pytest.raises(ValueError, match="K=24, N=32: must be multiples of 16"):
        int8_mm(a, a_scale, b, b_scale, None, torch.float32)
    with pytest.raises(ValueError, match="size=256"):
        ops.quantize_int8(torch.randn(2, 64), 256, None)


def test_operators_pass_opcheck() -> None:
    x = torch.randn(4, 64)
    check_operator(ops.quantize_int8, (x, 16, None))
    check_operator(ops.quantize_int8, (x.to(torch.bfloat16), 1, torch.rand(64)))
    check_operator(ops.rotate, (x, 64))
    check_operator(ops.rotate, (x, 1))
    a, a_scale, b, b_scale, bias = operands(5, 32, 48)
    check_operator(int8_mm, (a, a_scale, b, b_scale, bias, torch.bfloat16, True))
    check_operator(int8_mm, (a, a_scale, b, b_scale, None, torch.float32))
