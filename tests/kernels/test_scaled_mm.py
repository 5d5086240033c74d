"""Products of codes, FP8, INT8 and a few rows: the references against float64 and torch, and the kernels."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.formats import get_format
from coat_core.granularity import PER_ROW, PER_TENSOR
from coat_core.int8 import INT8_MAX
from coat_core.ops.scaled_mm import (
    int8_mm,
    row_scale,
    scaled_mm,
    scaled_mm_on_cuda,
    trial_error,
    unsupported_reason,
    weight_only_linear,
)
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import OperatorLog, check_operator, moved, reference
from tests.tolerances import FP32_ORDER_FLOOR_DB, SCALED_MM_BF16_FLOOR_DB, SCALED_MM_FP32_FLOOR_DB

with suppress(ImportError):  # without triton
    from coat_core.ops import scaled_mm_kernel as kernels

SCALINGS = {"tensor": PER_TENSOR, "row": PER_ROW}


def operands(
    device: torch.device, m: int = 17, k: int = 48, n: int = 32, a_format: str = "e4m3", b_format: str = "e4m3",
    scaling: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """a, a_scale, b, b_scale of Gaussian data with rows of very different size."""
    size = torch.logspace(-3, 3, m).unsqueeze(1)
    a = quantize((torch.randn(m, k) * size).to(device), a_format, SCALINGS[scaling])
    b = quantize(torch.randn(n, k).to(device), b_format, SCALINGS[scaling])
    return a.codes, a.scale, b.codes, b.scale


def exact(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).t()


@pytest.mark.parametrize(("a_scaling", "b_scaling"), [("tensor", "tensor"), ("row", "row"), ("row", "tensor")])
@pytest.mark.parametrize(
    ("m", "a_format", "b_format"), [(1, "e4m3", "e4m3"), (3, "e5m2", "e4m3"), (17, "e4m3", "e5m2")]
)
def test_agrees_with_a_float64_product(device, m, a_format, b_format, a_scaling, b_scaling):
    dtypes = get_format(a_format).dtype, get_format(b_format).dtype
    if reason := unsupported_reason(device, *dtypes, a_scaling == "row"):
        pytest.skip(reason)
    a, a_scale, *_ = operands(device, m, a_format=a_format, scaling=a_scaling)
    *_, b, b_scale = operands(device, b_format=b_format, scaling=b_scaling)
    expected = exact(a, a_scale, b, b_scale)
    # CUDA's row-wise kernels write bf16 whatever is asked for, and Hopper's tensor cores cut FP8 products to 14 bits
    wide_floor = SCALED_MM_BF16_FLOOR_DB if device.type == "cuda" else SCALED_MM_FP32_FLOOR_DB
    assert_sqnr(expected, scaled_mm(a, a_scale, b, b_scale, None, torch.float32), wide_floor)
    assert_sqnr(expected, scaled_mm(a, a_scale, b, b_scale, None, torch.bfloat16), SCALED_MM_BF16_FLOOR_DB)


def by_torchs_operator(*args: Any) -> Tensor:
    try:
        return scaled_mm_on_cuda(*args)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}'s own operator does not take this on a CPU: {str(error)[-60:]}")


@pytest.mark.parametrize(
    ("a_scaling", "b_scaling", "dtype", "bias", "transposed"),
    [
        *(("tensor", "tensor", dtype, True, False) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *(("row", "row", dtype, True, True) for dtype in (torch.bfloat16, torch.float32)),
        ("row", "tensor", torch.bfloat16, False, False),
    ],
)
def test_gpu_path_calls_torchs_operator_rightly(a_scaling, b_scaling, dtype, bias, transposed):
    """The body of the CUDA kernel, on CPU tensors: torch's operator has the same arguments on both."""
    cpu = torch.device("cpu")
    a, a_scale, *_ = operands(cpu, m=7, scaling=a_scaling, a_format="e5m2")
    *_, b, b_scale = operands(cpu, scaling=b_scaling)
    b = b.t().contiguous().t() if transposed else b
    bias_N = torch.randn(b.shape[0], dtype=torch.bfloat16) if bias else None
    ours = by_torchs_operator(a, a_scale, b, b_scale, bias_N, dtype)
    assert ours.dtype == dtype
    assert_sqnr(scaled_mm(a, a_scale, b, b_scale, bias_N, dtype), ours, SCALED_MM_BF16_FLOOR_DB)


