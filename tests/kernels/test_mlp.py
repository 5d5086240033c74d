"""The activation of an MLP, GELU or SwiGLU: every operator that computes it, and their kernels, against torch."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.ops.gelu import mlp_activation, mlp_activation_backward, mlp_activation_down, mlp_down_gradient
from coat_core.ops.qkv import qkv_mlp_backward, qkv_rope_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise
from tests.helpers.operators import bits, check_layout, moved, reference
from tests.helpers.rows import SPECS, assert_casts, assert_follows, assert_rows_close, kernel_of, rows
from tests.tolerances import BF16_ULP_RTOL, GELU_RELATIVE_RTOL, GELU_RTOL, KERNEL_ROW_RTOL, SILU_RTOL

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
GELU, SWIGLU = "gelu_tanh", "silu_and_mul"
ACTIVATIONS = [GELU, SWIGLU]
NOTHING_SAVED = ("none", "none", "none")
# a huge negative x: exp overflows to inf, and sigmoid is 0 as it should be
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
operator_and_kernel = pytest.mark.parametrize(
    "by", [pytest.param(lambda op: op, id="operator"), pytest.param(kernel_of, marks=pytest.mark.triton, id="kernel")]
)


def act(x: Tensor, activation: str) -> Tensor:
    if activation == GELU:
        return torch.nn.functional.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def columns(f: int, activation: str) -> int:
    """N of mlp."""
    return 2 * f if activation == SWIGLU else f


def whole(*shape: int) -> Tensor:
    """Small whole numbers, of which products and sums are exact in any order."""
    return torch.randint(-4, 5, shape).float()


def complete(mlp: Tensor, h: Tensor | None, up: Tensor | None) -> Tensor:
    """mlp + h upᵀ as linears add their adapters."""
    if h is None:
        return mlp.contiguous()
    return torch.addmm(mlp.flatten(0, 1), h.flatten(0, 1), up.t()).view(mlp.shape)


def given(
    activation: str, d: int, f: int, rank: int, dtype: torch.dtype = FP32, s: int = 7
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """attention [2, S, D], None where D is 0, mlp [2, S, N], and its adapter: all slices."""
    n = columns(f, activation)
    attention, mlp = torch.randn(2, s, d + 16)[..., 16:].to(dtype), whole(2, s, n + 50)[..., 50:].to(dtype)
    h, up = whole(2, s, 3 * rank)[..., rank : 2 * rank].to(dtype), whole(n, rank).to(dtype)
    return attention if d else None, mlp, h if rank else None, up if rank else None


def saved(x: Tensor, group: int, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Codes and scale of groups, or of all where the group is 0."""
    codes, scale, _ = quantize(x, fmt, per_group(group) if group else PER_TENSOR)
    return codes, scale


def gradient(mlp: Tensor, g: Tensor, activation: str) -> Tensor:
    """Of mlp, by autograd in float64."""
    leaf = mlp.detach().double().requires_grad_()
    act(leaf, activation).backward(g.double())
    return leaf.grad


def assert_values(found: Tensor, mlp: Tensor, activation: str) -> None:
    """Assert act(mlp) within the kernel's tolerance."""
    mlp = mlp.double()
    allowed = GELU_RTOL * mlp.abs()
    if activation == SWIGLU:
        gate, up = mlp.chunk(2, dim=-1)
        allowed = SILU_RTOL * (gate * up).abs()
    assert bool(((found.cpu() - act(mlp, activation)).abs() <= allowed).all())


