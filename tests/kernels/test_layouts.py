"""What a launcher returns is what the operator's fake promises torch.compile: dtype, shape, strides, memory of its own.

opcheck asks this of the body that runs on a CPU; here the launchers are asked, over views and dtypes that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_core.granularity import PER_ROW, PER_TENSOR, per_group
from coat_core.ops import dispatch, gate, gelu, lora, mlp_down, mlp_gradient, norm, qkv, weight_only
from coat_core.ops import quantize as quantizing
from coat_core.quantize import quantize
from tests.helpers.operators import check_layout, moved, tensors_in
from tests.helpers.rows import SPECS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Case = tuple[Any, tuple[Any, ...]]
SAVED = [("none", 0), ("e4m3", 128), ("e5m2", 16), ("e4m3", 32), ("none", 0)]  # one for each of SPECS


def turned(*shape: int) -> Tensor:
    """fp32 [..., n, m], dense, with the strides of its transpose."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def quantize_cases() -> Iterator[Case]:
    for granularity in (PER_TENSOR, PER_ROW, per_group(16)):
        how = (granularity.name, granularity.group_size)
        for x in (turned(3, 40).bfloat16(), torch.randn(2, 3, 40, dtype=FP16), torch.randn(1, 1)):
            yield quantizing._quantize, (x, "e4m3", *how, None)
            yield quantizing._quantize, (x, "e5m2", *how, torch.rand(x.shape[-1]))
        codes, scale, _ = quantize(torch.randn(3, 40), "e4m3", granularity)
        yield quantizing._dequantize, (codes.t().contiguous().t(), scale, *how, BF16)
    for how in (("e4m3", "per_row", 16), ("e5m2", "per_tensor", 16), ("e4m3", "per_group", 16), ("none", "none", 16)):
        for saved in SAVED[:2]:
            for x in (turned(3, 40).bfloat16(), torch.randn(2, 5, 48, dtype=FP16)[:, 2:, 8:], torch.randn(1, 1)):
                yield quantizing.quantize_and_save, (x, *how, *saved)
    for shape in ((1, 32), (32, 1), (16, 48)):
        yield quantizing.transpose_codes, (torch.randn(shape).to(torch.float8_e4m3fn),)


def read_cases(x: Tensor) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """x as an operator of the backward pass reads it: as it is, and as codes with their scale; and the group size."""
    yield x, None, 16
    if x.numel():
        yield *quantize(x, "e4m3", per_group(16))[:2], 16


def norm_cases() -> Iterator[Case]:
    for tokens in (7, 1, 0):
        for dtype, scale_dtype in ((BF16, BF16), (BF16, FP32), (FP32, BF16), (FP16, BF16)):
            x, scale = turned(2, tokens, 48).to(dtype), torch.randn(2, 144).to(scale_dtype)[:, 48:96]
            for spec, saved in zip(SPECS, SAVED, strict=True) if tokens else [(SPECS[0], SAVED[0])]:
                yield norm.norm_modulate_quantize, (x, scale, scale, 1e-6, *spec, *saved)
            for given in read_cases(x):
                yield norm.norm_modulate, (*given, scale, scale, 1e-6, dtype)
                for residual in (None, torch.randn(x.shape)):
                    yield norm.norm_modulate_backward, (torch.randn(x.shape), *given, scale, 1e-6, residual, dtype)


def gate_cases() -> Iterator[Case]:
    for tokens in (7, 1, 0):
        x, scale = turned(2, tokens, 48), torch.randn(2, 144)[:, 48:96]
        for dtype in (BF16, FP32):
            h, up = torch.randn(2, tokens, 12).to(dtype)[..., 4:], torch.randn(48, 8).to(dtype)
            for saved in SAVED[: 3 if tokens else 1]:
                for adapter in ((None, None), (h, up)):
                    yield gate.gated_sum, (x.bfloat16(), scale.to(dtype), x.to(dtype), *adapter, *saved)
            for spec in SPECS if tokens else SPECS[:1]:
                for result in (None, x.bfloat16()):
                    yield gate.gated_sum_backward, (x, scale.to(dtype), result, None, 128, BF16, *spec)
            for given in read_cases(x.bfloat16()):
                yield gate.gated_sum_backward, (x, scale.to(dtype), *given, BF16, *SPECS[0])


