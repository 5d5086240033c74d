"""The INT8 GEMM: y = (a · a_scale)(b · b_scale)ᵀ + bias, as the operator `coat::int8_mm`.

Shapes: a [M, K], b [N, K], a_scale [M, 1], b_scale [] or [N, 1], bias [N], result [M, N].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from coat_core.casts import declares
from coat_core.ops.dispatch import run_by_triton
from coat_core.ops.operators import operator
from coat_core.ops.scaled_mm import ALIGNMENT, check_shapes, declared_product, product_like, why_refused

FEWEST_ROWS = 17  # that torch's product takes on CUDA


@operator("coat::int8_mm")
def int8_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    forward: bool = False,
) -> Tensor:
    """Return (a · a_scale)(b · b_scale)ᵀ + bias in `out_dtype`; this body is the reference.

    Args:
        a: INT8 [M, K].
        a_scale: fp32 [M, 1].
        b: INT8 [N, K] at any strides.
        b_scale: fp32 [] or [N, 1].
        bias: floating [N] or None.
        out_dtype: bf16, fp16 or fp32.
        forward: a is the input of a linear, and not a gradient.

    Returns:
        Tensor [M, N] of `out_dtype`.

    Raises:
        ValueError: shapes that do not fit, or K or N not a multiple of 16.

    Numerics: sums are exact in int32 up to K = 133,144; then fp32, each product and the bias rounded, then `out_dtype`.
    """
    check_shapes(a, a_scale, b, b_scale, bias)
    padded = a
    if a.is_cuda and len(a) < FEWEST_ROWS:
        padded = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_ROWS - len(a)))
    product = torch._int_mm(padded, b.t())[: len(a)].to(torch.float32) * a_scale * b_scale.reshape(-1)
    if bias is not None:
        product = product + bias.to(torch.float32)
    return product.to(out_dtype, copy=True)


int8_mm.register_fake(product_like)
declares(int8_mm)(declared_product)


@functools.cache
def unsupported_reason(device: torch.device) -> str | None:
    """Return why this device cannot multiply INT8, or None where it can; the answer comes from multiplying once."""

    def multiply_once() -> None:
        a, scale = torch.zeros(ALIGNMENT, ALIGNMENT, dtype=torch.int8, device=device), torch.ones((), device=device)
        int8_mm(a, scale.expand(ALIGNMENT, 1).contiguous(), a, scale, None, torch.bfloat16)

    return why_refused(device, multiply_once)


run_by_triton(int8_mm, "int8.int8_mm")