@pytest.mark.parametrize("weight", ["tensor", "row"])
def test_a_row_wise_product_is_one_launch_where_the_weights_scale_is_kept(weight):
    a, a_scale, *_ = operands(torch.device("cpu"), m=7, scaling="row")
    *_, b, b_scale = operands(torch.device("cpu"), scaling=weight)
    bias = torch.randn(b.shape[0], dtype=torch.bfloat16)
    kept = row_scale(b_scale, b.shape[0])
    assert kept.shape == (32, 1)
    args = (a, a_scale, b), (bias, torch.bfloat16, True)
    expected = by_torchs_operator(*args[0], b_scale, *args[1])
    called: list[Any] = []
    with OperatorLog(lambda func, _: called.append(func)):
        found = scaled_mm_on_cuda(*args[0], kept, *args[1])
    views = torch.ops.aten._unsafe_view.default
    assert [func.name() for func in called if not func.is_view and func is not views] == ["aten::_scaled_mm"]
    assert_bitwise(found, expected)


def test_bias_is_added_before_the_only_rounding():
    a, a_scale, b, b_scale = operands(torch.device("cpu"))
    bias = torch.randn(b.shape[0])
    wide = scaled_mm(a, a_scale, b, b_scale, None, torch.float32)
    assert_bitwise(scaled_mm(a, a_scale, b, b_scale, bias, torch.bfloat16), (wide + bias).to(torch.bfloat16))


def test_special_values():
    a, a_scale, b, b_scale = operands(torch.device("cpu"))
    with_nan = a.float()
    with_nan[2, 3] = torch.nan
    out = scaled_mm(with_nan.to(a.dtype), a_scale, b, b_scale, None, torch.float32)
    assert out[2].isnan().all()
    assert out.isnan().sum() == out.shape[1]
    assert_bitwise(scaled_mm(torch.zeros_like(a), a_scale, b, b_scale, None, torch.float32), torch.zeros(17, 32))
    huge = scaled_mm(a, torch.tensor(1e30), b, b_scale, None, torch.float32)
    assert huge.isfinite().all()
    assert_sqnr(exact(a, torch.tensor(1e30), b, b_scale), huge, SCALED_MM_FP32_FLOOR_DB)
    assert scaled_mm(a, torch.tensor(1e30), b, b_scale, None, torch.float16).isinf().any()


def test_it_keeps_torch_library_rules(device):
    args = (*operands(device, scaling="row"), torch.randn(32, device=device), torch.bfloat16)
    check_operator(scaled_mm, args)
    torch.library.opcheck(scaled_mm._opoverload, args, test_utils="test_aot_dispatch_dynamic")


def test_a_cpu_multiplies_everything_and_a_broken_device_says_why():
    e4m3 = torch.float8_e4m3fn
    assert unsupported_reason(torch.device("cpu"), e4m3, e4m3, True) is None
    reason = unsupported_reason(torch.device("mps"), e4m3, e4m3, False)
    if not torch.backends.mps.is_available():
        assert reason.startswith("mps: ")


def test_running_out_of_memory_is_not_taken_for_missing_fp8(monkeypatch):
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("coat_core.ops.scaled_mm._random_codes", full)
    unsupported_reason.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        unsupported_reason(torch.device("meta"), torch.float8_e4m3fn, torch.float8_e4m3fn, False)
    unsupported_reason.cache_clear()


