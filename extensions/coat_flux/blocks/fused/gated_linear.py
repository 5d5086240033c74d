"""GELU, a linear, its gate and the residual as one autograd function that keeps what GELU reads.

    y = residual + gate·linear([out | GELU(mlp)])

With mlp, the linear's result is kept where gate is trained (a LoRA on the modulation), and attention's out, which
attention keeps anyway, where the linear has an adapter.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only, without_autocast
from coat_core.granularity import PER_TENSOR
from coat_core.kernels.gate import gate_residual, gate_residual_backward
from coat_core.kernels.gelu import gelu_backward, gelu_concat_quantize
from coat_core.kernels.quantize import quantize
from coat_core.quantize import Quantized

from .attention import KeptOut
from .kept import Kept, Packed, pack, unpack
from .linears import AdaptedLinear, Spec, linears_backward, run_linears


def gated_linear(
    residual: Tensor,
    gate: Tensor,
    linear: AdaptedLinear,
    config: PackingConfig | None,
    out: KeptOut | None = None,
    mlp: Tensor | None = None,
) -> Tensor:
    """Return residual + gate·linear([out | GELU(mlp)]).

    Args:
        residual: [B, S, D].
        gate: [B, D].
        linear: reads out, GELU(mlp), or both side by side.
        config: how mlp and the linear's result are kept; None keeps them as they are.
        out: from `attention`.
        mlp: before GELU-tanh [B, S, F].

    Returns:
        Tensor like residual.
    """
    values, kept = out or (None, ())
    result: Tensor = _GatedLinear.apply(residual, gate, values, mlp, kept, linear, config, *linear.parameters)
    return result


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        gate: Tensor,
        attention: Tensor | None,
        mlp: Tensor | None,
        attention_kept: Packed,
        linear: AdaptedLinear,
        config: PackingConfig | None,
        *parameters: Tensor,
    ) -> Tensor:
        (result,), h = run_linears(*_linear_input(attention, mlp, linear.base.input_spec), [linear])
        if any(ctx.needs_input_grad):
            kept = Kept()
            kept.add("gate", gate)
            kept.add("h", *(() if h is None else (h,)))
            kept.add("attention", *(attention_kept if attention is not None and linear.adapters else ()))
            kept.add("mlp", *(() if mlp is None else pack(mlp, config)))
            kept.add("result", *(pack(result, config) if ctx.needs_input_grad[1] else ()))
            kept.add("parameters", *parameters)
            kept.save(ctx)
        ctx.linear, ctx.config, ctx.dtypes = linear, config, (result.dtype, None if mlp is None else mlp.dtype)
        ctx.widths = [0 if part is None else part.shape[-1] for part in (attention, mlp)]
        return gate_residual(residual, gate, result)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with without_autocast(grad.device):
            kept = Kept.of(ctx)
            (result_dtype, mlp_dtype), linear = ctx.dtypes, ctx.linear
            dy, quantized, dgate = _gate_backward(grad, kept, ctx.config, result_dtype, linear.base.grad_spec)
            mlp = unpack(kept["mlp"], ctx.config, mlp_dtype) if kept["mlp"] else None
            attention = unpack(kept["attention"], ctx.config, result_dtype) if kept["attention"] else None
            needs_dx = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
            h = next(iter(kept["h"]), None)
            dx, parameter_grads = linears_backward(
                [dy], lambda: _linear_input(attention, mlp, None)[0], h, [linear], needs_dx, quantized
            )
            del dy
            dattention = dmlp = None
            if dx is not None:
                dattention, dmlp = dx.split(ctx.widths, dim=-1)
                if mlp is not None:
                    dmlp = gelu_backward(dmlp, mlp)
                    dattention = dattention.contiguous()  # or it would hold the gradient of both
        needed = [grad, dgate, dattention if ctx.widths[0] else None, dmlp if ctx.widths[1] else None]
        return *needed, None, None, None, *parameter_grads


def _linear_input(attention: Tensor | None, mlp: Tensor | None, spec: Spec | None) -> tuple[Tensor, Quantized | None]:
    """[attention | GELU(mlp)] along the features, or the one that is there, and the same in FP8."""
    fmt, granularity = spec or ("e4m3", PER_TENSOR)
    if mlp is None:
        assert attention is not None
        return attention, quantize(attention, fmt, granularity) if spec else None
    fused = spec is not None and granularity.name != "per_group"
    x, codes, scale = gelu_concat_quantize(attention, mlp, fmt, granularity.name if fused else "none")
    if fused:
        return x, Quantized(codes, scale, granularity)
    return x, quantize(x, fmt, granularity) if spec else None


def _gate_backward(
    grad: Tensor, kept: dict[str, Packed], config: PackingConfig | None, dtype: torch.dtype, spec: Spec | None
) -> tuple[Tensor, Quantized | None, Tensor | None]:
    """Gradient of the linear's result, the same in FP8, and gradient of the gate where it is trained."""
    (gate,), (result, scale) = kept["gate"], (*kept["result"], None, None)[:2]
    fmt, granularity = spec or ("e5m2", PER_TENSOR)
    fused = spec is not None and granularity.name != "per_group"
    group_size = config.granularity.group_size if config else 0
    how = (fmt, granularity.name if fused else "none")
    dy, codes, code_scale, dgate = gate_residual_backward(grad, gate, result, scale, group_size, dtype, *how)
    quantized = Quantized(codes, code_scale, granularity) if fused else None
    return dy, quantized, None if result is None else dgate
