"""From the linears' [q|k|v] to attention's q, k, v and back: operators, and their Triton kernels against them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.ops.gelu import mlp_activation_backward
from coat_core.ops.qkv import qkv_mlp_backward, qkv_rope, qkv_rope_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import moved, reference
from tests.helpers.rows import FLOOR, KINDS, assert_rows_close, assert_saved, rows_of_kind
from tests.tolerances import (
    BF16_ULP_RTOL,
    KERNEL_ROW_RTOL,
)

with suppress(ImportError):  # without triton
    from coat_core.ops import qkv_kernel as kernels

EPS = 1e-6
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


class Streams(NamedTuple):
    """One or two streams of tokens, as the operators take them."""

    ys: list[Tensor]
    hs: list[Tensor]
    ups: list[Tensor]
    weights: list[Tensor]
    cos: Tensor
    sin: Tensor

    def adapted(self) -> list[Tensor]:
        """Complete [q|k|v] of each stream, by the linears' own arithmetic."""
        found = []
        for y, h, up in zip(self.ys, self.hs or [None] * 2, self.ups or [None] * 2, strict=False):
            y = y.contiguous().clone()
            for part in range(3) if h is not None else ():
                third, r = y.shape[-1] // 3, up.shape[1]
                rows = y.view(-1, y.shape[-1])[:, part * third : (part + 1) * third].clone()
                rows.addmm_(h.flatten(0, 1)[:, part * r : (part + 1) * r], up[part * third : (part + 1) * third].t())
                y[..., part * third : (part + 1) * third] = rows.view(*y.shape[:-1], third)
            found.append(y)
        return found


