"""Gate and residual with the adapter's part and what is saved of it: operators, and their Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.quantize import quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator, reference
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
SAVED = [("none", 128), ("e4m3", 128), ("e5m2", 16)]
SHAPES = [(2, 7, 48), (1, 19, 40), (3, 5, 130), (1, 3, 2100)]
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]


def tensors(kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = FP32) -> list[Tensor]:
    """Residual or grad, gate (one chunk of several), result."""
    b, _, d = shape
    gate = torch.randn(b, 3 * d)[:, d : 2 * d]
    return [x.to(device, dtype) for x in (torch.randn(shape), gate, rows_of_kind(kind, shape))]


def kernel_dtypes(device: torch.device) -> list[torch.dtype]:
    """The interpreter truncates to bf16 where a GPU rounds."""
    return [FP32] + [BF16] * (device.type == "cuda")


def adapter(
    shape: tuple[int, ...], rank: int, device: torch.device, dtype: torch.dtype = FP32
) -> tuple[Tensor, Tensor]:
    """h [B, S, r], neighbour of another's, and up [D, r]."""
    h = torch.randn(*shape[:-1], 2 * rank)[..., rank:]
    return h.to(device, dtype), torch.randn(shape[-1], rank).to(device, dtype)


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_the_sum_is_eager_pytorchs(saved: tuple[str, int]) -> None:
    residual, gate, result = tensors("outlier", (2, 7, 48), CPU, BF16)
    h, up = adapter((2, 7, 48), 4, CPU, BF16)
    y, *codes = gated_sum(residual, gate, result, None, None, *saved)
    assert_bitwise(y, residual + gate[:, None] * result)
    assert_saved(result, *codes, *saved)
    complete = result.clone()
    complete.view(-1, 48).addmm_(h.reshape(-1, 4), up.t())
    y, *codes = gated_sum(residual, gate, result, h, up, *saved)
    assert_bitwise(y, residual + gate[:, None] * complete)
    assert_saved(complete, *codes, *saved)
    declared = declarations["coat::gated_sum"]((y, *codes), residual, gate, result, h, up, *saved)
    assert len(declared) == (saved[0] != "none")
    for cast in declared:
        assert_bitwise(cast.values, complete)


def test_the_gradients_are_autograds() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), CPU)
    leaves = [gate.double().requires_grad_(), result.double().requires_grad_()]
    expected_dgate, expected_dy = torch.autograd.grad(leaves[0][:, None] * leaves[1], leaves, grad.double())
    for spec in SPECS:
        dy, codes, scale, dgate = gated_sum_backward(grad, gate, result, None, 128, FP32, *spec)
        assert_rows_close(dy.double(), expected_dy, KERNEL_ROW_RTOL)
        assert_rows_close(dgate.double(), expected_dgate, KERNEL_ROW_RTOL)
        assert_codes_of(dy, codes, scale, *spec)


def test_the_gates_gradient_is_complete_in_fp32() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), CPU, BF16)
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        found = gated_sum_backward(grad, gate, codes, scale, granularity.group_size, BF16, "e5m2", "none")
        values = quantize(result, "e4m3", granularity).dequantize(BF16)
        assert_bitwise(found[-1], (grad.float() * values.float()).sum(1))


