"""The gradient of an MLP's activation, with the adapter of the linear that reads it.

Shapes: grad [B, S, F], mlp [B, S, N], each read as rows; N is F, and 2·F of SwiGLU (GATED).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.ops.device import add_low_rank, load_saved, rounded
from coat_core.ops.gelu import activated_width
from coat_core.ops.gelu_kernel import LOW_RANK_BLOCK, gate_of_gelu, sigmoid
from coat_core.ops.launch import blocks, dot_operand, empty_values, finished, launch, power_of_two
from coat_core.ops.rows import LOW_RANK_ROWS, TL_DTYPES, rank_options, saved_groups, warps, with_row_stride


@triton.jit
def _mlp_activation_bwd_kernel(
    grad_ptr,
    dh_ptr,
    down_ptr,
    mlp_ptr,
    mlp_scale_ptr,
    dmlp_ptr,
    grad_stride,
    dh_stride,
    down_stride,
    mlp_stride,
    dmlp_stride,
    scales_per_row,
    total,
    F,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of R rows a program."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    in_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    are_rows, columns = rows < total, in_row[None, :]
    inside = are_rows[:, None] & (columns < F)
    g = tl.load(grad_ptr + rows[:, None] * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if dh_ptr is not None:
        g = add_low_rank(
            g, dh_ptr, down_ptr, rows * dh_stride, in_row, down_stride, are_rows, in_row < F, RANK, RANK_BLOCK
        )
        g = rounded(g, grad_ptr)
    groups = rows[:, None] * scales_per_row + columns // GROUP
    x = load_saved(mlp_ptr, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
    x = x.to(DTYPE).to(tl.float32)
    place = dmlp_ptr + rows[:, None] * dmlp_stride + columns
    if GATED:
        s, groups = sigmoid(x), rows[:, None] * scales_per_row + (F + columns) // GROUP
        up = load_saved(mlp_ptr + F, mlp_scale_ptr, rows[:, None] * mlp_stride + columns, groups, inside, DTYPE)
        up = up.to(DTYPE).to(tl.float32)
        tl.store(place + F, (g * (x * s)).to(dmlp_ptr.dtype.element_ty), mask=inside)
        dmlp = g * up * (s * (1.0 + x * (1.0 - s)))
    else:
        s = gate_of_gelu(x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        dmlp = g * (s + x * (s * (1.0 - s)) * slope)
    tl.store(place, dmlp.to(dmlp_ptr.dtype.element_ty), mask=inside)


def mlp_activation_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str = "gelu_tanh",
) -> Tensor:
    """Launcher of `coat::mlp_activation_backward`."""
    dmlp = empty_values(tuple(mlp.shape), dtype, mlp.device)
    launch_mlp_backward(grad, dh, down, mlp, mlp_scale, group_size, dtype, activation, dmlp)
    return finished(dmlp, dtype)


def launch_mlp_backward(
    grad: Tensor,
    dh: Tensor | None,
    down: Tensor | None,
    mlp: Tensor,
    mlp_scale: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    activation: str,
    dmlp: Tensor,
) -> None:
    """Write the result of `coat::mlp_activation_backward` to dmlp [B, S, N], rows at an even stride."""
    n, f = mlp.shape[-1], activated_width(mlp, activation)
    (grad, grad_stride), (mlp, mlp_stride) = with_row_stride(grad), with_row_stride(mlp)
    dh, dh_stride = (None, 0) if dh is None else with_row_stride(dot_operand(dh))
    down, down_stride = (None, 0) if down is None else with_row_stride(dot_operand(down))
    mlp_scale, scales_per_row, group = saved_groups(mlp_scale, group_size, n)
    rows, block = mlp.numel() // n, min(power_of_two(f), LOW_RANK_BLOCK)
    launch(
        _mlp_activation_bwd_kernel,
        (blocks(rows, LOW_RANK_ROWS), blocks(f, block)),
        grad,
        dh,
        down,
        mlp,
        mlp_scale,
        dmlp,
        grad_stride,
        dh_stride,
        down_stride,
        mlp_stride,
        dmlp.stride(-2),
        scales_per_row,
        rows,
        f,
        DTYPE=TL_DTYPES[dtype],
        GATED=n > f,
        GROUP=group,
        **rank_options(down, dim=0),
        R=LOW_RANK_ROWS,
        BLOCK=block,
        num_warps=warps(LOW_RANK_ROWS * block),
    )
