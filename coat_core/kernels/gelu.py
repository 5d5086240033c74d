"""GELU-tanh between the linears of an MLP, forward (quantizing what the next linear reads) and backward, as operators.

    gelu_concat_quantize     [attention | GELU(mlp)]
    gelu_backward            grad·GELU'(mlp)

Shapes: attention [..., D]; mlp [..., F]; `fmt` and `granularity` as in `coat_core.kernels.codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.casts import INPUT, Cast, declares
from coat_core.kernels.codes import cast_of, codes_of, fake_codes_of
from coat_core.kernels.dispatch import run_by_triton
from coat_core.kernels.operators import operator


@operator("coat::gelu_concat_quantize")
def gelu_concat_quantize(
    attention: Tensor | None, mlp: Tensor, fmt: str, granularity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [attention | GELU(mlp)] along the features, and its codes.

        GELU(x) = x/2·(1 + tanh(u)),   u = sqrt(2/π)·(x + 0.044715·x³)      in fp32, rounded once

    Args:
        attention: floating [..., D]; None for GELU(mlp) alone.
        mlp: floating [..., F].
        fmt: "e4m3" or "e5m2".
        granularity: "none", "per_row" or "per_tensor".

    Returns:
        values [..., D + F], in the dtype both promote to; their codes; the scale of the codes.

    Raises:
        ValueError: unknown format or granularity.

    Numerics: the reference has the bits of torch's GELU. The kernel takes sigmoid(2u) for (1 + tanh(u))/2, which
    differs by at most tests/tolerances.py's GELU_RTOL times abs(x).
    Source: FLUX's single blocks, diffusers models/transformers/transformer_flux.py.
    """
    activated = torch.nn.functional.gelu(mlp, approximate="tanh")
    values = activated.contiguous() if attention is None else torch.cat([attention, activated], dim=-1)
    return values, *codes_of(values, fmt, granularity)


@gelu_concat_quantize.register_fake
def _(attention: Tensor | None, mlp: Tensor, fmt: str, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    width = mlp.shape[-1] + (0 if attention is None else attention.shape[-1])
    dtype = mlp.dtype if attention is None else torch.promote_types(attention.dtype, mlp.dtype)
    values = mlp.new_empty((*mlp.shape[:-1], width), dtype=dtype)
    return values, *fake_codes_of(values, fmt, granularity)


@declares(gelu_concat_quantize)
def _(out: tuple[Tensor, ...], attention: Tensor | None, mlp: Tensor, fmt: str, granularity: str) -> Cast | None:
    return cast_of(INPUT, out, granularity)


@operator("coat::gelu_backward")
def gelu_backward(grad: Tensor, mlp: Tensor) -> Tensor:
    """Return the gradient of mlp.

        dmlp = grad·(s + x·s·(1 - s)·2u'),   s = (1 + tanh(u))/2,   u' = sqrt(2/π)·(1 + 3·0.044715·x²)

    Args:
        grad: of GELU(mlp) [..., F], in fp32 or the dtype of mlp; a slice of a wider tensor is read in place.
        mlp: what GELU read (or its FP8 round trip) [..., F].

    Returns:
        dmlp like mlp, computed in fp32 and rounded once.
    """
    dmlp = torch.ops.aten.gelu_backward(grad.to(torch.float32), mlp.to(torch.float32), approximate="tanh")
    values: Tensor = dmlp.to(mlp.dtype).contiguous()
    return values


@gelu_backward.register_fake
def _(grad: Tensor, mlp: Tensor) -> Tensor:
    return mlp.new_empty(mlp.shape)


run_by_triton(gelu_concat_quantize, "gelu.gelu_concat_quantize")
run_by_triton(gelu_backward, "gelu.gelu_backward")