def assert_equal(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert_bitwise(bits(a), bits(b))


@pytest.mark.parametrize("rank", [0, 24])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_operators_are_torchs_linear_and_activation(activation, dtype, rank):
    _, _, h, up = given(activation, 48, 65, rank, dtype)
    attention, mlp = rows((2, 7, 48)).to(dtype), (3 * rows((2, 7, columns(65, activation)))).to(dtype)
    how = ("e5m2", "per_row", "e4m3", 32, dtype, activation)
    values, *codes = results = mlp_activation(attention, mlp, h, up, *how)
    assert_bitwise(values, torch.cat([attention, act(complete(mlp, h, up), activation)], dim=-1))
    whole_mlp = complete(mlp, h, up)
    down = torch.randn(8, 121).to(dtype)[:, 8:]
    h_next, *next_codes = next_results = mlp_activation_down(attention, mlp, h, up, down, *how)
    assert_bitwise(h_next, torch.nn.functional.linear(values, down))
    assert_equal(next_codes, codes)
    for op, found, after in ((mlp_activation, results, ()), (mlp_activation_down, next_results, (down,))):
        arguments = (attention, mlp, h, up, *after, *how)
        assert_casts(op, found, arguments, values, attention, whole_mlp)
        assert [cast.kind for cast in declarations[op._qualname](found, *arguments)] == ["input", None, None]
    alone = mlp_activation(None, mlp, h, up, *NOTHING_SAVED, 32, dtype, activation)
    assert_bitwise(alone[0], values[..., 48:].contiguous())
    assert all(x.shape == (0,) for x in alone[1:])
    nothing = (None, mlp, h, up, *NOTHING_SAVED, 32, dtype, activation)
    assert declarations["coat::mlp_activation"](alone, *nothing) == ()


@pytest.mark.parametrize("group", [16, 256])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_from_codes_all_are_those_of_the_values_they_stand_for(activation, group):
    n = columns(65, activation)
    attention, mlp = saved(torch.randn(2, 7, 48), group, "e5m2"), saved(3 * torch.randn(2, 7, n), group, "e5m2")
    values = [dequantize(*x, per_group(group), BF16) for x in (attention, mlp)]
    of_all = mlp_activation(*values, None, None, *NOTHING_SAVED, group, BF16, activation)[0]
    grad, dh, down = torch.randn(2, 7, 65), torch.randn(2, 7, 12).bfloat16()[..., 8:], torch.randn(4, 65)
    backward = (grad, dh.float(), down)
    dmlp = mlp_activation_backward(*backward, *mlp, group, BF16, activation)
    assert_bitwise(dmlp, mlp_activation_backward(*backward, values[1], None, group, BF16, activation))
    for dtype_down in (FP32, BF16):
        product = mlp_down_gradient(dh, *attention, *mlp, group, BF16, dtype_down, activation)
        assert_bitwise(product, (dh.flatten(0, 1).t() @ of_all.flatten(0, 1)).to(dtype_down))
        alone = mlp_down_gradient(dh, None, None, values[1], None, group, BF16, dtype_down, activation)
        assert_bitwise(alone, (dh.flatten(0, 1).t() @ of_all[..., 48:].flatten(0, 1)).to(dtype_down))
    rope = ([torch.ones(16)] * 2, torch.randn(7, 16), torch.randn(7, 16), 1e-6)
    grads, y = [torch.randn(2, 7, 3, 16) for _ in range(3)], torch.randn(2, 7, 144)
    both = qkv_mlp_backward(grads, y, None, *rope, *backward, *mlp, group, BF16, activation)
    assert_bitwise(both, torch.cat([*qkv_rope_backward(grads, [y], [], *rope, group, BF16), dmlp], dim=-1))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_is_the_gradient(activation, dtype, rank):
    mlp, grad = 3 * rows((2, 7, columns(65, activation))).to(dtype), torch.randn(2, 7, 100)[..., 35:]
    dh, down = (torch.randn(2, 7, 4), torch.randn(4, 100)[:, 35:]) if rank else (None, None)
    found = mlp_activation_backward(grad, dh, down, mlp, None, 128, dtype, activation)
    g = complete(grad, dh, None if down is None else down.t())
    torch.testing.assert_close(found, gradient(mlp, g, activation).to(dtype))


@operator_and_kernel
def test_half_precision_is_rounded_where_torch_rounds(by, device):
    """257 is between two numbers of bf16; silu(0.5)·3 rounded once is 0.9336, silu(0.5) alone becomes 0.3105 there."""
    y, h = torch.full((1, 1, 16), 256.0, dtype=BF16, device=device), torch.ones(1, 1, 2, dtype=BF16, device=device)
    matrix = torch.full((16, 2), 0.5, dtype=BF16, device=device)
    saved_scale = by(mlp_activation)(None, y, h, matrix, "none", "none", "e4m3", 16, BF16)[-1]
    assert saved_scale.item() * 448 == pytest.approx(256)
    flat = torch.full((1, 1, 16), 50.0, device=device)  # GELU' is 1
    found = by(mlp_activation_backward)(y, h, matrix.t().contiguous(), flat, None, 128, FP32)
    assert found.unique().tolist() == [256.0]
    mlp = torch.tensor([0.5, 3.0], dtype=BF16, device=device).view(1, 1, 2)
    values = by(mlp_activation)(None, mlp, None, None, *NOTHING_SAVED, 0, BF16, SWIGLU)[0]
    assert values.item() == 0.9296875
    one, x = torch.ones(1, 1, 1, device=device), torch.full((1, 1, 1), 257.0, device=device)
    assert by(mlp_down_gradient)(one, None, None, mlp, None, 0, BF16, FP32, SWIGLU).item() == 0.9296875
    assert by(mlp_down_gradient)(one, x, None, x, None, 16, BF16, FP32).tolist() == [[256.0, 256.0]]


@operator_and_kernel
@pytest.mark.parametrize("rank", [4, 24])
def test_halves_of_two_linears_have_adapters_of_their_own(rank, by, device):
    """Like one linear whose adapter has both ranks, with zeros where a half does not read."""
    attention, mlp, _, up = given(SWIGLU, 48, 96, rank)
    h, zeros = whole(2, 7, 3 * rank)[..., rank:], torch.zeros(96, rank)
    as_one = torch.cat([torch.cat([up[:96], zeros]), torch.cat([zeros, up[96:]])], dim=1)
    down, how = whole(8, 144), ("e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    for op, after in ((mlp_activation, ()), (mlp_activation_down, (down,))):
        one = by(op)(*moved((attention, mlp, h, up, *after), device), *how)
        assert_equal(one, by(op)(*moved((attention, mlp, h, as_one, *after), device), *how))
        check_layout(op, (attention, mlp, h, up, *after, *how), one)
    arguments = (attention, mlp, h, up, *how)
    casts = declarations["coat::mlp_activation"](mlp_activation(*arguments), *arguments)
    assert_bitwise(casts[-1].values, complete(mlp, h, as_one))


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------
@pytest.mark.triton
@pytest.mark.parametrize(
    "case",
    [
        (GELU, 0, SPECS[0], "dense", 0, 160, 16),
        *((activation, 0, SPECS[1], "slice", 130, 512, 256) for activation in ACTIVATIONS),
        *((activation, 0, SPECS[2], "strided", 48, 160, 16) for activation in ACTIVATIONS),
        (SWIGLU, 0, SPECS[4], "dense", 0, 160, 32),
        *((GELU, rank, SPECS[1], "", 48, 160, 32) for rank in (1, 72)),
        (GELU, 4, SPECS[3], "", 48, 160, 32),
        (SWIGLU, 24, SPECS[1], "", 48, 160, 32),
        (GELU, 4, SPECS[5], "", 256, 512, 32),
        (SWIGLU, 0, SPECS[5], "slice", 0, 320, 16),
    ],
    ids=str,
)
def test_kernel(case, device):
    activation, rank, spec, layout, d, f, group = case
    attention, mlp, h, up = given(activation, d, f, rank, s=19 if rank == 1 else 7)
    if not rank:
        attention, mlp = rows((2, 4, d), layout) if d else None, 3 * rows((2, 4, columns(f, activation)), layout)
    arguments = (attention, mlp, h, up, *spec, "e5m2", group, FP32, activation)
    values = assert_follows(mlp_activation, arguments, device)[0]
    if d:
        assert_bitwise(values[..., :d].cpu(), attention.contiguous())
    assert_values(values[..., -f:], complete(mlp, h, up), activation)


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "rank"), [(BF16, 4), (FP16, 0)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_in_half_precision(activation, dtype, rank, device):
    inputs = [x if x is None else x / 4 for x in given(activation, 48, 96, rank, dtype)]
    arguments = (*inputs, "e4m3", "per_row" if rank else "per_tensor", "none", 16, dtype, activation)
    # two or three roundings, each to a neighbour that the interpreter's truncation may choose otherwise
    assert_follows(mlp_activation, arguments, device, 3 * BF16_ULP_RTOL)
    dh, down = (inputs[2], torch.randn(rank, 96).to(dtype)) if rank else (None, None)
    backward = (torch.randn(2, 7, 96).to(dtype), dh, down, inputs[1], None, 16, dtype, activation)
    assert_follows(mlp_activation_backward, backward, device, 2 * BF16_ULP_RTOL)


@pytest.mark.triton
def test_gelu_keeps_its_relative_precision_at_negative_x(device):
    x = torch.linspace(-5.0, 5.0, 1000, device=device).view(1, 1, -1)
    cubic = (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    found = kernel_of(mlp_activation)(None, x, None, None, *NOTHING_SAVED, 16, FP32)[0].double()
    torch.testing.assert_close(found, x * torch.sigmoid(2 * cubic), rtol=GELU_RELATIVE_RTOL, atol=0)


@pytest.mark.gpu
@pytest.mark.triton
def test_kernels_match_the_reference_in_bf16():
    mlp, grad = 3 * torch.randn(2, 64, 12288, device="cuda").bfloat16(), torch.randn(2, 64, 12288, device="cuda")
    attention = torch.randn(2, 64, 3072, device="cuda").bfloat16()
    values = kernel_of(mlp_activation)(attention, mlp, None, None, "e4m3", "per_row", "none", 128, BF16)[0]
    expected = torch.cat([attention, act(mlp.double(), GELU).to(BF16)], dim=-1)
    torch.testing.assert_close(values, expected, rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 15)
    dmlp = kernel_of(mlp_activation_backward)(grad, None, None, mlp, None, 128, BF16)
    torch.testing.assert_close(dmlp, gradient(mlp, grad, GELU).to(BF16), rtol=BF16_ULP_RTOL, atol=GELU_RTOL * 100)


@pytest.mark.triton
@pytest.mark.parametrize("group", [16, 256, 0], ids=["1x16", "wider than a row", "per tensor"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_read_codes(activation, group, device):
    n = columns(128 if group == 256 else 256, activation)
    mlp = saved(torch.randn(2, 7, n) * torch.logspace(-2, 2, n), group)
    attention = saved(torch.randn(2, 7, 48), group)
    grad, dh = torch.randn(2, 7, n if activation == GELU else n // 2), torch.randn(2, 7, 4)
    for op, arguments in (
        (mlp_activation_backward, (grad, None, None, *mlp, group, FP32, activation)),
        (mlp_down_gradient, (dh, *attention, *mlp, group, FP32, FP32, activation)),
    ):
        assert_stretches_close(kernel_of(op)(*moved(arguments, device)), reference(op, *arguments))


def assert_stretches_close(found: Tensor, expected: Tensor, rtol: float = KERNEL_ROW_RTOL) -> None:
    """`assert_rows_close` of some columns after the others, so that small ones count."""
    for start in range(0, expected.shape[-1], 76):
        assert_rows_close(found[..., start : start + 76], expected[..., start : start + 76], rtol)


@operator_and_kernel
def test_the_gelus_gradient_is_finite_for_huge_values(by):
    mlp = torch.tensor([[[1e15, 100.0, -100.0, -1e5]]])
    dmlp = by(mlp_activation_backward)(torch.ones_like(mlp), None, None, mlp, None, 128, FP32)
    assert dmlp.flatten().tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-20)


@pytest.mark.triton
@pytest.mark.parametrize(("s", "f", "rank", "layout"), [(7, 200, 0, "strided"), (19, 100, 72, "slice")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_kernel(activation, s, f, rank, layout, device):
    mlp, grad = 3 * rows((2, s, columns(f, activation)), layout), whole(2, s, f + 40)[..., 40:]
    dh, down = (whole(2, s, 3 * rank)[..., rank : 2 * rank], whole(rank, f + 40)[:, 40:]) if rank else (None, None)
    arguments = moved((grad, dh, down, mlp), device)
    dmlp = kernel_of(mlp_activation_backward)(*arguments, None, 128, FP32, activation).cpu()
    assert dmlp.is_contiguous()
    g = complete(grad, dh, None if down is None else down.t())
    allowed = GELU_RTOL * g.abs() * (1 + mlp.abs()) if activation == GELU else None
    if activation == SWIGLU:
        gate, up = mlp.abs().chunk(2, dim=-1)
        allowed = SILU_RTOL * torch.cat([g.abs() * up * (1 + gate), g.abs() * gate], dim=-1)
    assert bool(((dmlp - gradient(mlp, g, activation)).abs() <= allowed).all())


@pytest.mark.triton
@pytest.mark.parametrize(
    "case",
    [
        (0, 8, SPECS[2], 2, 130, 1100, 256, FP32, GELU),  # several stretches
        (0, 8, SPECS[3], 33, 0, 130, 32, FP32, GELU),
        (1, 20, SPECS[1], 19, 48, 130, 32, FP32, GELU),
        (72, 1, SPECS[1], 3, 48, 130, 32, FP32, GELU),
        (4, 4, SPECS[4], 3, 1100, 130, 128, FP32, GELU),
        (0, 4, SPECS[1], 3, 48, 1088, 64, FP32, SWIGLU),
        (24, 40, SPECS[1], 3, 48, 96, 16, FP32, SWIGLU),
        (4, 200, SPECS[1], 7, 48, 130, 16, BF16, GELU),
        (4, 8, SPECS[5], 19, 256, 2048, 32, BF16, GELU),
        (4, 72, SPECS[5], 7, 256, 512, 32, BF16, GELU),
        (0, 4, SPECS[5], 3, 64, 256, 64, BF16, SWIGLU),  # blocks of 64
    ],
    ids=str,
)
def test_down_projection_kernel(case, device):
    """Codes are those of `mlp_activation`'s launcher, and the product that of its values, rounded once."""
    rank, next_rank, spec, s, d, f, group, dtype, activation = case
    attention, mlp, h, up = given(activation, d, f, rank, dtype, s)
    if dtype != FP32:
        mlp, up = mlp + 0.25, None if up is None else 50 * up  # sums that have to be rounded
    elif not rank:
        attention, mlp = rows((2, s, d)) if d else None, 3 * rows((2, s, columns(f, activation)))
    down, how = (torch.randn(next_rank, d + f + 8) / 16).to(dtype)[:, 8:], (*spec, "e5m2", group, dtype, activation)
    inputs = moved((attention, mlp, h, up), device)
    h_next, *found = kernel_of(mlp_activation_down)(*inputs, down.to(device), *how)
    values, *expected = kernel_of(mlp_activation)(*inputs, *how)
    assert_equal(found, expected)
    values, down = values.cpu().double(), down.double()
    exact, magnitudes = values @ down.t(), values.abs() @ down.abs().t()
    rounding = BF16_ULP_RTOL if dtype != FP32 else 0.0
    off = (h_next.cpu().double() - exact).abs()
    assert bool((off <= KERNEL_ROW_RTOL * magnitudes + rounding * exact.abs()).all())


@pytest.mark.triton
def test_groups_across_the_halves_are_the_references(device):
    attention, mlp, h, up = given(SWIGLU, 48, 65, 4)
    codes, how = saved(mlp, 16), ("e4m3", "per_row", "e4m3", 16, FP32, SWIGLU)
    rotated = (*given(GELU, 48, 80, 4), torch.randn(4, 128), "int8", "per_row", "e4m3", 16, FP32)
    for op, arguments in (
        (mlp_activation_down, rotated),  # attention ends within a block of the rotation
        (mlp_activation, (attention, mlp, h, up, *how)),
        (mlp_activation_down, (attention, mlp, h, up, torch.randn(4, 113), *how)),
        (mlp_down_gradient, (h, attention, None, *codes, 16, FP32, FP32, SWIGLU)),
        (mlp_activation_backward, (torch.randn(2, 7, 65), None, None, *codes, 16, FP32, SWIGLU)),
    ):
        found = kernel_of(op)(*moved(arguments, device))
        check_layout(op, arguments, found)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, op(*arguments))), strict=True):
            assert_rows_close(a.float(), b.float(), KERNEL_ROW_RTOL)


# -- the gradient of a down-projection
def assert_gradient(arguments: tuple[Any, ...], device: torch.device) -> None:
    """Assert the launcher's result to be the reference's, but for values that the interpreter truncates."""
    found = kernel_of(mlp_down_gradient)(*moved(arguments, device))
    assert found.is_contiguous()
    # on the CPU the reference multiplies in half precision
    expected = reference(mlp_down_gradient, arguments[0].float(), *arguments[1:])
    assert_stretches_close(found, expected, KERNEL_ROW_RTOL if arguments[6] == FP32 else 2 * BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("shares", "case"),
    [
        (3, (1, 48, 200, 0, FP32)),
        (1, (24, 0, 70, 128, FP32)),
        (3, (40, 70, 65, 16, FP32)),
        (1, (16, 48, 130, 64, BF16)),
    ],
    ids=str,
)
def test_down_gradient_kernel(shares, case, device, monkeypatch):
    """Of ranks and groups, 0: of values; with the rows shared among so many programs."""
    rank, d, f, group, dtype = case
    kernels = pytest.importorskip("coat_core.ops.gelu_kernel")
    monkeypatch.setattr(kernels, "_shared", lambda rows, *_: (shares, -(-rows // (32 * shares))))
    dh, mlp = torch.randn(2, 49, 2 * rank + 3).to(dtype)[..., -rank:], (3 * torch.randn(2, 49, f)).to(dtype)
    attention = torch.randn(2, 49, d).to(dtype) if d else None
    pairs = [saved(x, group) if group and x is not None else (x, None) for x in (attention, mlp)]
    assert_gradient((dh, *pairs[0], *pairs[1], group, dtype, dtype), device)


@pytest.mark.triton
@pytest.mark.parametrize("width", [20, 300])
def test_down_gradient_kernel_reads_codes_of_every_granularity(width, device):
    x = torch.randn(2, 7, width) * torch.logspace(-3, 3, width)  # a scale of another group would show
    dh = torch.randn(2, 7, 4)
    for fmt, group in (("e4m3", 16), ("e5m2", 32), ("e4m3", 64), ("e5m2", 256)):
        pair = saved(x, group, fmt)
        assert_gradient((dh, *pair, *pair, group, FP32, FP32), device)
    pair = quantize(x, "e5m2", PER_TENSOR)[:2]
    assert_gradient((dh, *pair, *pair, 16, FP32, FP32), device)


def test_shares_of_rows():
    shared = pytest.importorskip("coat_core.ops.gelu_kernel")._shared
    for s, rank, programs in itertools.product((0, 1, 64, 512, 1536, 4608, 70000), (1, 16, 128), (1, 192, 240, 999)):
        count, rounds = shared(s, rank, programs)
        assert (count - 1) * rounds * 32 < max(s, 1) <= max(count * rounds * 32, 1)
        assert count == 1 or (count * programs <= 512 and s // count >= 64 * rank - 32)
    assert shared(4608, 16, 240)[0] == 2
    assert shared(4096, 16, 192)[0] == 2
