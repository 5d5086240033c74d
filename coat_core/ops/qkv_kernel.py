"""Adapters, QK-RMSNorm and rotary embedding between [q|k|v] of a linear and attention's q, k, v, and their gradient.

A program takes R tokens and, one after the other, HEADS heads of each of q, k and v, as far as k and v have so many: it
reads the angles once.

Shapes: y [B, S_i, (H + 2·H_kv)·d] of one stream, read as rows; q [B, S, H, d], k and v [B, S, H_kv, d] and their
gradients, of all streams; weight [d]; cos, sin [S, d] or [B, S, d].
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops import qkv as operators
from coat_core.ops.device import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    Codes,
    adapter,
    add_low_rank,
    load_saved,
    rstd_of,
    saved_groups,
    store_group_codes,
    warps,
    with_row_stride,
)
from coat_core.ops.dispatch import launcher
from coat_core.ops.gelu_kernel import launch_mlp_backward
from coat_core.ops.launch import empty_values, finished, launch, n_blocks, power_of_two
from coat_core.ops.quantize_kernel import quantize

HEADS = 2  # so few that the programs of 1536 tokens fill a large GPU evenly


@triton.jit
def _qkv_rope_fwd_kernel(
    y_ptr,
    y_scale_ptr,
    h_ptr,
    up_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    complete_ptr,
    codes_ptr,
    code_scale_ptr,
    y_stride,
    h_stride,
    scales_per_row,
    first,
    length,
    S,
    H,
    d,
    eps,
    DTYPE: tl.constexpr,
    OWN_ANGLES: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    G: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R tokens of an image's stream, the first at `first` of S, and HEADS heads a program; tile offsets fit 32 bits."""
    tiles = tl.cdiv(length, R)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    token = tl.program_id(0) % tiles * R
    position = first + token
    row, out_row = image * length + token, image * S + position
    rows, columns = tl.arange(0, R), tl.arange(0, BLOCK)
    are_rows, are_columns = rows < length - token, columns < d
    inside = are_rows[:, None] & are_columns[None, :]
    pairs = 2 * tl.arange(0, BLOCK // 2)
    angles = rows[:, None] * d + pairs[None, :] + position * d
    are_angles = are_rows[:, None] & (pairs < d)[None, :]
    if OWN_ANGLES:
        cos_ptr += image * S * d
        sin_ptr += image * S * d
    cos = tl.load(cos_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    y_ptr += row * y_stride
    if y_scale_ptr is not None:
        y_scale_ptr += row * scales_per_row
    if h_ptr is not None:
        h_ptr += row * h_stride
    H_kv = H // KV_GROUPS
    width = (H + 2 * H_kv) * d
    if complete_ptr is not None:
        complete_ptr += row * width
    if codes_ptr is not None:
        codes_ptr += row * width
        code_scale_ptr += row * (width // G)
    for part in tl.static_range(3):
        weight_ptr, out_ptr = ((q_weight_ptr, q_ptr), (k_weight_ptr, k_ptr), (None, v_ptr))[part]
        heads, first_head = ((H, 0), (H_kv, H), (H_kv, H + H_kv))[part]
        out_ptr += out_row * (heads * d)
        for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, heads)):
            start = (first_head + head) * d
            places = rows[:, None] * y_stride + columns[None, :]
            groups = rows[:, None] * scales_per_row + (start + columns[None, :]) // GROUP
            x = load_saved(y_ptr, y_scale_ptr, start + places, groups, inside, DTYPE)
            if h_ptr is not None:
                h_rows, up_rows = rows * h_stride, columns * RANK
                h_part, up_part = h_ptr + part * RANK, up_ptr + start * RANK
                x = add_low_rank(x, h_part, up_part, h_rows, up_rows, 1, are_rows, are_columns, RANK, RANK_BLOCK)
                x = x.to(DTYPE).to(tl.float32)
            if complete_ptr is not None:
                place = complete_ptr + start + rows[:, None] * width + columns[None, :]
                tl.store(place, x, mask=inside)
            end = start + d
            store_group_codes(x, codes_ptr, code_scale_ptr, rows, are_rows, start, end, width, FORMAT_MAX, G)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + columns, mask=are_columns, other=0.0).to(tl.float32)[None, :]
                rstd = rstd_of(tl.sum(x * x, axis=1), d, eps)[:, None]
                normed = (x * rstd * weight).to(DTYPE).to(tl.float32)
                a, b = tl.split(tl.reshape(normed, (R, BLOCK // 2, 2)))
                x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (R, BLOCK))
            place = out_ptr + rows[:, None] * (heads * d) + (head * d + columns)[None, :]
            tl.store(place, x, mask=inside)


@triton.jit
def _qkv_rope_bwd_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    y_ptr,
    y_scale_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dy_ptr,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    dv_stride_b,
    dv_stride_s,
    dv_stride_h,
    y_stride,
    dy_stride,
    scales_per_row,
    first,
    length,
    S,
    H,
    d,
    eps,
    DTYPE: tl.constexpr,
    OWN_ANGLES: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(length, R)
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    tokens = tile * R + tl.arange(0, R)[:, None]
    rows = image * length + tokens
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (tokens < length) & (columns < d)
    pairs = 2 * tl.arange(0, BLOCK // 2)[None, :]
    if OWN_ANGLES:
        cos_ptr += image * S * d
        sin_ptr += image * S * d
    angles = (first + tokens) * d + pairs
    are_angles = (tokens < length) & (pairs < d)
    cos = tl.load(cos_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    H_kv = H // KV_GROUPS
    q = q_weight_ptr, dq_ptr, dq_stride_b, dq_stride_s, dq_stride_h, 0
    k = k_weight_ptr, dk_ptr, dk_stride_b, dk_stride_s, dk_stride_h, H
    v = None, dv_ptr, dv_stride_b, dv_stride_s, dv_stride_h, H + H_kv
    for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, H)):
        for part in tl.static_range(3):
            weight_ptr, grad_ptr, stride_b, stride_s, stride_h, first_head = (q, k, v)[part]
            start = (first_head + head) * d
            mask = inside
            if KV_GROUPS > 1 and part > 0:
                mask = inside & (columns < (H_kv - head) * d)
            grad = grad_ptr + image * stride_b + (first + tokens).to(tl.int64) * stride_s + head * stride_h
            dx = tl.load(grad + columns, mask=mask, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                groups = rows * scales_per_row + (start + columns) // GROUP
                x = load_saved(y_ptr, y_scale_ptr, rows * y_stride + start + columns, groups, mask, DTYPE)
                weight = tl.load(weight_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(dx, (R, BLOCK // 2, 2)))
                weighted = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (R, BLOCK)) * weight
                rstd = rstd_of(tl.sum(x * x, axis=1), d, eps)[:, None]
                z = x * rstd
                dx = rstd * (weighted - z * tl.div_rn(tl.sum(weighted * z, axis=1), d * 1.0)[:, None])
            tl.store(dy_ptr + rows * dy_stride + start + columns, dx, mask=mask)


@launcher(operators.qkv_rope)
def qkv_rope(a: Any) -> list[Tensor]:
    images, _, width = a.ys[0].shape
    device, d = a.ys[0].device, a.weights[0].shape[0]
    of_k = width // d // (a.kv_groups + 2)
    heads = a.kv_groups * of_k
    tokens = sum(y.shape[1] for y in a.ys)
    qkv = [empty_values((images, tokens, count, d), a.dtype, device) for count in (heads, of_k, of_k)]
    cos, sin = a.cos.contiguous(), a.sin.contiguous()
    saves = a.saved_format != "none"
    fits = saves and d % a.group_size == 0
    saved: list[Tensor] = []
    first = 0
    for i, y in enumerate(a.ys):
        shape = y.shape
        codes = Codes(shape, device, a.saved_format if fits else "none", "per_group", a.group_size)
        complete = empty_values(shape, a.dtype, device) if saves and not fits else None
        y, y_stride = with_row_stride(y)
        h, h_stride, up, ranks = adapter(a.hs[i], a.ups[i]) if a.hs else adapter(None, None)
        scale, scales_per_row, group = saved_groups(a.y_scales[i] if a.y_scales else None, a.group_size, width)
        grid, options = _geometry(shape, heads, d)
        launch(
            _qkv_rope_fwd_kernel,
            grid,
            *(y, scale, h, up),
            *(a.weights[2 * i].contiguous(), a.weights[2 * i + 1].contiguous()),
            *(cos, sin, *qkv, complete, codes.codes, codes.scale),
            *(y_stride, h_stride, scales_per_row),
            *(first, shape[1], tokens, heads, d, a.eps),
            DTYPE=TL_DTYPES[a.dtype],
            OWN_ANGLES=cos.ndim == 3,
            KV_GROUPS=a.kv_groups,
            GROUP=group,
            FORMAT_MAX=codes.format_max,
            G=a.group_size,
            **ranks,
            **options,
            num_warps=warps(options["R"] * options["BLOCK"]),
        )
        first += shape[1]
        if complete is not None:  # heads that are no whole number of groups
            complete = finished(complete, a.dtype)
            saved += quantize(complete, a.saved_format, "per_group", a.group_size, None)
        elif saves:
            saved += codes.results()
    return [*(finished(x, a.dtype) for x in qkv), *saved]


@launcher(operators.qkv_rope_backward)
def qkv_rope_backward(a: Any) -> list[Tensor]:
    results, first = [], 0
    for i, y in enumerate(a.ys):
        dy = empty_values(y.shape, a.dtype, y.device)
        y_scale = a.y_scales[i] if a.y_scales else None
        _launch_backward(a, y, y_scale, a.weights[2 * i : 2 * i + 2], first, dy)
        results.append(finished(dy, a.dtype))
        first += y.shape[1]
    return results


@launcher(operators.qkv_mlp_backward)
def qkv_mlp_backward(a: Any) -> Tensor:
    width = a.y.shape[-1]
    dx = empty_values((*a.y.shape[:-1], width + a.mlp.shape[-1]), a.dtype, a.y.device)
    _launch_backward(a, a.y, a.y_scale, a.weights, 0, dx[..., :width])
    launch_mlp_backward(a, a.grad_mlp, dx[..., width:])
    return finished(dx, a.dtype)


def _launch_backward(a: Any, y: Tensor, y_scale: Tensor | None, weights: list[Tensor], first: int, dy: Tensor) -> None:
    """Write dy of one stream, whose tokens are `first` and the following ones of all."""
    dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in a.grads)
    shape, (heads, d) = y.shape, dq.shape[2:]
    y, y_stride = with_row_stride(y)
    scale, scales_per_row, group = saved_groups(y_scale, a.group_size, shape[-1])
    q_weight, k_weight = (weight.contiguous() for weight in weights)
    cos, sin = a.cos.contiguous(), a.sin.contiguous()
    grid, options = _geometry(shape, heads, d)
    launch(
        _qkv_rope_bwd_kernel,
        grid,
        *(dq, dk, dv, y, scale, q_weight, k_weight, cos, sin, dy),
        *(*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]),
        *(y_stride, dy.stride(1), scales_per_row),
        *(first, shape[1], cos.shape[-2], heads, d, a.eps),
        DTYPE=TL_DTYPES[a.dtype],
        GROUP=group,
        OWN_ANGLES=cos.ndim == 3,
        KV_GROUPS=heads // dk.shape[2],
        **options,
        num_warps=warps(2 * options["R"] * options["BLOCK"]),
    )


@functools.cache
def _geometry(shape: tuple[int, ...], heads: int, d: int) -> tuple[tuple[int, int], dict[str, int]]:
    tile = min(power_of_two(heads), HEADS)
    block = power_of_two(d)
    rows = LOW_RANK_ROWS
    options = {"HEADS": tile, "R": rows, "BLOCK": block, "num_stages": 1}
    return (shape[0] * n_blocks(shape[1], rows), n_blocks(heads, tile)), options
