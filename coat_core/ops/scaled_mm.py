"""The GEMMs: y = (a · a_scale)(b · b_scale)ᵀ + bias, as the operators `coat::fp8_mm` and `coat::int8_mm`.

`weight_only_linear` has W in FP8 and x in high precision, for one row per image: time is reading W, a byte an element.

On CUDA the first is `torch._scaled_mm` (cuBLASLt, CUTLASS). On a CPU that is a naive loop, about 1000 times slower
than a GEMM, so the reference multiplies the codes in fp32, where they are exact, and rounds once, as the GPU does.

Shapes: a [M, K], b [N, K] (any strides: on CUDA a transposed view is copied by `coat::transpose_codes`), a_scale [] or
[M, 1], b_scale [] or [N, 1], bias [N], result [M, N]. K and N must be multiples of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.casts import GRADIENT, INPUT, Product, declares
from coat_core.int8 import rotate
from coat_core.ops.dispatch import launcher, operator
from coat_core.ops.quantize import transpose_codes
from coat_core.quantize import dequantize

ALIGNMENT = 16  # of K and N; a rule of the hardware's FP8 tensor cores
FEWEST_INT8_ROWS = 17  # that torch's INT8 product takes on CUDA
# bf16 rounds by 0.4 %; sums of Hopper's fast accumulation, of 14 bits, are off by a few percent at K = 15,360
TRIAL_ERROR = 0.1  # of a right product, relative to the larger of its element and the mean magnitude
PERIOD = 65_521  # random numbers of a trial's codes; a prime, so that no two rows are alike
_sizes = (256, 256, 256)  # tokens, K and N that products are tried at: small, memory may be full by then


def row_scale(scale: Tensor, rows: int) -> Tensor:
    """A scale [] or [rows, 1] as contiguous [rows, 1] for row-wise GEMMs; keep a weight's, each call copies."""
    if scale.ndim == 2 and scale.shape[0] == rows and scale.is_contiguous():
        return scale
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


@operator("coat::fp8_mm", triton=False)
def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    forward: bool = False,
) -> Tensor:
    """Return (a · a_scale)(b · b_scale)ᵀ + bias in `out_dtype`, [M, N]; this body is the reference.

    Codes are FP8, scales fp32 (see `row_scale` where a_scale is [M, 1]), `out_dtype` bf16, fp16 or fp32. `forward`: a
    is the input of a linear, not a gradient; Hopper's tensor cores may then accumulate with about 14 bits.

    Numerics: fp32 accumulation, one rounding to `out_dtype`; agrees with `torch._scaled_mm` to that rounding.
    """
    with without_autocast(a.device):
        product = (a.to(torch.float32) @ b.to(torch.float32).t()) * a_scale * b_scale.reshape(-1)
        if bias is not None:
            product = product + bias.to(torch.float32)
        return product.to(out_dtype)


@operator("coat::int8_mm")
def int8_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    forward: bool = False,
    rotation: int = 1,
) -> Tensor:
    """`scaled_mm` of INT8 codes: exact in int32 up to K = 133,144; then fp32, each product and the bias rounded.

    Before the bias rows are rotated in blocks of `rotation` (`int8.rotate`), as the product with a rotated W is.
    """
    padded = a
    if a.is_cuda and len(a) < FEWEST_INT8_ROWS:
        padded = torch.nn.functional.pad(a, (0, 0, 0, FEWEST_INT8_ROWS - len(a)))
    if a.device.type == "cpu" and not _multiplies_int8_exactly():
        whole = a.double() @ b.t().double()
    else:
        whole = torch._int_mm(padded, b.t())[: len(a)]
    product = rotate(whole.to(torch.float32) * a_scale * b_scale.reshape(-1), rotation)
    if bias is not None:
        product = product + bias.to(torch.float32)
    return product.to(out_dtype, copy=True)


@functools.cache
def _multiplies_int8_exactly() -> bool:
    """Whether `torch._int_mm` is exact on this CPU: without VNNI oneDNN may add pairs of products in 16 bits."""
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) == 64 * 127 * 127).all())


for gemm in (scaled_mm, int8_mm):
    declares(gemm)(lambda out, a: Product(a.b, a.a, INPUT if a.forward else GRADIENT))


