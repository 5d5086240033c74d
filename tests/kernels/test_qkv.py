"""From the linears' [q|k|v] to attention's q, k, v and back: operators, and their Triton kernels against them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from coat_core.casts import declarations
from coat_core.granularity import PER_TENSOR, per_group
from coat_core.ops.qkv import qkv_mlp_backward, qkv_rope, qkv_rope_backward
from coat_core.quantize import dequantize, quantize
from tests.helpers.asserts import assert_bitwise, assert_sqnr
from tests.helpers.operators import moved, reference
from tests.helpers.rows import FLOOR, assert_casts, assert_follows, assert_rows_close, kernel_of, rows, turned
from tests.tolerances import BF16_ULP_RTOL, KERNEL_ROW_RTOL

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
        if not self.hs:
            return [y.contiguous() for y in self.ys]
        complete = []
        for y, h, up in zip(self.ys, self.hs, self.ups, strict=True):
            thirds = zip(y.chunk(3, -1), h.chunk(3, -1), up.chunk(3), strict=True)
            parts = [torch.addmm(a.flatten(0, 1), b.flatten(0, 1), c.t()) for a, b, c in thirds]
            complete.append(torch.cat(parts, dim=-1).view(y.shape))
        return complete


def streams(
    lengths: tuple[int, ...], heads: int = 3, d: int = 16, rank: int = 0, dtype: torch.dtype = FP32, hard: bool = True
) -> Streams:
    """Two images' streams of these lengths; unless hard y in small whole numbers, with exact sums in any order."""

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape).to(dtype)

    width = 3 * heads * d
    ys = [rows((2, s, width)).to(dtype) if hard else numbers(2, s, width + 8)[..., :width] for s in lengths]
    hs = [numbers(2, s, 3 * rank + 8)[..., 8:] for s in lengths] if rank else []
    ups = [numbers(width, rank) for _ in lengths] if rank else []
    angles = torch.randn(sum(lengths), d // 2).repeat_interleave(2, dim=1)
    return Streams(ys, hs, ups, [torch.randn(d).to(dtype) for _ in 2 * lengths], angles.cos(), angles.sin())


def forward_arguments(x: Streams, saved: str = "none", group: int = 16) -> tuple[Any, ...]:
    return x.ys, [], x.hs, x.ups, x.weights, x.cos, x.sin, EPS, saved, group, x.ys[0].dtype


def attention_inputs(ys: list[Tensor], x: Streams) -> list[Tensor]:
    """q, k, v as FLUX's attention makes them of complete [q|k|v], by torch and diffusers."""
    parts: list[list[Tensor]] = [[], [], []]
    start, d = 0, x.weights[0].shape[0]
    for i, y in enumerate(ys):
        angles = (x.cos[start : start + y.shape[1]], x.sin[start : start + y.shape[1]])
        start += y.shape[1]
        for part, (third, made) in enumerate(zip(y.chunk(3, dim=-1), parts, strict=True)):
            heads = third.unflatten(-1, (-1, d))
            if part < 2:
                heads = torch.nn.functional.rms_norm(heads, (d,), x.weights[2 * i + part].to(y.dtype), EPS)
                heads = apply_rotary_emb(heads, angles, sequence_dim=1)
            made.append(heads)
    return [torch.cat(part, dim=1) for part in parts]


@pytest.mark.parametrize("rank", [0, 24])
@pytest.mark.parametrize("lengths", [(7,), (3, 5)], ids=["one stream", "two"])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16])
def test_qkv_rope_has_the_bits_of_linear_norm_and_rotary(rank, lengths, dtype):
    x = streams(lengths, rank=rank, dtype=dtype)
    arguments = forward_arguments(x, "e4m3", 32)
    with torch.autocast("cpu", BF16, enabled=dtype != FP16):  # which torch's own cat does not take there
        out = qkv_rope(*arguments)
    complete = x.adapted()
    for found, expected in zip(out[:3], attention_inputs(complete, x), strict=True):
        assert found.is_contiguous()
        assert_bitwise(found, expected.contiguous())
    assert_casts(qkv_rope, out, arguments, *complete)
    casts = declarations["coat::qkv_rope"](out, *arguments)
    assert [(cast.kind, cast.granularity) for cast in casts] == [(None, per_group(32))] * len(lengths)
    nothing_saved = qkv_rope(*forward_arguments(x))
    assert len(nothing_saved) == 3
    assert declarations["coat::qkv_rope"](nothing_saved, *forward_arguments(x)) == ()


