"""The AdamW update, on fp32 tensors, knowing nothing of FP8.

The paper's Algorithm 1 (decoupled weight decay) with t the step counted from 1:

    w   ← w · (1 − lr·λ)
    m   ← β1·m + (1 − β1)·g
    v   ← β2·v + (1 − β2)·g²
    w   ← w − lr/(1 − β1^t) · m / ( sqrt(v)/sqrt(1 − β2^t) + ε )

FP8AdamW wraps it: dequantize m and v, update, quantize m and v again.
Source: arXiv 2410.19313, section 3 (FP8 optimizer); order of operations as torch.optim.AdamW's single-tensor path, so
that fp32 results are equal to the last bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Hyper(NamedTuple):
    """Scalars of one AdamW step; `step` is the number of this step, from 1; a tensor lr is on the CPU."""

    step: float
    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


def adamw_update_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Hyper) -> None:
    """Do one AdamW step in place on `param`, `exp_avg` and `exp_avg_sq`.

    Args:
        param: w, fp32, any shape.
        grad: g, fp32, the shape of param; left as it is.
        exp_avg: m before the step, fp32, the shape of param.
        exp_avg_sq: v before the step, fp32, the shape of param.
        hyper: the scalars of this step.

    Numerics: bit-equal to torch.optim.AdamW(foreach=False) on a CPU, whose products with a tensor lr are fp32 too.
    """
    if hyper.maximize:
        grad = -grad
    if hyper.weight_decay != 0:
        param.mul_(float(1 - hyper.lr * hyper.weight_decay))
    exp_avg.lerp_(grad, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    step_size = float(hyper.lr / (1 - hyper.beta1**hyper.step))
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - hyper.beta2**hyper.step)).add_(hyper.eps)
    param.addcdiv_(exp_avg, denominator, value=-step_size)