@operator("coat::weight_only_linear")
def weight_only_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x Wᵀ + b [..., N] of `dtype`, W = codes · scale; x [..., K], codes FP8 [N, K], scale fp32 [] or [N, 1].

    Numerics: the reference rounds W to `dtype`; the kernel multiplies by the exact codes and scales the fp32 sum.
    """
    weight = dequantize(codes, scale, dtype=dtype)
    with without_autocast(x.device):
        return torch.nn.functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))


declares(weight_only_linear)(lambda out, a: Product(a.codes))


def rows_in_one_piece(b: Tensor) -> Tensor:
    """Return b [N, K] contiguous, as tensor cores read it; transposed codes go through our kernel."""
    if b.is_contiguous():
        return b
    return transpose_codes(b.t()) if b.t().is_contiguous() else b.contiguous()


@launcher(scaled_mm)
def scaled_mm_on_cuda(a: Any) -> Tensor:
    """`scaled_mm` by `torch._scaled_mm`."""
    left = a.a.contiguous()
    right = rows_in_one_piece(a.b)
    bias = a.bias
    a_scale, b_scale = a.a_scale, a.b_scale
    row_wise = a_scale.ndim == 2 or b_scale.ndim == 2
    if row_wise:
        a_scale = row_scale(a_scale, len(left))
        b_scale = row_scale(b_scale, len(right)).view(1, -1)
    # row-wise kernels write bf16 only; tensor-wise ones take a bias of their own output type
    kernel_dtype = torch.bfloat16 if row_wise else a.out_dtype
    kernel_bias = None if kernel_dtype == torch.float32 else bias
    if kernel_bias is not None:
        kernel_bias = kernel_bias.to(kernel_dtype)
    if len(left) == 1:  # one row is contiguous with any strides, and torch looks at them
        left = left.view(-1).view(left.shape)
    out: Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=kernel_bias,
        out_dtype=kernel_dtype,
        use_fast_accum=a.forward,
    )
    if bias is not None and kernel_bias is None:
        out = out + bias
    return out.to(a.out_dtype)


scaled_mm.register_kernel("cuda", scaled_mm_on_cuda)


def try_products_of(tokens: int, k: int, n: int) -> None:
    """Let products be tried at a run's sizes, x [tokens, K] and W [N, K], instead of those of `_sizes`."""
    global _sizes
    if (tokens, k, n) != _sizes:
        _sizes = (tokens, k, n)
        unsupported_reason.cache_clear()


@functools.cache
def unsupported_reason(device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, row_wise: bool) -> str | None:
    """Why this device, CUDA and torch cannot multiply codes of these dtypes, or multiply them wrongly; else None.

    Found by the two products of a linear, x Wᵀ and dy W, of random codes and scales.
    """
    return None if device.type == "cpu" else trial_error(device, a_dtype, b_dtype, row_wise)


def trial_error(device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, row_wise: bool) -> str | None:
    """`unsupported_reason`, tried each time, on a CPU too."""
    tokens, k, n = _sizes
    try:
        weight = _random_codes(n, k, b_dtype, device)
        for width, codes, forward in ((k, weight, True), (n, weight.t(), False)):
            if not _is_right(_random_codes(tokens, width, a_dtype, device), codes, row_wise, forward):
                rows = "with a scale per row" if row_wise else "with one scale each"
                return f"{device.type}: a wrong product of {tokens} x {width} x {codes.shape[0]}, {rows}"
    except torch.OutOfMemoryError:
        raise  # says nothing about the device, and answers are cached
    except (RuntimeError, ValueError, TypeError) as error:  # NotImplementedError is a RuntimeError; mps: TypeError
        return f"{device.type}: {str(error).splitlines()[0]}"
    return None


def _random_codes(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)  # no random state of the run is touched
    values = torch.randn(PERIOD, generator=draw).mul(16).to(device).to(dtype)
    bits = values.view(torch.uint8).repeat(-(-rows * columns // PERIOD))
    return bits[: rows * columns].view(dtype).view(rows, columns)


def _is_right(a: Tensor, b: Tensor, row_wise: bool, forward: bool) -> bool:
    """Whether the product of codes a [M, K], b [N, K] and made-up scales is finite and close to that of fp32."""
    gemm: Callable[..., Tensor] = int8_mm if a.dtype == torch.int8 else scaled_mm
    a_scale, b_scale = (torch.linspace(0.5, 2.0, len(x), device=a.device).unsqueeze(1) / 64 for x in (a, b))
    if not row_wise:
        a_scale, b_scale = a_scale[0, 0], b_scale[0, 0]
    found = gemm(a, a_scale, b, b_scale, None, torch.bfloat16, forward).to(torch.float32)
    with without_autocast(a.device):
        exact = a.to(torch.float32) @ b.to(torch.float32).t()
    near = TRIAL_ERROR * exact.abs().clamp_min(exact.square().mean().sqrt())
    return bool(((found / a_scale / b_scale.reshape(-1) - exact).abs() <= near).all())  # False for NaN


int8_unsupported_reason = functools.partial(unsupported_reason, a_dtype=torch.int8, b_dtype=torch.int8, row_wise=True)
