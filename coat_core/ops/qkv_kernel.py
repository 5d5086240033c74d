"""Adapters, QK-RMSNorm and rotary embedding between [q|k|v] of a linear and attention's q, k, v, and their gradient.

A program takes R tokens and, one after the other, HEADS heads of each of q, k and v: it reads the angles once.

Shapes: y [B, S_i, 3·H·d] of one stream, read as rows; q, k, v and their gradients [B, S, H, d] of all streams; weight
[d]; cos, sin [S, d] or [B, S, d].
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.device import add_low_rank, load_saved, store_group_codes
from coat_core.ops.gelu_kernel import launch_mlp_backward
from coat_core.ops.launch import blocks, dot_operand, empty_values, finished, launch, power_of_two
from coat_core.ops.quantize_kernel import quantize
from coat_core.ops.rows import (
    LOW_RANK_ROWS,
    TL_DTYPES,
    GroupCodes,
    rank_options,
    saved_groups,
    warps,
    with_row_stride,
)

HEADS = 2  # so few that the programs of 1536 tokens fill a large GPU evenly


@triton.jit
def rstd_of(x, d, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=1), d * 1.0) + eps))[:, None]


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
    image, token = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * R
    row, out_row = image * length + token, image * S + first + token
    rows, columns = tl.arange(0, R), tl.arange(0, BLOCK)
    are_rows, are_columns = token + rows < length, columns < d
    inside = are_rows[:, None] & are_columns[None, :]
    pairs = 2 * tl.arange(0, BLOCK // 2)
    angles, are_angles = rows[:, None] * d + pairs[None, :], are_rows[:, None] & (pairs < d)[None, :]
    if OWN_ANGLES:
        cos_ptr += image * S * d
        sin_ptr += image * S * d
    cos = tl.load(cos_ptr + (first + token) * d + angles, mask=are_angles, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + (first + token) * d + angles, mask=are_angles, other=0.0).to(tl.float32)
    y_ptr += row * y_stride
    if y_scale_ptr is not None:
        y_scale_ptr += row * scales_per_row
    if h_ptr is not None:
        h_ptr += row * h_stride
    if complete_ptr is not None:
        complete_ptr += row * (3 * H * d)
    if codes_ptr is not None:
        codes_ptr += row * (3 * H * d)
        code_scale_ptr += row * (3 * H * d // G)
    for part in tl.static_range(3):
        weight_ptr, out_ptr = q_weight_ptr, q_ptr
        if part == 1:
            weight_ptr, out_ptr = k_weight_ptr, k_ptr
        elif part == 2:
            out_ptr = v_ptr
        for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, H)):
            start = (part * H + head) * d
            places = rows[:, None] * y_stride + columns[None, :]
            groups = rows[:, None] * scales_per_row + (start + columns[None, :]) // GROUP
            x = load_saved(y_ptr + start, y_scale_ptr, places, groups, inside, DTYPE)
            if h_ptr is not None:
                h_rows, up_rows = rows * h_stride, columns * RANK
                h_part, up_part = h_ptr + part * RANK, up_ptr + start * RANK
                x = add_low_rank(x, h_part, up_part, h_rows, up_rows, 1, are_rows, are_columns, RANK, RANK_BLOCK)
                x = x.to(DTYPE).to(tl.float32)
            if complete_ptr is not None:
                place = complete_ptr + start + rows[:, None] * (3 * H * d) + columns[None, :]
                tl.store(place, x.to(complete_ptr.dtype.element_ty), mask=inside)
            if codes_ptr is not None:
                end, width = start + d, 3 * H * d
                store_group_codes(
                    x, codes_ptr, code_scale_ptr, rows, are_rows, start, end, width, FORMAT_MAX, G, R, BLOCK
                )
            if part < 2:
                weight = tl.load(weight_ptr + columns, mask=are_columns, other=0.0).to(tl.float32)[None, :]
                normed = (x * rstd_of(x, d, eps) * weight).to(DTYPE).to(tl.float32)
                a, b = tl.split(tl.reshape(normed, (R, BLOCK // 2, 2)))
                x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (R, BLOCK))
            place = out_ptr + (out_row * H + head) * d + rows[:, None] * (H * d) + columns[None, :]
            tl.store(place, x.to(out_ptr.dtype.element_ty), mask=inside)


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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(length, R)
    image, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    tokens = tile * R + tl.arange(0, R)[:, None]
    rows = image * length + tokens
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (tokens < length) & (columns < d)
    pairs = 2 * tl.arange(0, BLOCK // 2)[None, :]
    if OWN_ANGLES:
        cos_ptr += image * S * d
        sin_ptr += image * S * d
    angles, are_angles = (first + tokens) * d + pairs, (tokens < length) & (pairs < d)
    cos = tl.load(cos_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=are_angles, other=0.0).to(tl.float32)
    for head in range(tl.program_id(1) * HEADS, tl.minimum(tl.program_id(1) * HEADS + HEADS, H)):
        for part in tl.static_range(3):
            start = (part * H + head) * d
            place = dy_ptr + rows * dy_stride + start + columns
            if part == 2:
                grad = dv_ptr + image * dv_stride_b + (first + tokens).to(tl.int64) * dv_stride_s + head * dv_stride_h
                dv = tl.load(grad + columns, mask=inside, other=0.0).to(tl.float32)
                tl.store(place, dv.to(dy_ptr.dtype.element_ty), mask=inside)
            else:
                weight_ptr, grad = q_weight_ptr, dq_ptr + image * dq_stride_b + head * dq_stride_h
                stride = dq_stride_s
                if part == 1:
                    weight_ptr, grad = k_weight_ptr, dk_ptr + image * dk_stride_b + head * dk_stride_h
                    stride = dk_stride_s
                g = tl.load(grad + (first + tokens).to(tl.int64) * stride + columns, mask=inside, other=0.0)
                g = g.to(tl.float32)
                groups = rows * scales_per_row + (start + columns) // GROUP
                x = load_saved(y_ptr, y_scale_ptr, rows * y_stride + start + columns, groups, inside, DTYPE)
                weight = tl.load(weight_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(g, (R, BLOCK // 2, 2)))
                weighted = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), (R, BLOCK)) * weight
                rstd = rstd_of(x, d, eps)
                z = x * rstd
                dx = rstd * (weighted - z * tl.div_rn(tl.sum(weighted * z, axis=1), d * 1.0)[:, None])
                tl.store(place, dx.to(dy_ptr.dtype.element_ty), mask=inside)


def qkv_rope(
    ys: list[Tensor],
    y_scales: list[Tensor],
    hs: list[Tensor],
    ups: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    saved_format: str,
    group_size: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    device, d = ys[0].device, weights[0].shape[0]
    tokens, width = sum(y.shape[1] for y in ys), ys[0].shape[-1]
    heads = width // 3 // d
    qkv = [empty_values((ys[0].shape[0], tokens, heads, d), dtype, device) for _ in range(3)]
    angles, first = (cos.contiguous(), sin.contiguous()), 0
    keeps = saved_format != "none"
    fits = keeps and d % group_size == 0
    saved: list[Tensor] = []
    for i, y in enumerate(ys):
        shape = tuple(y.shape)
        codes = GroupCodes(shape, saved_format if fits else "none", group_size, device)
        complete = empty_values(shape, dtype, device) if keeps and not fits else None
        y, y_stride = with_row_stride(y)
        h, h_stride = with_row_stride(dot_operand(hs[i])) if hs else (None, 0)
        up = dot_operand(ups[i]).contiguous() if ups else None
        scale, scales_per_row, group = saved_groups(y_scales[i] if y_scales else None, group_size, width)
        grid, options = _geometry(shape, heads, d)
        inputs = (y, scale, h, up, weights[2 * i].contiguous(), weights[2 * i + 1].contiguous(), *angles)
        sizes = (y_stride, h_stride, scales_per_row, first, shape[1], tokens, heads, d, eps)
        launch(
            _qkv_rope_fwd_kernel,
            grid,
            *inputs,
            *qkv,
            complete,
            codes.codes,
            codes.scale,
            *sizes,
            DTYPE=TL_DTYPES[dtype],
            OWN_ANGLES=cos.ndim == 3,
            GROUP=group,
            FORMAT_MAX=codes.format_max,
            G=group_size,
            **rank_options(up),
            **options,
        )
        first += shape[1]
        if complete is not None:  # heads that are no whole number of groups
            saved += quantize(finished(complete, dtype), saved_format, "per_group", group_size, None)
        elif keeps:
            saved += codes.results()
    return [*(finished(x, dtype) for x in qkv), *saved]


def qkv_rope_backward(
    grads: list[Tensor],
    ys: list[Tensor],
    y_scales: list[Tensor],
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    group_size: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    results, first = [], 0
    for i, y in enumerate(ys):
        dy, scale = empty_values(tuple(y.shape), dtype, y.device), y_scales[i] if y_scales else None
        _launch_backward(grads, y, scale, weights[2 * i : 2 * i + 2], cos, sin, eps, group_size, dtype, first, dy)
        results.append(finished(dy, dtype))
        first += y.shape[1]
    return results


def qkv_mlp_backward(
    grads: list[Tensor],
    y: Tensor,
    y_scale: Tensor | None,
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    grad_mlp: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    width = y.shape[-1]
    found = empty_values((*y.shape[:-1], width + mlp.shape[-1]), dtype, y.device)
    dy, dmlp = found[..., :width], found[..., width:]
    _launch_backward(grads, y, y_scale, weights, cos, sin, eps, group_size, dtype, 0, dy)
    launch_mlp_backward(grad_mlp, dh, down, mlp, mlp_scale, group_size, dtype, activation, dmlp)
    return finished(found, dtype)


def _launch_backward(
    grads: list[Tensor],
    y: Tensor,
    y_scale: Tensor | None,
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    group_size: int,
    dtype: torch.dtype,
    first: int,
    dy: Tensor,
) -> None:
    dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    shape, (heads, d) = tuple(y.shape), dq.shape[2:]
    y, y_stride = with_row_stride(y)
    scale, scales_per_row, group = saved_groups(y_scale, group_size, shape[-1])
    grid, options = _geometry(shape, heads, d)
    weights, angles = [weight.contiguous() for weight in weights], (cos.contiguous(), sin.contiguous())
    inputs = (dq, dk, dv, y, scale, *weights, *angles)
    strides = (*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], y_stride, dy.stride(1), scales_per_row)
    launch(
        _qkv_rope_bwd_kernel,
        grid,
        *inputs,
        dy,
        *strides,
        *(first, shape[1], cos.shape[-2], heads, d, eps),
        DTYPE=TL_DTYPES[dtype],
        GROUP=group,
        OWN_ANGLES=cos.ndim == 3,
        **options,
    )


@functools.cache
def _geometry(shape: tuple[int, ...], heads: int, d: int) -> tuple[tuple[int, int], dict[str, int]]:
    tile, block, rows = min(power_of_two(heads), HEADS), power_of_two(d), LOW_RANK_ROWS
    options = {"HEADS": tile, "R": rows, "BLOCK": block, "num_warps": warps(2 * rows * block), "num_stages": 1}
    return (shape[0] * blocks(shape[1], rows), blocks(heads, tile)), options