def streams(
    lengths: tuple[int, ...],
    heads: int,
    d: int,
    rank: int = 0,
    dtype: torch.dtype = FP32,
    device: torch.device | None = None,
    *,
    wider: int = 0,
    images: int = 2,
    whole: bool = False,
    kind: str = "plain",
) -> Streams:
    """Streams of these lengths.

    Args:
        lengths: tokens of each.
        heads: H.
        d: of a head.
        rank: of the adapters; 0 has none.
        dtype: of all but the angles.
        device: the CPU where None.
        wider: columns after each row of y, and before each of h.
        images: B.
        whole: small whole numbers, of which products and sums are exact in any order.
        kind: of y, see `rows_of_kind`.
    """

    def numbers(*shape: int) -> Tensor:
        found = torch.randint(-4, 5, shape).float() if whole else torch.randn(shape)
        return found.to(device, dtype)

    def rows(tokens: int) -> Tensor:
        if kind != "plain":
            return rows_of_kind(kind, (images, tokens, width)).to(device, dtype)
        return numbers(images, tokens, width + wider)[..., :width]

    width, both = 3 * heads * d, range(len(lengths))
    angles = torch.randn(sum(lengths), d // 2).repeat_interleave(2, dim=1)
    return Streams(
        [rows(s) for s in lengths],
        [numbers(images, s, 3 * rank + wider)[..., wider:] for s in lengths] if rank else [],
        [numbers(width, rank) for _ in both] if rank else [],
        [torch.randn(d).to(device, dtype) for _ in 2 * lengths],
        angles.cos().to(device),
        angles.sin().to(device),
    )


def forward_arguments(x: Streams, saved: str = "none", group: int = 16) -> tuple[Any, ...]:
    return x.ys, [], x.hs, x.ups, x.weights, x.cos, x.sin, EPS, saved, group, x.ys[0].dtype


def attention_inputs(ys: list[Tensor], x: Streams) -> list[Tensor]:
    """q, k, v as FLUX's attention makes them of complete [q|k|v], by torch and diffusers."""
    parts: list[list[Tensor]] = [[], [], []]
    start, d = 0, x.weights[0].shape[0]
    for i, y in enumerate(ys):
        angles = (x.cos[start : start + y.shape[1]], x.sin[start : start + y.shape[1]])
        start += y.shape[1]
        for part, (third, found) in enumerate(zip(y.chunk(3, dim=-1), parts, strict=True)):
            heads = third.unflatten(-1, (-1, d))
            if part < 2:
                heads = torch.nn.functional.rms_norm(heads, (d,), x.weights[2 * i + part].to(y.dtype), EPS)
                heads = apply_rotary_emb(heads, tuple(table.to(FP32) for table in angles), sequence_dim=1)
            found.append(heads)
    return [torch.cat(part, dim=1) for part in parts]


@pytest.mark.parametrize("rank", [0, 1, 24])
@pytest.mark.parametrize("lengths", [(7,), (3, 5)], ids=["one stream", "two"])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_qkv_rope_has_the_bits_of_linear_norm_and_rotary(
    rank: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    for kind in KINDS:
        x = streams(lengths, 3, 16, rank, dtype, wider=32, kind=kind)
        q, k, v, *saved = qkv_rope(*forward_arguments(x, "e4m3", 32))
        complete = x.adapted()
        for found, expected in zip((q, k, v), attention_inputs(complete, x), strict=True):
            assert found.is_contiguous()
            assert_bitwise(found, expected.contiguous())
        for y, codes, scale in zip(complete, saved[::2], saved[1::2], strict=True):
            assert_saved(y, codes, scale, "e4m3", 32)
    assert len(qkv_rope(*forward_arguments(x))) == 3


@pytest.mark.parametrize("group", [16, 64])
def test_qkv_rope_from_codes_is_that_of_the_values_they_stand_for(group: int) -> None:
    x = streams((3, 5), 3, 16, dtype=BF16)
    kept = [quantize(y, "e5m2", per_group(group)) for y in x.ys]
    values = [dequantize(codes, scale, per_group(group), BF16) for codes, scale, _ in kept]
    rest = (x.weights, x.cos, x.sin, EPS)
    found = qkv_rope([k.codes for k in kept], [k.scale for k in kept], [], [], *rest, "none", group, BF16)
    for a, b in zip(found, qkv_rope(values, [], [], [], *rest, "none", group, BF16), strict=True):
        assert_bitwise(a, b)
    grads = [torch.randn(2, 8, 3, 16) for _ in range(3)]
    found = qkv_rope_backward(grads, [k.codes for k in kept], [k.scale for k in kept], *rest, group, BF16)
    for a, b in zip(found, qkv_rope_backward(grads, values, [], *rest, group, BF16), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lengths", [(7,), (3, 5)], ids=["one stream", "two"])
def test_qkv_rope_backward_is_the_gradient(lengths: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    x = streams(lengths, 3, 16, dtype=dtype, wider=32, kind=kind)
    grads = [torch.randn(2, 3, sum(lengths), 16).transpose(1, 2) for _ in range(3)]  # as attention returns them
    leaves = [y.double().requires_grad_() for y in x.ys]
    outputs = attention_inputs(leaves, x)
    expected = torch.autograd.grad(outputs, leaves, [grad.double() for grad in grads])
    found = qkv_rope_backward(grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 128, dtype)
    for y, dy, wanted in zip(x.ys, found, expected, strict=True):
        assert (dy.dtype, dy.shape, dy.is_contiguous()) == (dtype, y.shape, True)
        assert_sqnr(wanted, dy, FLOOR[dtype])


def with_own_angles(x: Streams, image: int | None = None) -> Streams:
    """Both images at positions of their own; or one of the two."""
    cos, sin = torch.stack([x.cos, x.sin]), torch.stack([x.sin, -x.cos])
    if image is None:
        return x._replace(cos=cos, sin=sin)
    of = slice(image, image + 1)
    return x._replace(ys=[y[of] for y in x.ys], hs=[h[of] for h in x.hs], cos=cos[image], sin=sin[image])


@pytest.mark.parametrize(
    "by", [pytest.param(0, id="operators"), pytest.param(1, marks=pytest.mark.triton, id="kernels")]
)
def test_images_may_have_angles_of_their_own(by: int, device: torch.device) -> None:
    """Each image then gets what it gets alone."""
    from coat_core.ops.dispatch import launcher_of

    forward, backward = (launcher_of(op._qualname) if by else op for op in (qkv_rope, qkv_rope_backward))
    x = streams((3, 5), 2, 16, rank=4, device=device, whole=True)
    grads = [torch.randn(2, 8, 2, 16, device=device) for _ in range(3)]
    found = forward(*forward_arguments(with_own_angles(x)))
    rest = (x.weights, *with_own_angles(x)[4:], EPS, 16, FP32)
    dys = backward(grads, x.ys, [], *rest)
    for image in range(2):
        alone, of = with_own_angles(x, image), slice(image, image + 1)
        for wanted, got in zip(forward(*forward_arguments(alone)), found, strict=True):
            assert_bitwise(got[of], wanted)
        rest = (alone.weights, alone.cos, alone.sin, EPS, 16, FP32)
        for wanted, got in zip(backward([grad[of] for grad in grads], alone.ys, [], *rest), dys, strict=True):
            assert_bitwise(got[of], wanted)


def mlp_arguments(s: int, f: int, rank: int, dtype: torch.dtype = FP32) -> tuple[Any, ...]:
    """grad_mlp, dh, down and mlp, as `qkv_mlp_backward` takes them."""
    adapter = (torch.randn(2, s, rank, dtype=dtype), torch.randn(rank, f + 48, dtype=dtype)[:, 48:])
    grad = torch.randn(2, s, f + 48, dtype=dtype)[..., 48:]
    return grad, *(adapter if rank else (None, None)), torch.randn(2, s, f)


def test_qkv_mlp_backward_is_both_side_by_side() -> None:
    x = streams((7,), 3, 16, wider=96)
    grads, mlp = [torch.randn(2, 7, 3, 16) for _ in range(3)], mlp_arguments(7, 96, 4)
    rest = (x.weights, x.cos, x.sin, EPS)
    found = qkv_mlp_backward(grads, x.ys[0], None, *rest, *mlp, None, 16, FP32)
    (dy,) = qkv_rope_backward(grads, x.ys, [], *rest, 16, FP32)
    assert_bitwise(found, torch.cat([dy, mlp_activation_backward(*mlp, None, 16, FP32)], dim=-1))


def test_autocast_changes_nothing() -> None:
    x = streams((3, 5), 3, 16, rank=4)
    plain = qkv_rope(*forward_arguments(x))
    with torch.autocast("cpu", BF16):
        cast = qkv_rope(*forward_arguments(x))
    for expected, found in zip(plain, cast, strict=True):
        assert_bitwise(found, expected)


def test_what_is_kept_is_declared() -> None:
    x = streams((3, 5), 3, 16, rank=4)
    arguments = forward_arguments(x, "e4m3", 16)
    out = qkv_rope(*arguments)
    casts = declarations["coat::qkv_rope"](out, *arguments)
    for cast, y, codes in zip(casts, x.adapted(), out[3::2], strict=True):
        assert (cast.kind, cast.codes is codes, cast.granularity) == (None, True, per_group(16))
        assert_bitwise(cast.values, y)
    assert declarations["coat::qkv_rope"](out[:3], *forward_arguments(x)) == ()


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("kind", "heads", "d", "form", "group"),
    [
        *((kind, 3, 16, "e4m3", 16) for kind in KINDS),
        ("plain", 2, 48, "e5m2", 16),
        ("plain", 5, 64, "e4m3", 32),
        ("outlier", 3, 24, "e5m2", 32),  # groups that reach over heads
        ("plain", 1, 16, "e4m3", 128),
        ("plain", 3, 128, "e4m3", 128),
        ("plain", 1, 2, "e4m3", 16),
    ],
)
def test_qkv_rope_kernels_without_adapters(
    kind: str, heads: int, d: int, form: str, group: int, device: torch.device
) -> None:
    x = streams((3, 20), heads, d, device=device, kind=kind)
    q, k, v, *saved = kernels.qkv_rope(*forward_arguments(x, form, group))
    expected = reference(qkv_rope, *forward_arguments(x))
    for found, wanted in zip((q, k), expected, strict=False):
        assert found.is_contiguous()
        assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
    assert_bitwise(v.cpu(), expected[2])
    for y, codes, scale in zip(x.ys, saved[::2], saved[1::2], strict=True):
        assert_saved(y, codes, scale, form, group)
    grads = [torch.randn(2, heads, 23, d, device=device).transpose(1, 2) for _ in range(3)]
    grads[1] = grads[1].contiguous()
    grads[2] = torch.randn(2, 23, d, heads, device=device).transpose(2, 3)  # neighbours apart
    arguments = (grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 16, FP32)
    for dy, wanted in zip(kernels.qkv_rope_backward(*arguments), reference(qkv_rope_backward, *arguments), strict=True):
        found, wanted = (part.unflatten(-1, (3, heads, d)) for part in (dy, wanted))
        assert dy.is_contiguous()
        assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
        assert_bitwise(found[:, :, 2].cpu(), wanted[:, :, 2])


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [1, 4, 16, 24, 64, 72, 128])
def test_qkv_rope_kernel_adds_the_adapters(rank: int, device: torch.device) -> None:
    x = streams((3, 20), 3, 16, rank, device=device, wider=8, whole=True)
    q, k, v, *saved = kernels.qkv_rope(*forward_arguments(x, "e4m3", 16))
    complete = x.adapted()
    expected = attention_inputs(complete, x)
    assert_rows_close(q, expected[0], KERNEL_ROW_RTOL)
    assert_rows_close(k, expected[1], KERNEL_ROW_RTOL)
    assert_bitwise(v, expected[2].contiguous())
    for y, codes, scale in zip(complete, saved[::2], saved[1::2], strict=True):
        assert_saved(y, codes, scale, "e4m3", 16)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_qkv_rope_kernels_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    x = streams((3, 20), 3, 16, 4, dtype, device, wider=32)
    q, k, v, *saved = kernels.qkv_rope(*forward_arguments(x, "e4m3", 16))
    for found, wanted in zip((q, k, v), reference(qkv_rope, *forward_arguments(x)), strict=True):
        # three roundings, each to a neighbour that the interpreter's truncation may choose otherwise
        assert_rows_close(found, wanted, 3 * BF16_ULP_RTOL)
    for part, codes, scale in zip(v.split((3, 20), dim=1), saved[::2], saved[1::2], strict=True):
        assert_saved(part.flatten(2), codes[..., 96:].contiguous(), scale[..., 6:].contiguous(), "e4m3", 16)
    grads = [torch.randn(2, 23, 3, 16, device=device).to(dtype) for _ in range(3)]
    arguments = (grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 16, dtype)
    for dy, wanted in zip(kernels.qkv_rope_backward(*arguments), reference(qkv_rope_backward, *arguments), strict=True):
        assert_rows_close(dy.unflatten(-1, (9, 16)), wanted.unflatten(-1, (9, 16)), BF16_ULP_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("group", [16, 64, 0], ids=["groups in a head", "groups over heads", "per tensor"])
def test_qkv_rope_kernels_read_codes(group: int, device: torch.device) -> None:
    x = streams((3, 20), 3, 16)
    granularity = per_group(group) if group else PER_TENSOR
    kept = [quantize(y, "e4m3", granularity) for y in x.ys]
    values = [dequantize(codes, scale, granularity, FP32) for codes, scale, _ in kept]
    rest = moved([x.weights, x.cos, x.sin], device)
    codes, scales = moved([k.codes for k in kept], device), moved([k.scale for k in kept], device)
    expected = qkv_rope(values, [], [], [], x.weights, x.cos, x.sin, EPS, "none", 16, FP32)
    for found, wanted in zip(
        kernels.qkv_rope(codes, scales, [], [], *rest, EPS, "none", group or 16, FP32), expected, strict=True
    ):
        assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
    grads = [torch.randn(2, 23, 3, 16) for _ in range(3)]
    expected = qkv_rope_backward(grads, values, [], x.weights, x.cos, x.sin, EPS, 16, FP32)
    found = kernels.qkv_rope_backward(moved(grads, device), codes, scales, *rest, EPS, group or 16, FP32)
    for dy, wanted in zip(found, expected, strict=True):
        assert_rows_close(dy, wanted, KERNEL_ROW_RTOL)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rank", [0, 4])
def test_qkv_mlp_backward_kernels_write_one_tensor(rank: int, device: torch.device) -> None:
    x = streams((20,), 3, 16, device=device, wider=96)
    grads = [torch.randn(2, 3, 20, 16, device=device).transpose(1, 2) for _ in range(3)]
    rest = (x.weights, x.cos, x.sin, EPS, *moved(mlp_arguments(20, 300, rank), device), None, 16, FP32)
    expected = reference(qkv_mlp_backward, grads, x.ys[0], None, *rest)
    found = kernels.qkv_mlp_backward(grads, x.ys[0], None, *rest)
    assert found.is_contiguous()
    for part, wanted in zip(found.split([96, 48, 300], -1), expected.split([96, 48, 300], -1), strict=True):
        assert_rows_close(part, wanted, KERNEL_ROW_RTOL)
