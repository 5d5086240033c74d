"""GELU, a linear, its gate and the residual as one autograd function that keeps what GELU reads.

    y = residual + gate·linear([out | GELU(mlp)])

Beside mlp, the linear's result is kept where gate is trained (a LoRA on the modulation), and attention's out, which
attention keeps anyway, where the linear has an adapter.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coat_core.activation import PackingConfig
from coat_core.autograd import first_order_only

from .attention import KeptOut
from .kept import Kept, Packed, pack, unpack
from .linears import AdaptedLinear

aten = torch.ops.aten


def gated_linear(
    residual: Tensor,
    gate: Tensor,
    linear: AdaptedLinear,
    config: PackingConfig,
    out: KeptOut | None = None,
    mlp: Tensor | None = None,
) -> Tensor:
    """Return residual + gate·linear([out | GELU(mlp)]).

    Args:
        residual: [B, S, D].
        gate: [B, D].
        linear: reads out, GELU(mlp), or both side by side.
        config: how mlp and the linear's result are kept.
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
        config: PackingConfig,
        *parameters: Tensor,
    ) -> Tensor:
        result, middles = linear.forward(_linear_input(attention, mlp))
        if any(ctx.needs_input_grad):
            kept = Kept()
            kept.add("gate", gate)
            kept.add("h", *middles)
            kept.add("attention", *(attention_kept if attention is not None and linear.adapters else ()))
            kept.add("mlp", *(() if mlp is None else pack(mlp, config)))
            kept.add("result", *(pack(result, config) if ctx.needs_input_grad[1] else ()))
            kept.add("parameters", *parameters)
            kept.save(ctx)
        ctx.linear, ctx.config, ctx.dtypes = linear, config, (result.dtype, None if mlp is None else mlp.dtype)
        ctx.widths = [0 if part is None else part.shape[-1] for part in (attention, mlp)]
        return residual + gate[:, None] * result

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            kept = Kept.of(ctx)
            (gate,), (result_dtype, mlp_dtype) = kept["gate"], ctx.dtypes
            dgate = None
            if kept["result"]:
                result = unpack(kept["result"], ctx.config, result_dtype)
                dgate = (grad.to(torch.float32) * result).sum(1).to(gate.dtype)
            mlp = unpack(kept["mlp"], ctx.config, mlp_dtype) if kept["mlp"] else None
            x = None
            if ctx.linear.adapters:
                attention = unpack(kept["attention"], ctx.config, result_dtype) if kept["attention"] else None
                x = _linear_input(attention, mlp)
            dy = (grad * gate[:, None]).to(result_dtype)
            parameter_grads, middle_grads = ctx.linear.parameter_gradients(dy, x, kept["h"])
            del x  # as wide as dx, which comes next
            dattention = dmlp = None
            if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
                dx = ctx.linear.input_gradient(dy, middle_grads)
                dattention, dmlp = dx.to(result_dtype).split(ctx.widths, dim=-1)
                if mlp is not None:
                    dmlp = aten.gelu_backward(dmlp.to(mlp.dtype), mlp, approximate="tanh")
                    dattention = dattention.contiguous()  # or it would hold the gradient of both
        needed = [grad, dgate, dattention if ctx.widths[0] else None, dmlp if ctx.widths[1] else None]
        return *needed, None, None, None, *parameter_grads


def _linear_input(attention: Tensor | None, mlp: Tensor | None) -> Tensor:
    """[attention | GELU(mlp)] along the features, or the one that is there."""
    activated = None if mlp is None else torch.nn.functional.gelu(mlp, approximate="tanh")
    if attention is None:
        assert activated is not None
        return activated
    # a new tensor object: the FP8 copy that the linear hangs on its input must not live as long as attention's out
    return attention.detach() if activated is None else torch.cat([attention, activated], dim=-1)
