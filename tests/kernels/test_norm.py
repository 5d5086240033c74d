"""LayerNorm+modulate and RMSNorm+rotary: against diffusers' modules to the bit, against autograd in float64.

Their Triton kernels, in the interpreter, against the operators in fp32: the interpreter truncates to bf16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor

from coat_core.kernels.norm import (
    layer_norm_modulate,
    layer_norm_modulate_backward,
    layer_norm_modulate_quantize,
    rms_norm_rope,
    rms_norm_rope_backward,
)
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import check_operator, reference
from tests.helpers.rows import CASES, SPECS, assert_codes_of, assert_rows_close, rows_of_kind
from tests.helpers.rows import KINDS as ROW_KINDS
from tests.tolerances import (
    BF16_ULP_RTOL,
    KERNEL_ROW_RTOL,
    NORM_BACKWARD_BF16_FLOOR_DB,
    NORM_BACKWARD_FP32_FLOOR_DB,
)

EPS = 1e-6
FLOOR = {torch.float32: NORM_BACKWARD_FP32_FLOOR_DB, torch.bfloat16: NORM_BACKWARD_BF16_FLOOR_DB}
TOKENS, HIDDEN, HEADS, HEAD_DIM = 7, 48, 3, 16


def modulated(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 7, 48], scale and shift [2, 48]; rows of zeros, one huge channel, heavy tails, not contiguous."""
    x = torch.randn(2, TOKENS, HIDDEN)
    if kind == "zero row":
        x[0, 3] = 0
    elif kind == "outlier":
        x[..., 5] *= 1000
    elif kind == "heavy tails":
        x = x / torch.rand_like(x).clamp_min(1e-3)
    elif kind == "strided":
        x = torch.randn(2, HIDDEN, TOKENS).transpose(1, 2)
    scale, shift = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    return x.to(device, dtype), scale.to(device, dtype), shift.to(device, dtype)


KINDS = ["plain", "zero row", "outlier", "heavy tails", "strided"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_layer_norm_modulate_has_diffusers_bits(kind: str, dtype: torch.dtype) -> None:
    x, _, _ = modulated(kind, dtype, torch.device("cpu"))
    norm = AdaLayerNormZero(HIDDEN).to(dtype)
    emb = torch.randn(2, HIDDEN).to(dtype)
    with torch.no_grad():
        expected = norm(x, emb=emb)[0]
        shift, scale, *_ = norm.linear(norm.silu(emb)).chunk(6, dim=1)
        assert_bitwise(layer_norm_modulate(x, scale, shift, EPS), expected)


def exact_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), eps=EPS) * (1 + scale[:, None]) + shift[:, None]


