"""Calls of launchers as Z-Image's blocks alone make them: RMSNorm, SwiGLU of two linears, each image's own angles.

Part of `kernel_cases.py`, at Z-Image's shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import FORMATS

TOKENS = 4608


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def z_image_cases() -> dict[str, Callable[[], Any]]:
    """Name → call of a launcher."""
    from coat_core.ops.gate_kernel import gated_sum, gated_sum_backward
    from coat_core.ops.mlp_down_kernel import mlp_activation_down
    from coat_core.ops.norm_kernel import norm_modulate, norm_modulate_backward, norm_modulate_quantize
    from coat_core.ops.qkv_kernel import qkv_rope, qkv_rope_backward

    d, f, eps, fp32, bf16 = 3840, 10240, 1e-5, torch.float32, torch.bfloat16
    x, vectors, weight, none = _empty(2, TOKENS, d), _empty(2, 4 * d)[:, :d], _empty(d), ("none", 0)
    kept_scale, cases = _empty(2, TOKENS, d // 128, dtype=fp32), {}
    for name, fmt in FORMATS.items():
        kept = _empty(2, TOKENS, d, dtype=fmt.dtype), kept_scale, 128
        cases |= {
            f"z-image: rms norm, saved {name}": partial(
                norm_modulate_quantize, x, vectors, None, eps, "e4m3", "per_row", name, 128, weight
            ),
            f"z-image: rms norm from codes {name}": partial(norm_modulate, *kept, vectors, None, eps, bf16, weight),
            f"z-image: rms norm backward from codes {name}": partial(
                norm_modulate_backward, x, *kept, vectors, eps, x, bf16, weight
            ),
            f"z-image: gate and norm backward from codes {name}": partial(
                gated_sum_backward, x, vectors, *kept, bf16, "e5m2", "per_row", weight, eps
            ),
        }
    norm = (weight, eps)
    cases |= {
        "z-image: rms norm backward": partial(norm_modulate_backward, x, x, None, 0, vectors, eps, None, bf16, weight),
        "z-image: gate and norm": partial(gated_sum, x, vectors, x, None, None, *none, *norm),
        "z-image: gate and norm backward": partial(
            gated_sum_backward, x, vectors, x, None, 0, bf16, "e4m3", "per_tensor", *norm
        ),
    }
    for rank, saved in ((16, ("e4m3", 128)), (64, ("e5m2", 16)), (256, ("e4m3", 256)), (16, none)):
        h, up = _empty(2, TOKENS, rank), _empty(d, rank)
        cases[f"z-image: gate and norm, rank {rank}, saved {saved[0]}"] = partial(
            gated_sum, x, vectors, x, h, up, *saved, *norm
        )
    rank, mlp = 128, _empty(2, TOKENS, 2 * f)
    cases["z-image: swiglu of two linears"] = partial(
        mlp_activation_down,
        *(None, mlp, _empty(2, TOKENS, 2 * rank), _empty(2 * f, rank), _empty(rank, f)),
        *("e4m3", "per_row", "e4m3", 128, bf16, "silu_and_mul"),
    )
    y, angles, heads = _empty(2, TOKENS, 3 * d), _empty(2, TOKENS, 128, dtype=fp32), _empty(2, TOKENS, 30, 128)
    rope = ([_empty(128)] * 2, angles, angles, eps)
    h, up = _empty(2, TOKENS, 3 * rank), _empty(3 * d, rank)
    cases["z-image: qkv, angles of each image"] = partial(qkv_rope, [y], [], [h], [up], *rope, "e4m3", 128, bf16)
    cases["z-image: qkv backward, angles of each image"] = partial(
        qkv_rope_backward,
        [heads] * 3,
        [y.to(FORMATS["e4m3"].dtype)],
        [_empty(2, TOKENS, 90, dtype=fp32)],
        *rope,
        128,
        bf16,
    )
    return cases