def gelu_cases() -> Iterator[Case]:
    for tokens in (7, 1, 0):
        mlp, attention = turned(2, tokens, 130), torch.randn(2, tokens, 88)[..., 48:]
        pair = (torch.randn(2, tokens, 4), torch.randn(130, 4))
        for spec in SPECS if tokens else ():
            yield gelu.mlp_activation, (None, None, mlp.bfloat16(), None, None, None, *spec, "none", 0, BF16)
            yield gelu.mlp_activation, (attention, None, mlp, None, *pair, *spec, "e4m3", 16, FP32)
        for spec in SPECS[1:] if tokens else ():
            down = torch.randn(5, 178)[:, 8:]
            yield mlp_down.mlp_activation_down, (attention, mlp, *pair, down, *spec, "e4m3", 16, FP32)
            half = down.bfloat16()[:, 40:]
            yield mlp_down.mlp_activation_down, (None, mlp.bfloat16(), None, None, half, *spec, "none", 0, BF16)
        if tokens:
            yield gelu.mlp_activation, (None, None, mlp, None, None, None, "none", "none", "e5m2", 16, FP32)
        yield gelu.mlp_activation_backward, (mlp, pair[0], pair[1].t(), mlp, None, 0, BF16)


def qkv_cases() -> Iterator[Case]:
    for tokens in (7, 1):
        for dtype in (BF16, FP32):
            y, h, up = torch.randn(2, tokens, 200)[..., :144].to(dtype), torch.randn(2, tokens, 12), torch.randn(144, 4)
            norm = ([torch.randn(16).to(dtype)] * 2, *torch.randn(2, tokens, 16), 1e-6)
            for saved in ("none", "e5m2"):
                yield qkv.qkv_rope, ([y], [], [], [], *norm, saved, 32, dtype)
                yield qkv.qkv_rope, ([y], [], [h.to(dtype)], [up.to(dtype)], *norm, saved, 16, dtype)
            grads = [torch.randn(2, 3, tokens, 16).transpose(1, 2) for _ in range(3)]
            yield qkv.qkv_rope_backward, (grads, [y], [], *norm, 16, dtype)
            mlp, dh, down = turned(2, tokens, 130).to(dtype), torch.randn(2, tokens, 4), torch.randn(4, 130)
            yield qkv.qkv_mlp_backward, (grads, y, None, *norm, mlp.float(), dh, down, mlp, None, 16, dtype)


def mlp_gradient_cases() -> Iterator[Case]:
    for tokens in (7, 1, 0):
        for dtype, dtype_down in ((BF16, FP32), (FP32, BF16), (FP16, FP16)):
            attention, mlp = torch.randn(2, tokens, 88)[..., 48:], turned(2, tokens, 130)
            dh = torch.randn(2, tokens, 12).to(dtype)[..., 4:]
            for a, b in zip(read_cases(attention.to(dtype)), read_cases(mlp.to(dtype)), strict=True):
                yield mlp_gradient.mlp_down_gradient, (dh, *a[:2], *b, dtype, dtype_down)
                yield mlp_gradient.mlp_down_gradient, (dh, None, None, *b, dtype, dtype_down)


def lora_cases() -> Iterator[Case]:
    for tokens in (7, 1, 0):
        for dtype, dtype_up in ((BF16, FP32), (FP32, FP32), (FP16, BF16)):
            for rank in (4, 40):
                dy, h = torch.randn(2, tokens, 64)[..., 8:], torch.randn(2, tokens, 3 * rank)[..., rank:]
                dy[:1, :, 50] = float("nan")
                yield lora.lora_up_gradients, (dy, h.to(dtype), torch.randn(56, rank).to(dtype), [48, 8], dtype_up)


def weight_only_cases() -> Iterator[Case]:
    for granularity in (PER_TENSOR, PER_ROW):
        codes, scale, _ = quantize(torch.randn(48, 32), "e4m3", granularity)
        for x in (torch.randn(32), turned(4, 32), torch.randn(2, 9, 32, dtype=BF16), torch.randn(0, 32)):
            yield weight_only.weight_only_linear, (x, codes, scale, torch.randn(48), BF16)
            yield weight_only.weight_only_linear, (x, codes, scale, None, FP32)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "cases",
    [
        quantize_cases,
        norm_cases,
        gate_cases,
        gelu_cases,
        qkv_cases,
        mlp_gradient_cases,
        lora_cases,
        weight_only_cases,
    ],
)
def test_launchers_return_what_the_fakes_promise(cases: Any, device: torch.device) -> None:
    for op, args in cases():
        launch = dispatch.launcher_of(op._qualname)
        given = moved(args, device)
        results = launch(*given)
        check_layout(op, given, results)
        check_layout(op, given, op._init_fn(*given))
        for found, expected in zip(tensors_in(results), tensors_in(op._init_fn(*given)), strict=True):
            assert (found.float().isnan() == expected.float().isnan()).all(), op
