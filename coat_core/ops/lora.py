"""LoRA's up-projection gradients as an operator: dy [..., ΣN] of n linears; h [..., n·r], up [ΣN, r], r for each."""

from __future__ import annotations

import torch
from torch import Tensor

from coat_core.autograd import without_autocast
from coat_core.ops.codes import product
from coat_core.ops.dispatch import operator


@operator("coat::lora_up_gradients")
def lora_up_gradients(
    dy: Tensor, h: Tensor, up: Tensor, widths: list[int], dtype_up: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return dh_i = dy_i up_i and dup_i = dy_iᵀ h_i for n linears y_i = h_i up_iᵀ that read one x, reading dy once.

    dy [..., ΣN]; h [..., n·r], r at most 256; up [ΣN, r], in the dtype of h; `widths` are the N. Returns dh [...,
    n·r] in the dtype of h; dup [ΣN, r] of `dtype_up`.

    Numerics: dy is rounded to the dtype of h; products are summed in fp32 and rounded once, except for dup on a CPU,
    which is rounded to the dtype of h first.
    """
    rows = dy.to(h.dtype).reshape(-1, dy.shape[-1])
    flat_h = h.reshape(-1, h.shape[-1])
    linears = zip(rows.split(widths, dim=1), flat_h.split(up.shape[1], dim=1), up.split(widths), strict=True)
    dhs, dups = [], []
    with without_autocast(dy.device):
        for own_dy, own_h, own_up in linears:
            dhs.append(own_dy @ own_up)
            dups.append(product(own_dy.t(), own_h, dtype_up))
    dh, dup = (dhs[0], dups[0]) if len(widths) == 1 else (torch.cat(dhs, dim=1), torch.cat(dups))
    return dh.view(h.shape), dup