PAIRS = [(torch.float8_e4m3fn,) * 2, (torch.float8_e5m2, torch.float8_e4m3fn), (torch.int8,) * 2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("row_wise", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_right_product_passes_the_trial(pair, row_wise):
    assert trial_error(CPU, *pair, row_wise) is None


def spoiled(how: str, forward_too: bool = True) -> Any:
    """`scaled_mm` as a broken kernel would compute it."""

    def product(a, a_scale, b, b_scale, bias, dtype, forward):
        out = scaled_mm(a, a_scale, b, b_scale, bias, dtype, forward)
        if forward and not forward_too:
            return out
        if how == "one NaN":
            out[3, 5] = torch.nan
        elif how == "a tile":
            out[-128:, -128:] = out[:128, :128]
        elif how == "rows":
            return scaled_mm(a, a_scale.flip(0), b, b_scale, bias, dtype, forward)
        elif how == "columns":
            return scaled_mm(a, a_scale, b, b_scale.flip(0), bias, dtype, forward)
        elif how == "14 bits of each sum":  # Hopper's fast accumulation is this good
            return (out.float() * (1 + 2**-8)).to(dtype)
        return out

    return product


@pytest.mark.parametrize("how", ["one NaN", "a tile", "rows", "columns"])
def test_a_wrong_product_is_refused(how, monkeypatch):
    """In forward or, as FBGEMM's with slow accumulation, in backward alone."""
    monkeypatch.setattr("coat_core.ops.scaled_mm._sizes", (256, 256, 256))
    for forward_too in (True, False):
        monkeypatch.setattr("coat_core.ops.scaled_mm.scaled_mm", spoiled(how, forward_too))
        reason = trial_error(CPU, *PAIRS[1], True)
        assert "a wrong product of 256 x 256 x 256, with a scale per row" in reason
    monkeypatch.setattr("coat_core.ops.scaled_mm.scaled_mm", spoiled("14 bits of each sum"))
    assert trial_error(CPU, *PAIRS[1], True) is None  # rounding is not


def int8_operands(m: int, n: int, k: int, one_scale: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b = (torch.randint(-INT8_MAX, INT8_MAX + 1, (rows, k), dtype=torch.int8) for rows in (m, n))
    return a, torch.rand(m, 1), b, torch.rand(()) if one_scale else torch.rand(n, 1), torch.randn(n)


@pytest.mark.triton
@pytest.mark.parametrize(
    "case",  # shape, one scale, dtype, rotation
    [
        ((65, 144, 16), True, torch.bfloat16, 16),
        ((130, 272, 80), False, torch.float32, 1),
        ((70, 512, 48), True, torch.float32, 256),
        ((130, 768, 80), True, torch.bfloat16, 256),
    ],
    ids=str,
)
def test_int8_gemm_kernel_has_the_references_bits(case, device, monkeypatch):
    shape, one_scale, dtype, rotation = case
    monkeypatch.setattr(kernels, "PROGRAMS", 1 if shape[0] > 100 else 128)  # both tiles
    a, a_scale, b, b_scale, bias = int8_operands(*shape, one_scale)
    for given, other in ((bias, b), (None, b.t().contiguous().t())):
        arguments = (a, a_scale, other, b_scale, given, dtype, False, rotation)
        assert_bitwise(kernels.int8_mm(*moved(arguments, device)).cpu(), reference(int8_mm, *arguments))


def test_the_int8_gemm_is_exact():
    a, a_scale, b, b_scale, bias = int8_operands(5, 32, 4096)
    a[0], b[0] = INT8_MAX, INT8_MAX
    exact = (a.double() @ b.double().t()).to(torch.float32) * a_scale * b_scale.t() + bias
    assert_bitwise(int8_mm(a, a_scale, b, b_scale, bias, torch.float32), exact)


@pytest.mark.triton
@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW], ids=str)
@pytest.mark.parametrize(("shape", "n", "k"), [((4,), 33, 16), ((2, 3), 64, 300), ((17,), 48, 32)])
def test_few_rows_kernel_sums_in_another_order(shape, n, k, granularity, device):
    x, weight, bias = torch.randn(*shape, 2 * k)[..., ::2], torch.randn(n, k), torch.randn(n)
    x[..., 3], weight[0], weight[1] = 1e4, 0, weight[1] * 1e4
    codes, scale, _ = quantize(weight, "e4m3", granularity)
    for given in (bias, None):
        arguments = (x, codes, scale, given, torch.float32)
        found, expected = kernels.weight_only_linear(*moved(arguments, device)), weight_only_linear(*arguments)
        assert found.shape == expected.shape
        for row, wanted in zip(found.cpu().flatten(0, -2).t(), expected.flatten(0, -2).t(), strict=True):
            assert_sqnr(wanted, row, FP32_ORDER_FLOOR_DB)
