"""Gate and residual, forward and backward: operators, and their Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, per_group
from coat_core.kernels.gate import gate_residual, gate_residual_backward
from coat_core.quantize import quantize
from tests.helpers import operators
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import check_operator
from tests.helpers.rows import CASES, KINDS, SPECS, assert_codes_of, assert_rows_close, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

SHAPES = [(2, 7, 48), (1, 7, 40), (3, 5, 130), (1, 3, 2100)]
GRANULARITIES = [PER_TENSOR, PER_ROW, per_group(16), per_group(128)]


def reference(*args: object) -> tuple[Tensor, ...]:
    """dy, its codes, their scale and dgate, as the operator's body makes them on a CPU."""
    return operators.reference(gate_residual_backward, *args)


def kernel_dtypes(device: torch.device) -> list[torch.dtype]:
    """The interpreter truncates to bf16 where a GPU rounds."""
    return [torch.float32] + [torch.bfloat16] * (device.type == "cuda")


def tensors(kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Residual or grad, gate (one chunk of several), result."""
    b, _, d = shape
    gate = torch.randn(b, 3 * d)[:, d : 2 * d]
    return [x.to(device, dtype) for x in (torch.randn(shape), gate, rows_of_kind(kind, shape))]


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_gate_residual_kernel_has_the_references_bits(kind: str, device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual as kernel

    for shape in SHAPES:
        for dtype in kernel_dtypes(device):
            residual, gate, result = tensors(kind, shape, device, dtype)
            assert_bitwise(kernel(residual, gate, result), residual + gate[:, None] * result)
            assert_bitwise(kernel(residual.float(), gate, result), residual.float() + gate[:, None] * result)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gate_residual_backward_kernel(case: tuple[str, str, str], device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    kind, *spec = case
    for shape in SHAPES:
        for dtype in kernel_dtypes(device):
            result, gate, grad = tensors(kind, shape, device, dtype)
            args = (grad, gate, result, None, 128, dtype, *spec)
            dy, codes, scale, dgate = kernel(*args)
            assert_bitwise(dy, grad * gate[:, None])
            assert_codes_of(dy, codes, scale, *spec)
            assert_rows_close(dgate, reference(*args)[-1], KERNEL_ROW_RTOL if dtype == torch.float32 else BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_gate_residual_backward_kernel_reads_codes(fmt: str, granularity: Granularity, device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    for shape in SHAPES:
        grad, gate, result = tensors("heavy tails", shape, device, torch.float32)
        codes, scale, _ = quantize(result, fmt, granularity)
        args = (grad, gate, codes, scale, granularity.group_size, torch.float32, "e5m2", "per_row")
        assert_rows_close(kernel(*args)[-1], reference(*args)[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_each_program_takes_its_share_of_the_rows(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.kernels.gpu import codes
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    grad, gate, result = tensors("plain", (2, 13, 48), device, torch.float32)
    args = (grad, gate, result, None, 128, torch.float32, "e5m2", "per_row")
    dy, dy_codes, scale, dgate = kernel(*args)
    assert_bitwise(dy, grad * gate[:, None])
    assert_codes_of(dy, dy_codes, scale, "e5m2", "per_row")
    assert_rows_close(dgate, reference(*args)[-1], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_without_result_there_is_no_gradient_of_gate(device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    grad, gate, _ = tensors("plain", (2, 7, 48), device, torch.float32)
    for run in (kernel, gate_residual_backward):
        dy, _, _, dgate = run(grad, gate, None, None, 128, torch.float32, "e5m2", "none")
        assert_bitwise(dy, grad * gate[:, None])
        assert dgate.shape == (0,)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
def test_dy_is_quantized_as_it_is_returned(granularity: str, device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    grad, gate, _ = tensors("plain", (2, 7, 48), device, torch.float32)
    dy, codes, scale, _ = kernel(grad, gate.bfloat16(), None, None, 128, torch.bfloat16, "e5m2", granularity)
    assert dy.dtype == torch.bfloat16
    assert_codes_of(dy, codes, scale, "e5m2", granularity)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    grad, gate, result = tensors("heavy tails", (2, 40, 48), device, torch.float32)
    first, second = (kernel(grad, gate, result, None, 128, torch.float32, "e5m2", "per_tensor") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a.view(torch.uint8) if a.itemsize == 1 else a, b.view(torch.uint8) if b.itemsize == 1 else b)


@pytest.mark.triton
def test_rows_too_wide_for_a_program_are_refused(device: torch.device) -> None:
    from coat_core.kernels.gpu.gate import gate_residual_backward as kernel

    wide = torch.zeros(1, 1, 16385, device=device)
    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernel(wide, wide[0], None, None, 128, torch.float32, "e5m2", "none")


def test_the_gradients_are_autograds() -> None:
    grad, gate, result = tensors("plain", (2, 7, 48), torch.device("cpu"), torch.float32)
    leaves = [gate.double().requires_grad_(), result.double().requires_grad_()]
    expected_dgate, expected_dy = torch.autograd.grad(leaves[0][:, None] * leaves[1], leaves, grad.double())
    dy, _, _, dgate = gate_residual_backward(grad, gate, result, None, 128, torch.float32, "e5m2", "none")
    assert_rows_close(dy.double(), expected_dy, KERNEL_ROW_RTOL)
    assert_rows_close(dgate.double(), expected_dgate, KERNEL_ROW_RTOL)


def test_the_operators_residual_is_eager_pytorchs() -> None:
    residual, gate, result = tensors("plain", (2, 7, 48), torch.device("cpu"), torch.bfloat16)
    assert_bitwise(gate_residual(residual, gate, result), residual + gate[:, None] * result)


def test_operators_keep_torch_library_rules() -> None:
    grad, gate, result = tensors("strided", (2, 3, 48), torch.device("cpu"), torch.bfloat16)
    check_operator(gate_residual, (grad, gate, result))
    for spec in SPECS:
        check_operator(gate_residual_backward, (grad, gate, result, None, 128, torch.bfloat16, *spec))
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize(result, "e4m3", granularity)
        spec = (granularity.group_size, torch.float32, "e5m2", "per_row")
        check_operator(gate_residual_backward, (grad, gate, codes, scale, *spec))
    check_operator(gate_residual_backward, (grad, gate, None, None, 128, torch.bfloat16, "e5m2", "none"))
