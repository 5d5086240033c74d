"""SwiGLU in place of GELU, by every operator that takes an activation: the references, and kernels against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.ops.dispatch import launcher_of
from coat_core.ops.gelu import mlp_activation, mlp_activation_backward
from coat_core.ops.mlp_down import mlp_activation_down
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.ops.qkv import qkv_mlp_backward, qkv_rope_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import bits, check_layout, check_operator, moved, reference
from tests.helpers.rows import KINDS, SPECS, assert_codes_of, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL, SILU_RTOL

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
SWIGLU = "silu_and_mul"
# a huge negative gate: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def swiglu(mlp: Tensor) -> Tensor:
    gate, up = mlp.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def complete(mlp: Tensor, h: Tensor | None, up: Tensor | None) -> Tensor:
    """mlp + h upᵀ as linears add their adapters."""
    if h is None:
        return mlp.contiguous()
    return torch.addmm(mlp.flatten(0, 1), h.flatten(0, 1), up.t()).view(mlp.shape)


def gradient(mlp: Tensor, g: Tensor) -> Tensor:
    """Of mlp, by autograd in float64, for that of SwiGLU."""
    leaf = mlp.detach().double().requires_grad_()
    swiglu(leaf).backward(g.double())
    return leaf.grad


def whole(*shape: int) -> Tensor:
    """Small whole numbers, of which products and sums are exact in any order."""
    return torch.randint(-4, 5, shape).float()


def given(d: int, f: int, rank: int, dtype: torch.dtype = FP32, s: int = 7) -> tuple[Tensor | None, ...]:
    """attention [2, S, D], none where D is 0, mlp [2, S, 2·F] with an adapter of it: all slices."""
    attention, mlp = torch.randn(2, s, d + 16)[..., 16:].to(dtype), whole(2, s, 2 * f + 50)[..., 50:].to(dtype)
    h, up = whole(2, s, 3 * rank)[..., rank : 2 * rank].to(dtype), whole(2 * f, rank).to(dtype)
    return attention if d else None, None, mlp, None, h if rank else None, up if rank else None


def saved(x: Tensor, group: int, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    codes, scale, _ = quantize(x, fmt, per_group(group) if group else PER_TENSOR)
    return codes, scale


def kernel_of(op: Any) -> Any:
    return launcher_of(op._qualname)


@pytest.mark.parametrize("rank", [0, 24])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_the_operator_is_torchs_linear_silu_and_product(dtype: torch.dtype, rank: int) -> None:
    arguments = given(48, 65, rank, dtype)
    mlp = complete(arguments[2], *arguments[4:])
    values, codes, scale, *kept = mlp_activation(*arguments, "e5m2", "per_row", "e4m3", 32, dtype, SWIGLU)
    assert_bitwise(values, torch.cat([arguments[0], swiglu(mlp)], dim=-1))
    assert_codes_of(values, codes, scale, "e5m2", "per_row")
    assert_saved(arguments[0], *kept[:2], "e4m3", 32)
    assert_saved(mlp, *kept[2:], "e4m3", 32)


@pytest.mark.parametrize(
    "by", [pytest.param(lambda op: op, id="operator"), pytest.param(kernel_of, marks=pytest.mark.triton, id="kernel")]
)
@pytest.mark.parametrize("rank", [4, 24])
def test_halves_of_two_linears_have_adapters_of_their_own(rank: int, by: Any, device: torch.device) -> None:
    """Like one linear whose adapter has both ranks, with zeros where a half does not read."""
    attention, _, mlp, _, _, up = given(48, 96, rank)
    h, zeros = whole(2, 7, 3 * rank)[..., rank:], torch.zeros(96, rank)
    as_one = torch.cat([torch.cat([up[:96], zeros]), torch.cat([zeros, up[96:]])], dim=1)
    down, how = whole(8, 144), ("e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    for op, before, after in (
        (mlp_activation, (attention, None, mlp, None), ()),
        (mlp_activation_down, (attention, mlp), (down,)),
    ):
        one = by(op)(*moved((*before, h, up, *after), device), *how)
        other = by(op)(*moved((*before, h, as_one, *after), device), *how)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
        check_layout(op, (*before, h, up, *after, *how), one)
    casts = declarations["coat::mlp_activation"](
        mlp_activation(attention, None, mlp, None, h, up, *how), attention, None, mlp, None, h, up, *how
    )
    assert_bitwise(casts[-1].values, complete(mlp, h, as_one))


def test_the_gate_is_the_first_half() -> None:
    mlp = torch.tensor([0.0, 2.0, 3.0, 5.0]).view(1, 1, 4)
    values = mlp_activation(None, None, mlp, None, None, None, "none", "none", "none", 0, FP32, SWIGLU)[0]
    torch.testing.assert_close(values.flatten(), torch.tensor([0.0, 10 / (1 + torch.e**-2)]))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_backward_is_the_gradient(dtype: torch.dtype) -> None:
    mlp, grad = (3 * torch.randn(2, 7, 130)).to(dtype), torch.randn(2, 7, 100)[..., 35:]
    dh, down = torch.randn(2, 7, 4), torch.randn(4, 100)[:, 35:]
    found = mlp_activation_backward(grad, dh, down, mlp, None, 128, dtype, SWIGLU)
    torch.testing.assert_close(found, gradient(mlp, complete(grad, dh, down.t())).to(dtype))


def test_operators_by_values_and_codes_agree_with_what_they_are_made_of() -> None:
    codes, scale = saved(3 * torch.randn(2, 7, 130), 32)
    mlp, dh, down = dequantize(codes, scale, per_group(32), BF16), torch.randn(2, 7, 4), torch.randn(4, 65)
    attention = torch.randn(2, 7, 48).bfloat16()
    how = (None, None, "e4m3", "per_row", "none", 32, BF16, SWIGLU)
    values, *expected = mlp_activation(attention, None, mlp, None, *how)
    assert_bitwise(mlp_activation(attention, None, codes, scale, *how)[0], values)
    found = mlp_down_gradient(dh.bfloat16(), attention, None, codes, scale, 32, BF16, BF16, SWIGLU)
    assert_bitwise(found, dh.bfloat16().flatten(0, 1).t() @ values.flatten(0, 1))
    next_down = torch.randn(8, 113).bfloat16()
    h_next, *codes_of_values = mlp_activation_down(attention, mlp, None, None, next_down, *how[2:])
    assert_bitwise(h_next, torch.nn.functional.linear(values, next_down))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(codes_of_values, expected, strict=True))
    rope = ([torch.ones(16)] * 2, torch.randn(7, 16), torch.randn(7, 16), 1e-6)
    grads, y = [torch.randn(2, 7, 3, 16) for _ in range(3)], torch.randn(2, 7, 144)
    of_mlp = (torch.randn(2, 7, 65), dh, down, codes, scale, 32, BF16, SWIGLU)
    dy, dmlp = qkv_mlp_backward(grads, y, None, *rope, *of_mlp).split([144, 130], dim=-1)
    assert_bitwise(dmlp, mlp_activation_backward(*of_mlp))
    assert_bitwise(dy, qkv_rope_backward(grads, [y], [], *rope, 32, BF16)[0])


def test_what_is_cast_is_declared() -> None:
    arguments = (*given(48, 65, 4), "e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    out = mlp_activation(*arguments)
    casts = declarations["coat::mlp_activation"](out, *arguments)
    attention, mlp, (h, up) = arguments[0], complete(arguments[2], *arguments[4:6]), arguments[4:6]
    for cast, wanted in zip(casts, (out[0], attention, mlp), strict=True):
        assert_bitwise(cast.values, wanted)
    arguments = (attention, arguments[2], h, up, torch.randn(3, 113), *arguments[6:])
    casts = declarations["coat::mlp_activation_down"](mlp_activation_down(*arguments), *arguments)
    assert_bitwise(casts[0].values, out[0])


def test_operators_keep_torch_library_rules() -> None:
    attention, _, mlp, _, h, up = given(16, 24, 4)
    how = ("e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    check_operator(mlp_activation, (attention, None, mlp, None, h, up, *how))
    check_operator(mlp_activation_down, (attention, mlp, h, up, torch.randn(3, 40), *how))
    check_operator(mlp_activation_backward, (torch.randn(2, 7, 24), h, up.t()[:, :24], mlp, None, 16, BF16, SWIGLU))
    check_operator(mlp_down_gradient, (h, attention, None, *saved(mlp, 16), 16, FP32, BF16, SWIGLU))


def test_what_it_cannot_be_is_an_error() -> None:
    def call(mlp: Tensor, activation: str) -> Any:
        return mlp_activation(None, None, mlp, None, None, None, "none", "none", "none", 0, FP32, activation)

    with pytest.raises(ValueError, match=r"activation='relu': must be one of gelu_tanh, silu_and_mul"):
        call(torch.randn(1, 2, 16), "relu")
    with pytest.raises(ValueError, match=r"mlp of width 15: must be even"):
        call(torch.randn(1, 2, 15), SWIGLU)
    how = ("e4m3", "per_row", "none", 16, FP32, SWIGLU)
    with pytest.raises(ValueError, match=r"down of shape \(8, 16\): must have a column for each of 8 values"):
        mlp_activation_down(None, torch.randn(1, 2, 16), None, None, torch.randn(8, 16), *how)


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "by", [pytest.param(lambda op: op, id="operator"), pytest.param(kernel_of, marks=pytest.mark.triton, id="kernel")]
)
def test_silu_is_rounded_before_it_multiplies(by: Any, device: torch.device) -> None:
    """silu(0.5)·3 rounded once is 0.9336 in bf16; silu(0.5) alone becomes 0.3105 there."""
    mlp = torch.tensor([0.5, 3.0], dtype=BF16, device=device).view(1, 1, 2)
    values = by(mlp_activation)(None, None, mlp, None, None, None, "none", "none", "none", 0, BF16, SWIGLU)[0]
    assert values.item() == 0.9296875
    dh = torch.ones(1, 1, 1, device=device)
    assert by(mlp_down_gradient)(dh, None, None, mlp, None, 0, BF16, FP32, SWIGLU).item() == 0.9296875


def assert_swiglu(found: Tensor, mlp: Tensor) -> None:
    gate, up = mlp.cpu().double().chunk(2, dim=-1)
    assert bool(((found.cpu() - swiglu(mlp.cpu().double())).abs() <= SILU_RTOL * (gate * up).abs()).all())


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_kernel(kind: str, device: torch.device) -> None:
    for spec, (d, f, group, rank) in zip(
        SPECS[:3], ((48, 160, 16, 0), (0, 256, 256, 0), (130, 96, 32, 24)), strict=True
    ):
        attention, _, whole_mlp, _, h, up = moved(given(d, f, rank), device)
        mlp = whole_mlp if rank else 3 * rows_of_kind(kind, (2, 7, 2 * f)).to(device)
        attention = rows_of_kind(kind, (2, 7, d)).to(device) if d else None
        found = kernel_of(mlp_activation)(attention, None, mlp, None, h, up, *spec, "e5m2", group, FP32, SWIGLU)
        values, codes, scale, *kept = found
        if d:
            assert_bitwise(values[..., :d], attention)
            assert_saved(attention, *kept[:2], "e5m2", group)
        assert_swiglu(values[..., d:], complete(mlp, h, up))
        assert_codes_of(values, codes, scale, *spec)
        assert_saved(complete(mlp, h, up), *kept[2:], "e5m2", group)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("rank", "next_rank", "f", "group"), [(0, 4, 1088, 64), (4, 24, 96, 32), (24, 200, 96, 16)])
def test_down_projection_kernel(rank: int, next_rank: int, f: int, group: int, device: torch.device) -> None:
    attention, _, mlp, _, h, up = moved(given(48, f, rank, s=3), device)
    down, how = torch.randn(next_rank, 48 + f, device=device) / 16, ("e4m3", "per_row", "e5m2", group, FP32, SWIGLU)
    h_next, *found = kernel_of(mlp_activation_down)(attention, mlp, h, up, down, *how)
    values, *expected = kernel_of(mlp_activation)(attention, None, mlp, None, h, up, *how)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))
    assert_rows_close(h_next, values @ down.t(), KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_backward_kernel(kind: str, device: torch.device) -> None:
    for f, rank in ((160, 0), (100, 24)):
        mlp, grad = 3 * rows_of_kind(kind, (2, 7, 2 * f)), whole(2, 7, f + 40)[..., 40:]
        dh, down = (whole(2, 7, 3 * rank)[..., rank : 2 * rank], whole(rank, f + 40)[:, 40:]) if rank else (None, None)
        found = kernel_of(mlp_activation_backward)(*moved((grad, dh, down, mlp), device), None, 128, FP32, SWIGLU)
        g = complete(grad, dh, None if down is None else down.t())
        expected, g = gradient(mlp, g), g.abs()
        gate, up = mlp.abs().chunk(2, dim=-1)
        allowed = SILU_RTOL * torch.cat([g * up * (1 + gate), g * gate], dim=-1)
        assert bool(((found.cpu() - expected).abs() <= allowed).all())


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("group", [16, 128, 0], ids=["1x16", "1x128", "per tensor"])
def test_kernels_read_codes(group: int, device: torch.device) -> None:
    x, attention = torch.randn(2, 7, 512) * torch.logspace(-2, 2, 512), torch.randn(2, 7, 48)
    codes, grad, dh = saved(x, group), torch.randn(2, 7, 256), torch.randn(2, 7, 4)
    how = (group, FP32, SWIGLU)
    for op, arguments in (
        (mlp_activation, (attention, None, *codes, None, None, "none", "none", "none", *how)),
        (mlp_activation_backward, (grad, None, None, *codes, *how)),
        (mlp_down_gradient, (dh, attention, None, *codes, group, FP32, FP32, SWIGLU)),
    ):
        found, expected = kernel_of(op)(*moved(arguments, device)), reference(op, *arguments)
        found, expected = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
        for columns in range(0, expected.shape[-1], 76):  # so that small columns count
            part = slice(columns, columns + 76)
            assert_rows_close(found[..., part], expected[..., part], KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kernels_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    attention, _, mlp, _, h, up = (x if x is None else x / 4 for x in given(48, 96, 4, dtype))
    arguments, how = (attention, None, mlp, None, h, up), ("e4m3", "per_row", "none", 16, dtype, SWIGLU)
    values, codes, scale, *_ = kernel_of(mlp_activation)(*moved(arguments, device), *how)
    # three roundings, each to a neighbor that the interpreter's truncation may choose otherwise
    assert_rows_close(values, reference(mlp_activation, *arguments, *how)[0], 3 * BF16_ULP_RTOL)
    assert_codes_of(values, codes, scale, "e4m3", "per_row")
    arguments = (torch.randn(2, 7, 96).to(dtype), h, torch.randn(4, 96).to(dtype), mlp, None, 16, dtype, SWIGLU)
    found = kernel_of(mlp_activation_backward)(*moved(arguments, device))
    assert_rows_close(found, reference(mlp_activation_backward, *arguments), 2 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
def test_groups_across_the_halves_are_the_references(device: torch.device) -> None:
    attention, _, mlp, _, h, up = given(48, 65, 4)
    codes = saved(mlp, 16)
    how = ("e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    for op, arguments in (
        (mlp_activation, (attention, None, mlp, None, h, up, *how)),
        (mlp_activation_down, (attention, mlp, h, up, torch.randn(4, 113), *how)),
        (mlp_down_gradient, (h, attention, None, *codes, 16, FP32, FP32, SWIGLU)),
        (mlp_activation_backward, (torch.randn(2, 7, 65), None, None, *codes, 16, FP32, SWIGLU)),
    ):
        found = kernel_of(op)(*moved(arguments, device))
        check_layout(op, arguments, found)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, op(*arguments))), strict=True):
            assert_rows_close(a.float(), b.float(), KERNEL_ROW_RTOL)