@pytest.mark.parametrize("group", [16, 64])
def test_qkv_rope_from_codes_is_that_of_the_values_they_stand_for(group):
    x = streams((3, 5), dtype=BF16)
    codes, scales, _ = zip(*(quantize(y, "e5m2", per_group(group)) for y in x.ys), strict=True)
    values = [dequantize(*pair, per_group(group), BF16) for pair in zip(codes, scales, strict=True)]
    rest = (x.weights, x.cos, x.sin, EPS)
    grads = [torch.randn(2, 8, 3, 16) for _ in range(3)]
    of_codes = qkv_rope([*codes], [*scales], [], [], *rest, "none", group, BF16)
    of_values = qkv_rope(values, [], [], [], *rest, "none", group, BF16)
    of_codes += qkv_rope_backward(grads, [*codes], [*scales], *rest, group, BF16)
    of_values += qkv_rope_backward(grads, values, [], *rest, group, BF16)
    for a, b in zip(of_codes, of_values, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lengths", [(7,), (3, 5)], ids=["one stream", "two"])
def test_qkv_rope_backward_is_the_gradient(lengths, dtype):
    x = streams(lengths, dtype=dtype)
    x = x._replace(ys=[torch.randn(2, s, 176)[..., :144].to(dtype) for s in lengths])
    grads = [torch.randn(2, 3, sum(lengths), 16).transpose(1, 2) for _ in range(3)]  # as attention returns them
    leaves = [y.double().requires_grad_() for y in x.ys]
    expected = torch.autograd.grad(attention_inputs(leaves, x), leaves, [grad.double() for grad in grads])
    found = qkv_rope_backward(grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 128, dtype)
    for y, dy, wanted in zip(x.ys, found, expected, strict=True):
        assert (dy.dtype, dy.shape, dy.is_contiguous()) == (dtype, y.shape, True)
        assert_sqnr(wanted, dy, FLOOR[dtype])


@pytest.mark.parametrize("by", [lambda op: op, pytest.param(kernel_of, marks=pytest.mark.triton)])
@pytest.mark.parametrize("of_k", [1, 2])
def test_grouped_heads_are_those_of_k_and_v_repeated(by, of_k, device):
    x = streams((3, 5), 2 * of_k, hard=False)  # as wide as 4·of_k heads of q and of_k of k and of v
    ys, *rest = moved([x.ys, x.weights, x.cos, x.sin], device)
    repeated = []
    for y in ys:
        q, k, v = y.unflatten(-1, (-1, 16)).split((4 * of_k, of_k, of_k), dim=2)
        repeated.append(torch.cat([q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2)], dim=2).flatten(2))
    grouped = by(qkv_rope)(ys, [], [], [], *rest, EPS, "none", 16, FP32, 4)
    grads = [torch.randn(part.shape, device=device) for part in grouped]
    q, *others = by(qkv_rope)(repeated, [], [], [], *rest, EPS, "none", 16, FP32)
    for part, expected in zip(grouped, (q, *(other[:, :, ::4] for other in others)), strict=True):
        assert_bitwise(part, expected.contiguous())
    found = by(qkv_rope_backward)(grads, ys, [], *rest, EPS, 16, FP32)
    grads[1:] = [grad.repeat_interleave(4, 2) for grad in grads[1:]]
    for dy, expected in zip(found, by(qkv_rope_backward)(grads, repeated, [], *rest, EPS, 16, FP32), strict=True):
        dq, *others = expected.unflatten(-1, (3, -1, 16)).unbind(2)
        assert_bitwise(dy, torch.cat([dq, *(other[:, :, ::4] for other in others)], dim=2).flatten(2))


def with_own_angles(x: Streams, image: int | None = None) -> Streams:
    """Both images at positions of their own; or one of the two."""
    cos, sin = torch.stack([x.cos, x.sin]), torch.stack([x.sin, -x.cos])
    if image is None:
        return x._replace(cos=cos, sin=sin)
    of = slice(image, image + 1)
    return x._replace(ys=[y[of] for y in x.ys], hs=[h[of] for h in x.hs], cos=cos[image], sin=sin[image])


@pytest.mark.parametrize("by", [lambda op: op, pytest.param(kernel_of, marks=pytest.mark.triton)])
def test_images_may_have_angles_of_their_own(by, device):
    """Each image then gets what it gets alone."""
    x = streams((3, 5), 2, rank=4, hard=False)
    x, grads = moved(x, device), [torch.randn(2, 8, 2, 16, device=device) for _ in range(3)]

    def both_ways(x: Streams, grads: list[Tensor]) -> list[Tensor]:
        backward = by(qkv_rope_backward)(grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 16, FP32)
        return [*by(qkv_rope)(*forward_arguments(x)), *backward]

    together = both_ways(with_own_angles(x), grads)
    for image in range(2):
        of = slice(image, image + 1)
        for wanted, found in zip(both_ways(with_own_angles(x, image), [g[of] for g in grads]), together, strict=True):
            assert_bitwise(found[of], wanted)