def test_operators_keep_torch_library_rules() -> None:
    grad, gate, result = tensors("strided", (2, 3, 48), CPU, BF16)
    for saved in SAVED:
        for given in ((None, None), adapter((2, 3, 48), 4, CPU, BF16)):
            check_operator(gated_sum, (grad, gate, result, *given, *saved))
    for spec in SPECS:
        check_operator(gated_sum_backward, (grad, gate, result, None, 128, BF16, *spec))
    check_operator(gated_sum_backward, (grad, gate, None, None, 128, BF16, "e5m2", "none"))
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        spec = (granularity.group_size, FP32, "e5m2", "per_row")
        check_operator(gated_sum_backward, (grad, gate, codes, scale, *spec))


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("saved", [("none", 0), ("e4m3", 128), ("e5m2", 16), ("e4m3", 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_sum_kernel_has_the_references_bits(kind: str, saved: tuple[str, int], device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum as kernel

    for shape in SHAPES:
        for dtype in kernel_dtypes(device):
            residual, gate, result = tensors(kind, shape, device, dtype)
            for other in (residual, residual.float()):
                y, *codes = kernel(other, gate, result, None, None, *saved)
                assert_bitwise(y, other + gate[:, None] * result)
                assert_saved(result, *codes, *saved)
    y, *codes = kernel(residual.float(), gate.bfloat16(), result.bfloat16(), None, None, *saved)
    assert y.dtype == FP32
    assert_saved(result.bfloat16(), *codes, *saved)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 64, 100, 256])
def test_gated_sum_kernel_completes_the_result(rank: int, device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum as kernel

    for kind, shape in (
        ("plain", (2, 17, 48)),
        ("slice", (1, 7, 40)),
        ("outlier", (3, 5, 130)),
        ("strided", (1, 3, 600)),
    ):
        residual, gate, result = tensors(kind, shape, device)
        h, up = adapter(shape, rank, device)
        complete = result + h @ up.t()
        y, codes, scale = kernel(residual, gate, result, h, up, "e4m3", 16)
        expected = residual + gate[:, None] * complete
        assert_rows_close(y, expected, KERNEL_ROW_RTOL)
        ones, zeros = torch.ones_like(gate), torch.zeros_like(residual)
        kernels_own = kernel(zeros, ones, result, h, up, "none", 0)[0]
        assert_rows_close(kernels_own, complete, KERNEL_ROW_RTOL)
        assert_saved(kernels_own, codes, scale, "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_sum_kernel_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum as kernel

    residual, gate, result = tensors("plain", (2, 17, 48), device, dtype)
    h, up = adapter((2, 17, 48), 16, device, dtype)
    args = (residual, gate, result, h, up, "e4m3", 16)
    y, codes, scale = kernel(*args)
    # the result, the product and the sum are rounded: the interpreter truncates
    assert_rows_close(y, reference(gated_sum, *args)[0], 6 * BF16_ULP_RTOL)
    complete = kernel(torch.zeros_like(residual), torch.ones_like(gate), *args[2:])[0]
    assert_saved(complete, codes, scale, "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gated_sum_backward_kernel(case: tuple[str, str, str], device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    kind, *spec = case
    for shape in SHAPES:
        for dtype in kernel_dtypes(device):
            result, gate, grad = tensors(kind, shape, device, dtype)
            args = (grad, gate, result, None, 128, dtype, *spec)
            dy, codes, scale, dgate = kernel(*args)
            assert_bitwise(dy, grad * gate[:, None])
            assert_codes_of(dy, codes, scale, *spec)
            assert_rows_close(dgate, reference(gated_sum_backward, *args)[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gated_sum_backward_kernel_reads_codes(
    dtype: torch.dtype, fmt: str, granularity: Granularity, device: torch.device
) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    for shape in SHAPES:
        grad, gate, result = tensors("heavy tails", shape, device, dtype)
        codes, scale, _ = quantize(result, fmt, granularity)
        args = (grad, gate, codes, scale, granularity.group_size, dtype, "e5m2", "per_row")
        dgate = kernel(*args)[-1]
        assert dgate.dtype == FP32
        # the interpreter truncates the values to bf16
        allowed = KERNEL_ROW_RTOL if dtype == FP32 else 2 * BF16_ULP_RTOL
        assert_rows_close(dgate, reference(gated_sum_backward, *args)[-1], allowed)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_each_program_takes_its_share_of_the_rows(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.ops import rows as codes
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    grad, gate, result = tensors("plain", (2, 13, 48), device)
    args = (grad, gate, result, None, 128, FP32, "e5m2", "per_row")
    dy, dy_codes, scale, dgate = kernel(*args)
    assert_bitwise(dy, grad * gate[:, None])
    assert_codes_of(dy, dy_codes, scale, "e5m2", "per_row")
    assert_rows_close(dgate, reference(gated_sum_backward, *args)[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_without_result_there_is_no_gradient_of_gate(device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    grad, gate, _ = tensors("plain", (2, 7, 48), device)
    for run in (kernel, gated_sum_backward):
        dy, _, _, dgate = run(grad, gate, None, None, 128, FP32, "e5m2", "none")
        assert_bitwise(dy, grad * gate[:, None])
        assert dgate.shape == (0,)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_dy_is_quantized_as_it_is_returned(granularity: str, device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    grad, gate, _ = tensors("plain", (2, 7, 48), device)
    dy, codes, scale, _ = kernel(grad, gate.bfloat16(), None, None, 128, BF16, "e5m2", granularity)
    assert dy.dtype == BF16
    assert_codes_of(dy, codes, scale, "e5m2", granularity)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    grad, gate, result = tensors("heavy tails", (2, 40, 48), device)
    first, second = (kernel(grad, gate, result, None, 128, FP32, "e5m2", "per_tensor") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a.view(torch.uint8) if a.itemsize == 1 else a, b.view(torch.uint8) if b.itemsize == 1 else b)


@pytest.mark.triton
def test_rows_too_wide_for_a_program_are_refused(device: torch.device) -> None:
    from coat_core.ops.gate_kernel import gated_sum_backward as kernel

    wide = torch.zeros(1, 1, 16385, device=device)
    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernel(wide, wide[0], None, None, 128, FP32, "e5m2", "none")