def gradients(function: Any, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `function(*leaves)` in float64."""
    doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*doubled), doubled, grad.double())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_modulate_backward(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, scale, shift = modulated(kind, dtype, device)
    grad = torch.randn_like(x)
    found = layer_norm_modulate_backward(grad, x, scale, EPS)
    for expected, gradient in zip(gradients(exact_layer_norm, [x, scale, shift], grad), found, strict=True):
        assert gradient.dtype == dtype
        assert_sqnr(expected, gradient, FLOOR[dtype])


def test_a_row_of_zeros_gets_a_finite_gradient(device: torch.device) -> None:
    x, scale, _ = modulated("zero row", torch.float32, device)
    grad = torch.randn_like(x)
    dx, dscale, dshift = layer_norm_modulate_backward(grad, x, scale, EPS)
    dz = grad[0, 3] * (1 + scale[0])
    assert_rows_close(dx[0, 3], EPS**-0.5 * (dz - dz.mean()), KERNEL_ROW_RTOL)
    assert dscale.isfinite().all()
    assert_rows_close(dshift, grad.sum(1), KERNEL_ROW_RTOL)


def rotary(device: torch.device) -> tuple[Tensor, Tensor]:
    angles = (torch.arange(TOKENS)[:, None] * torch.logspace(0, -2, HEAD_DIM // 2)).repeat_interleave(2, dim=1)
    return angles.cos().to(device), angles.sin().to(device)


def heads(kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [2, 7, 3, 16], weight [16]."""
    x = torch.randn(2, TOKENS, HEADS, HEAD_DIM)
    if kind == "zero row":
        x[0, 3, 1] = 0
    elif kind == "outlier":
        x[..., 5] *= 1000
    elif kind == "heavy tails":
        x = x / torch.rand_like(x).clamp_min(1e-3)
    elif kind == "strided":
        x = torch.randn(2, HEADS, TOKENS, HEAD_DIM).transpose(1, 2)
    return x.to(device, dtype), torch.randn(HEAD_DIM).to(device, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rms_norm_rope_has_diffusers_bits(kind: str, dtype: torch.dtype) -> None:
    x, weight = heads(kind, dtype, torch.device("cpu"))
    norm = torch.nn.RMSNorm(HEAD_DIM, eps=EPS).to(dtype)
    cos, sin = rotary(torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = apply_rotary_emb(norm(x), (cos, sin), sequence_dim=1)
    assert_bitwise(rms_norm_rope(x, weight, cos, sin, EPS), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_rope_backward(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = heads(kind, dtype, device)
    cos, sin = rotary(device)

    def exact(values: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(values, (HEAD_DIM,), weight.double(), EPS)
        return apply_rotary_emb(normed.double(), (cos.double(), sin.double()), sequence_dim=1)

    grad = torch.randn_like(x)
    found = rms_norm_rope_backward(grad, x, weight, cos, sin, EPS)
    assert found.dtype == dtype
    # apply_rotary_emb goes through fp32; its gradient is exact to that
    assert_sqnr(gradients(exact, [x], grad)[0], found, FLOOR[dtype])


def test_autocast_changes_nothing() -> None:
    x, scale, shift = modulated("plain", torch.float32, torch.device("cpu"))
    y, weight = heads("plain", torch.float32, torch.device("cpu"))
    cos, sin = rotary(torch.device("cpu"))
    plain = layer_norm_modulate(x, scale, shift, EPS), rms_norm_rope(y, weight, cos, sin, EPS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer_norm_modulate(x, scale, shift, EPS), rms_norm_rope(y, weight, cos, sin, EPS)
    for expected, found in zip(plain, cast, strict=True):
        assert_bitwise(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_keep_torch_library_rules(dtype: torch.dtype, device: torch.device) -> None:
    x, scale, shift = modulated("strided", dtype, device)
    y, weight = heads("strided", dtype, device)
    cos, sin = rotary(device)
    torch.library.opcheck(layer_norm_modulate._opoverload, (x, scale, shift, EPS))
    torch.library.opcheck(layer_norm_modulate_backward._opoverload, (x, x, scale, EPS))
    torch.library.opcheck(rms_norm_rope._opoverload, (y, weight, cos, sin, EPS))
    torch.library.opcheck(rms_norm_rope_backward._opoverload, (y, y, weight, cos, sin, EPS))
    for spec in SPECS:
        check_operator(layer_norm_modulate_quantize, (x, scale, shift, EPS, *spec))


def test_layer_norm_modulate_quantize_is_the_two_operators() -> None:
    x, scale, shift = modulated("plain", torch.bfloat16, torch.device("cpu"))
    for spec in SPECS:
        n, codes, code_scale = layer_norm_modulate_quantize(x, scale, shift, EPS, *spec)
        assert_bitwise(n, layer_norm_modulate(x, scale, shift, EPS))
        assert_codes_of(n, codes, code_scale, *spec)


ROW_SHAPES = [(2, 7, 48), (1, 7, 40), (3, 5, 130), (1, 3, 2100)]


def rows(kind: str, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, D]; scale and shift, chunks of the modulation of a whole block."""
    b, _, d = shape
    scale, shift = torch.randn(b, 6 * d, device=device).chunk(6, dim=1)[1:3]
    return rows_of_kind(kind, shape).to(device), scale, shift


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_layer_norm_modulate_kernel(case: tuple[str, str, str], device: torch.device) -> None:
    from coat_core.kernels.gpu import norm as kernels

    kind, *spec = case
    for shape in ROW_SHAPES:
        x, scale, shift = rows(kind, shape, device)
        n, codes, code_scale = kernels.layer_norm_modulate_quantize(x, scale, shift, EPS, *spec)
        assert_rows_close(n, reference(layer_norm_modulate, x, scale, shift, EPS), KERNEL_ROW_RTOL)
        assert_codes_of(n, codes, code_scale, *spec)
        assert_bitwise(kernels.layer_norm_modulate(x, scale, shift, EPS), n)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", ["per_row", "per_tensor"])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_modulate_kernel_in_half_precision(
    scale_dtype: torch.dtype, granularity: str, device: torch.device
) -> None:
    from coat_core.kernels.gpu.norm import layer_norm_modulate_quantize as kernel

    x, scale, shift = (x.to(scale_dtype) for x in rows("plain", (2, 7, 48), device))
    x = x.to(torch.bfloat16)
    n, codes, code_scale = kernel(x, scale, shift, EPS, "e4m3", granularity)
    assert_codes_of(n, codes, code_scale, "e4m3", granularity)
    # three roundings, each to a neighbour that the interpreter's truncation may choose otherwise
    assert_rows_close(n, reference(layer_norm_modulate, x, scale, shift, EPS), 3 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_layer_norm_modulate_backward_kernel(kind: str, device: torch.device) -> None:
    from coat_core.kernels.gpu.norm import layer_norm_modulate_backward as kernel

    for shape in ROW_SHAPES:
        x, scale, _ = rows(kind, shape, device)
        grad = rows_of_kind("strided", shape).to(device)
        expected = reference(layer_norm_modulate_backward, grad, x, scale, EPS)
        for found, gradient in zip(kernel(grad, x, scale, EPS), expected, strict=True):
            assert_rows_close(found, gradient, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_layer_norms_backward_shares_rows_among_programs(
    programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coat_core.kernels.gpu import codes
    from coat_core.kernels.gpu.norm import layer_norm_modulate_backward as kernel

    monkeypatch.setattr(codes, "PROGRAMS", programs)
    monkeypatch.setattr(codes, "TILE_ELEMENTS", 128)  # two rows at once
    x, scale, _ = rows("plain", (2, 13, 48), device)
    grad = torch.randn_like(x)
    expected = reference(layer_norm_modulate_backward, grad, x, scale, EPS)
    for found, gradient in zip(kernel(grad, x, scale, EPS), expected, strict=True):
        assert_rows_close(found, gradient, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_layer_norms_backward_kernel_reads_half_precision(device: torch.device) -> None:
    from coat_core.kernels.gpu.norm import layer_norm_modulate_backward as kernel

    x, scale, _ = (x.to(torch.bfloat16) for x in rows("plain", (2, 7, 48), device))
    for dtype in (torch.bfloat16, torch.float32):
        grad = torch.randn(x.shape, device=device).to(dtype)
        expected = reference(layer_norm_modulate_backward, grad, x, scale, EPS)
        for found, gradient in zip(kernel(grad, x, scale, EPS), expected, strict=True):
            assert_rows_close(found, gradient, BF16_ULP_RTOL)


def angles(tokens: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.randn(tokens, d // 2, device=device).repeat_interleave(2, dim=1)
    return table.cos(), table.sin()


def per_head(kind: str, heads: int, d: int, device: torch.device) -> Tensor:
    """[2, 7, H, d] as callers have it: a view of [B, S, H·d], of [B, H, S, d], or with neighbours apart."""
    x = rows_of_kind(kind if kind in ROW_KINDS else "plain", (2, heads, 7, d)).to(device)
    if kind == "tokens first":
        return x.transpose(1, 2).contiguous().view(2, 7, heads * d)[:, 2:].unflatten(-1, (heads, d))
    return x.transpose(1, 2)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", [*ROW_KINDS, "tokens first"])
@pytest.mark.parametrize(("heads", "d"), [(3, 16), (2, 24), (9, 128), (1, 2)])
def test_rms_norm_rope_kernels(kind: str, heads: int, d: int, device: torch.device) -> None:
    from coat_core.kernels.gpu import rope as kernels

    x = per_head(kind, heads, d, device)
    grad = per_head("plain", heads, d, device)[:, -x.shape[1] :]
    tables = (torch.randn(d, device=device), *angles(x.shape[1], d, device), EPS)
    y, dx = kernels.rms_norm_rope(x, *tables), kernels.rms_norm_rope_backward(grad, x, *tables)
    assert y.is_contiguous()
    assert dx.is_contiguous()
    assert_rows_close(y, reference(rms_norm_rope, x, *tables), KERNEL_ROW_RTOL)
    assert_rows_close(dx, reference(rms_norm_rope_backward, grad, x, *tables), KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_rms_norm_rope_kernels_read_half_precision(device: torch.device) -> None:
    from coat_core.kernels.gpu import rope as kernels

    x, grad = per_head("plain", 3, 16, device).bfloat16(), per_head("plain", 3, 16, device)
    tables = (torch.randn(16, device=device).bfloat16(), *angles(7, 16, device), EPS)
    assert_rows_close(kernels.rms_norm_rope(x, *tables), reference(rms_norm_rope, x, *tables), 2 * BF16_ULP_RTOL)
    expected = reference(rms_norm_rope_backward, grad, x, *tables)
    assert_rows_close(kernels.rms_norm_rope_backward(grad, x, *tables), expected, BF16_ULP_RTOL)


@pytest.mark.triton
def test_two_launches_agree(device: torch.device) -> None:
    from coat_core.kernels.gpu import norm as kernels
    from coat_core.kernels.gpu import rope

    x, scale, shift = rows("heavy tails", (2, 40, 48), device)
    y, tables = x.unflatten(-1, (3, 16)), (scale[0, :16], *angles(40, 16, device), EPS)
    first, second = (
        (
            *kernels.layer_norm_modulate_backward(x, x, scale, EPS),
            kernels.layer_norm_modulate_quantize(x, scale, shift, EPS, "e4m3", "per_tensor")[2],
            rope.rms_norm_rope(y, *tables),
            rope.rms_norm_rope_backward(y, y, *tables),
        )
        for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


@pytest.mark.triton
def test_a_row_too_wide_for_a_program_is_refused(device: torch.device) -> None:
    from coat_core.kernels.gpu.norm import layer_norm_modulate as kernel

    wide = torch.zeros(1, 1, 16385, device=device)
    with pytest.raises(ValueError, match="rows of 16385: the Triton kernel holds at most 16384"):
        kernel(wide, wide[0], wide[0], EPS)