# -- kernels: interpreted on a CPU ------------------------------------------------------------------------------------
@pytest.mark.triton
@pytest.mark.parametrize(
    ("s", "heads", "d", "form", "group"),
    [
        (18, 3, 16, "e4m3", 16),
        (2, 2, 48, "e5m2", 16),
        (2, 3, 24, "e5m2", 32),  # groups that reach over heads
        (2, 1, 128, "e4m3", 128),
        (2, 1, 2, "e4m3", 16),
    ],
)
def test_qkv_rope_kernels_without_adapters(s, heads, d, form, group, device):
    x = streams((3, s), heads, d)
    arguments = forward_arguments(x, form, group)
    _, _, v, *_ = assert_follows(qkv_rope, arguments, device)
    assert_bitwise(v.cpu(), reference(qkv_rope, *arguments)[2])
    grads = [torch.randn(2, heads, 3 + s, d).transpose(1, 2), torch.randn(2, 3 + s, heads, d)]
    grads.append(torch.randn(2, 3 + s, d, heads).transpose(2, 3))  # neighbours apart
    arguments = (grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 16, FP32)
    for dy, wanted in zip(
        kernel_of(qkv_rope_backward)(*moved(arguments, device)), qkv_rope_backward(*arguments), strict=True
    ):
        found, wanted = (part.cpu().unflatten(-1, (3, heads, d)) for part in (dy, wanted))
        assert dy.is_contiguous()
        assert_rows_close(found, wanted, KERNEL_ROW_RTOL)
        assert_bitwise(found[:, :, 2], wanted[:, :, 2])


def calls() -> Iterator[tuple[Any, tuple[Any, ...], float]]:
    """With adapters, in half precision and of codes; and how far of a row results may be from the references'."""
    for rank in (1, 24, 72):
        x = streams((3, 5) if rank > 1 else (1,), 2, rank=rank, hard=False)
        yield qkv_rope, forward_arguments(x, "e4m3", 16), KERNEL_ROW_RTOL
        mlp = (turned(2, x.cos.shape[0], 34), None, None, turned(2, x.cos.shape[0], 34), None, 16, FP32)
        grads = [torch.randn(2, 2, x.cos.shape[0], 16).transpose(1, 2) for _ in range(3)]
        norm = (x.weights[:2], x.cos, x.sin, EPS)
        yield qkv_mlp_backward, (grads, torch.cat(x.ys, dim=1), None, *norm, *mlp), 2 * KERNEL_ROW_RTOL
    for dtype in (BF16, FP16):
        x = streams((3, 5), 2, rank=4, dtype=dtype, hard=False)
        # three roundings, each to a neighbour that the interpreter's truncation may choose otherwise
        yield qkv_rope, forward_arguments(x, "e4m3", 16), 3 * BF16_ULP_RTOL
        grads = [torch.randn(2, 8, 2, 16).to(dtype) for _ in range(3)]
        yield qkv_rope_backward, (grads, x.ys, [], x.weights, x.cos, x.sin, EPS, 16, dtype), BF16_ULP_RTOL
    for granularity in (per_group(16), per_group(64), PER_TENSOR):  # groups in a head, over heads
        x = streams((3, 5))
        kept = [quantize(y, "e4m3", granularity) for y in x.ys]
        codes = ([k.codes for k in kept], [k.scale for k in kept])
        norm, group = (x.weights, x.cos, x.sin, EPS), granularity.group_size
        yield qkv_rope, (*codes, [], [], *norm, "none", group, FP32), KERNEL_ROW_RTOL
        grads = [torch.randn(2, 8, 3, 16) for _ in range(3)]
        yield qkv_rope_backward, (grads, *codes, *norm, group, FP32), KERNEL_ROW_RTOL


@pytest.mark.triton
def test_kernels_follow_the_references(device):
    for op, args, rtol in calls():
        results = assert_follows(op, args, device, rtol)
        if op is qkv_rope and args[2] and rtol == KERNEL_ROW_RTOL:  # v with its adapter, in whole numbers
            assert_bitwise(results[2].cpu(), reference(op, *args)[2])


@pytest.mark.triton
@pytest.mark.parametrize("rank", [0, 4])
def test_qkv_mlp_backward_kernels_write_one_tensor(rank, device):
    x = streams((20,))
    grads = [torch.randn(2, 3, 20, 16).transpose(1, 2) for _ in range(3)]
    adapter = (torch.randn(2, 20, rank), torch.randn(rank, 348)[:, 48:]) if rank else (None, None)
    mlp = (torch.randn(2, 20, 348)[..., 48:], *adapter, torch.randn(2, 20, 300), None, 16, FP32)
    arguments = (grads, x.ys[0], None, x.weights, x.cos, x.sin, EPS, *mlp)
    found, expected = kernel_of(qkv_mlp_backward)(*moved(arguments, device)), reference(qkv_mlp_backward, *arguments)
    assert found.is_contiguous()
    for part, wanted in zip(found.split([96, 48, 300], -1), expected.split([96, 48, 300], -1), strict=True):
        assert_rows_close(part, wanted, KERNEL_ROW_RTOL)
