"""Calls of every launcher at FLUX.1's shapes, on tensors without memory: what compile_kernels.py compiles."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coat_core import ops
from coat_core.formats import FORMATS
from coat_core.ops import gate_kernel as gate
from coat_core.ops import gelu_kernel as gelu
from coat_core.ops import qkv_kernel as qkv
from coat_core.ops.adamw_kernel import fp8_adamw_step
from coat_core.ops.device import cast_by_amax
from coat_core.ops.gate_kernel import gated_sum, gated_sum_backward
from coat_core.ops.gelu_kernel import mlp_activation_backward, mlp_activation_down, mlp_down_gradient
from coat_core.ops.lora_kernel import lora_up_gradients
from coat_core.ops.norm_kernel import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.ops.qkv_kernel import qkv_rope, qkv_rope_backward
from coat_core.ops.quantize_kernel import (
    decode_nvfp4,
    dequantize,
    quantize,
    quantize_and_save,
    quantize_int8,
    rotate,
    transpose_codes,
)
from coat_core.ops.scaled_mm_kernel import int8_mm, weight_only_linear

TOKENS, HIDDEN, MLP = 4608, 3072, 12288


def launcher_modules() -> list[Any]:
    """Every module of `coat_core.ops`."""
    return [importlib.import_module(f"{ops.__name__}.{found.name}") for found in pkgutil.iter_modules(ops.__path__)]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CASES: dict[str, Callable[[], Any]] = {}


def case(name: str, launch: Callable[..., Any]) -> Callable[..., None]:
    """Return what adds a call of a launcher with its arguments."""
    return lambda *args: CASES.update({name: partial(launch, *args)})


def _quantize_cases() -> None:
    x, wide, row_scale = _empty(TOKENS, HIDDEN), _empty(TOKENS, MLP), _empty(TOKENS, 1, dtype=torch.float32)
    for name, fmt in FORMATS.items():
        codes = _empty(TOKENS, HIDDEN, dtype=fmt.dtype)
        case(f"quantize per tensor {name}", quantize)(x, name, "per_tensor", 128, None)
        case(f"quantize per row {name}", quantize)(wide, name, "per_row", 128, None)
        for group in (16, 128, 256) if name == "e4m3" else (128,):
            case(f"quantize 1x{group} {name}", quantize)(x, name, "per_group", group, None)
            scale = _empty(TOKENS, HIDDEN // group, dtype=torch.float32)
            case(f"dequantize 1x{group} {name}", dequantize)(codes, scale, "per_group", group, torch.bfloat16)
        case(f"dequantize per row {name}", dequantize)(codes, row_scale, "per_row", 128, torch.bfloat16)
    narrow, factors = _empty(8, 64, dtype=torch.float32), _empty(HIDDEN, dtype=torch.float32)
    for granularity in ("per_row", "per_tensor", "per_group"):
        case(f"quantize fp32 {granularity} e4m3", quantize)(narrow, "e4m3", granularity, 128, None)
    one_scale = _empty(dtype=torch.float32)
    case("dequantize to fp32", dequantize)(codes, one_scale, "per_tensor", 128, torch.float32)
    joined = _empty(TOKENS, 3 * HIDDEN + MLP), _empty(3 * HIDDEN + MLP, dtype=torch.float32)  # q, k, v and the MLP
    case("quantize with factors per row e5m2", quantize)(joined[0], "e5m2", "per_row", 128, joined[1])
    case("quantize with factors per tensor e5m2", quantize)(x, "e5m2", "per_tensor", 128, factors)
    case("cast by amax e4m3", cast_by_amax)(x, row_scale.view(-1), "e4m3")
    case("transpose", transpose_codes)(codes)
    joint = _empty(1, TOKENS, HIDDEN + 16)[:, 512:, :HIDDEN]  # a stream's rows
    for *how, saved, group in (
        ("e4m3", "per_row", "e4m3", 128),
        ("e5m2", "per_tensor", "e5m2", 16),
        ("e4m3", "per_row", "e4m3", 256),
        ("none", "none", "e4m3", 128),
        ("e4m3", "per_row", "none", 128),
        ("e5m2", "per_row", "e5m2", 128),
    ):
        case(f"quantize {' '.join(map(str, how))} and save {saved}", quantize_and_save)(joint, *how, saved, group)


def _weight_only_cases() -> None:
    bias, scale = _empty(6 * HIDDEN), _empty(dtype=torch.float32)
    codes = {name: _empty(6 * HIDDEN, HIDDEN, dtype=fmt.dtype) for name, fmt in FORMATS.items()}
    for name, batch in (("e4m3", 1), ("e4m3", 4), ("e5m2", 4)):
        x = _empty(batch, HIDDEN)
        case(f"weight only, batch {batch} {name}", weight_only_linear)(x, codes[name], scale, bias, torch.bfloat16)


def _int8_cases() -> None:
    fp32, bf16, wide = torch.float32, torch.bfloat16, 3 * HIDDEN + MLP
    case("rotate", rotate)(_empty(TOKENS, HIDDEN), 256)
    case("rotate blocks of 64", rotate)(_empty(TOKENS, 64), 64)
    case("rotate fp32", rotate)(_empty(8, 64, dtype=fp32), 64)
    case("quantize int8", quantize_int8)(_empty(1, TOKENS, HIDDEN + MLP), 256, None)
    case("quantize int8 of blocks of 64", quantize_int8)(_empty(TOKENS, 64), 64, None)
    case("quantize int8 fp32", quantize_int8)(_empty(8, HIDDEN, dtype=fp32), 256, None)
    case("quantize int8 with factors", quantize_int8)(_empty(TOKENS, wide), 1, _empty(wide, dtype=fp32))
    codes, scale = _empty(6 * HIDDEN, HIDDEN, dtype=torch.int8), _empty(6 * HIDDEN, 1, dtype=fp32)
    case("dequantize per row int8", dequantize)(codes, scale, "per_row", 128, bf16)
    for batch in (1, 4):
        case(f"weight only, batch {batch} int8", weight_only_linear)(
            _empty(batch, HIDDEN), codes, scale, _empty(6 * HIDDEN), bf16
        )
    for m, n, k in ((TOKENS, wide, HIDDEN), (512, HIDDEN, MLP)):
        a, b = _empty(m, k, dtype=torch.int8), _empty(n, k, dtype=torch.int8)
        a_scale, b_scale = _empty(m, 1, dtype=fp32), _empty(n, 1, dtype=fp32)
        for name, bias in (("", None), (" and bias", _empty(n))):
            case(f"int8 gemm {m}x{n}x{k}{name}", int8_mm)(a, a_scale, b, b_scale, bias, bf16)
    turned, one = _empty(HIDDEN, MLP, dtype=torch.int8).t(), _empty(dtype=fp32)
    grad = _empty(TOKENS, HIDDEN, dtype=torch.int8)
    case("int8 gemm, dgrad", int8_mm)(grad, _empty(TOKENS, 1, dtype=fp32), turned, one, None, bf16)


def _nvfp4_cases() -> None:
    codes, scales = (_empty(3 * HIDDEN, HIDDEN // size, dtype=torch.uint8) for size in (2, 16))
    for transposed in (False, True):
        case(f"decode nvfp4{', transposed' * transposed}", decode_nvfp4)(codes, scales, transposed)


def _gate_cases() -> None:
    x, modulation, dtype = _empty(1, TOKENS, HIDDEN), _empty(1, HIDDEN), torch.bfloat16
    dx = _empty(1, TOKENS, HIDDEN, dtype=torch.float32)
    codes = _empty(1, TOKENS, HIDDEN, dtype=FORMATS["e4m3"].dtype)
    scale = _empty(1, TOKENS, HIDDEN // 128, dtype=torch.float32)
    case("gate", gate.gated_sum)(x, modulation, x, None, None, "none", 0)
    case("gate, saved", gate.gated_sum)(x, modulation, x, None, None, "e4m3", 128)
    for rank, saved in ((16, ("e4m3", 128)), (64, ("e5m2", 16)), (256, ("e4m3", 256)), (16, ("none", 0))):
        h, up = _empty(1, TOKENS, 4 * rank)[..., :rank], _empty(HIDDEN, rank)
        case(f"gate, rank {rank}, saved {saved[0]}", gate.gated_sum)(x, modulation, x, h, up, *saved)
    e5m2_codes = _empty(1, TOKENS, HIDDEN, dtype=FORMATS["e5m2"].dtype)
    case("gate backward bf16 from codes e5m2 per_tensor", gate.gated_sum_backward)(
        x, modulation, e5m2_codes, scale, 128, dtype, "e5m2", "per_tensor"
    )
    for spec in (("e4m3", "none"), ("e4m3", "per_row"), ("e5m2", "per_row"), ("e4m3", "per_tensor")):
        label = " ".join(spec)
        results = (
            {"from codes": (codes, scale)} if spec[1] != "none" else {"from values": (x, None), "alone": (None, None)}
        )
        for name, result in results.items():
            case(f"gate backward {name} {label}", gate.gated_sum_backward)(dx, modulation, *result, 128, dtype, *spec)


def _norm_cases() -> None:
    x, modulation, eps, bf16 = _empty(1, TOKENS, HIDDEN), _empty(1, 6 * HIDDEN)[:, :HIDDEN], 1e-6, torch.bfloat16
    grad = _empty(1, TOKENS, HIDDEN, dtype=torch.float32)
    for fmt, granularity, saved, group in (
        ("e4m3", "none", "none", 0),
        ("e4m3", "per_row", "none", 0),
        ("e4m3", "per_row", "e4m3", 128),
        ("e5m2", "per_row", "e5m2", 16),
        ("e4m3", "per_tensor", "e4m3", 256),
    ):
        how = (eps, fmt, granularity, saved, group)
        label = f"norm {fmt} {granularity}, saved {saved} 1x{group}"
        case(label, norm_modulate_quantize)(x, modulation, modulation, *how)
    case("norm backward", norm_modulate_backward)(grad, x, None, 0, modulation, eps, None, bf16)
    case("norm backward bf16", norm_modulate_backward)(x, x, None, 0, modulation, eps, x, bf16)
    for name, fmt in FORMATS.items():
        saved = _empty(1, TOKENS, HIDDEN, dtype=fmt.dtype), _empty(1, TOKENS, HIDDEN // 128, dtype=torch.float32), 128
        case(f"norm from codes {name}", norm_modulate)(*saved, modulation, modulation, eps, bf16)
        case(f"norm backward from codes {name}", norm_modulate_backward)(x, *saved, modulation, eps, x, bf16)


def _qkv_cases() -> None:
    fp8, bf16 = FORMATS["e4m3"].dtype, torch.bfloat16
    wide = _empty(1, TOKENS, 3 * HIDDEN + MLP)
    y, mlp, heads = wide[..., : 3 * HIDDEN], wide[..., 3 * HIDDEN :], _empty(1, TOKENS, 24, 128)
    y_codes, y_scale = _empty(*y.shape, dtype=fp8), _empty(1, TOKENS, 72, dtype=torch.float32)
    mlp_codes, mlp_scale = _empty(*mlp.shape, dtype=fp8), _empty(1, TOKENS, 96, dtype=torch.float32)
    out = _empty(1, TOKENS, HIDDEN)
    weights, angles = [_empty(128)] * 4, _empty(TOKENS, 128, dtype=torch.float32)
    norm = (weights, angles, angles, 1e-6)
    streams = [_empty(1, 512, 3 * HIDDEN), _empty(1, 4096, 3 * HIDDEN)]
    for rank, form in ((16, "e4m3"), (24, "e5m2"), (64, "e4m3"), (128, "e4m3")):
        hs, ups = [_empty(1, x.shape[1], 3 * rank) for x in streams], [_empty(3 * HIDDEN, rank)] * 2
        case(f"qkv, double block, rank {rank}, {form}", qkv.qkv_rope)(streams, [], hs, ups, *norm, form, 128, bf16)
        h, up, down = _empty(1, TOKENS, 4 * rank), _empty(MLP, rank), _empty(rank, HIDDEN + MLP)[:, HIDDEN:]
        h, dh = h[..., 3 * rank :], h[..., :rank]
        how = (form, 128, bf16)
        case(f"qkv, single block, rank {rank}, {form}", qkv.qkv_rope)(
            [y], [], [_empty(1, TOKENS, 4 * rank)[..., : 3 * rank]], ups[:1], *norm, *how
        )
        case(f"mlp, rank {rank}, {form}", gelu.mlp_activation)(out, mlp, h, up, "e4m3", "per_row", *how)
        case(f"mlp and down-projection, rank {rank}, {form}", mlp_activation_down)(
            out, mlp, h, up, _empty(rank, HIDDEN + MLP), "e4m3", "per_row", *how
        )
        case(f"mlp backward, rank {rank}", mlp_activation_backward)(mlp, dh, down, mlp_codes, mlp_scale, 128, bf16)
    for group in (16, 256):
        case(f"qkv, groups of {group}", qkv.qkv_rope)([y], [], [], [], *norm, "e4m3", group, bf16)
        case(f"mlp, groups of {group}", gelu.mlp_activation)(
            out, mlp, None, None, "e4m3", "per_tensor", "e4m3", group, bf16
        )
        case(f"mlp and down-projection alone, groups of {group}", mlp_activation_down)(
            *(None, mlp, None, None), _empty(256, MLP), "e5m2", "per_tensor", "e5m2", group, bf16
        )
    case("mlp and down-projection, groups of 256", mlp_activation_down)(
        out, mlp, h, up, _empty(16, HIDDEN + MLP), "e4m3", "per_row", "e4m3", 256, bf16
    )
    for form in FORMATS:  # images are drawn without saving anything
        case(f"mlp and down-projection, nothing saved, {form}", mlp_activation_down)(
            out, mlp, None, None, _empty(16, HIDDEN + MLP), form, "per_row", "none", 128, bf16
        )
    fp32 = [_empty(*x.shape, dtype=torch.float32) for x in (out, mlp, h, up, _empty(128, HIDDEN + MLP))]
    case("mlp and down-projection in fp32", mlp_activation_down)(*fp32, "e4m3", "per_row", "e4m3", 128, torch.float32)
    no_adapter = (None, None)
    for name, fmt in FORMATS.items():
        y_codes, mlp_codes = (_empty(*x.shape, dtype=fmt.dtype) for x in (y, mlp))
        case(f"qkv from codes {name}", qkv.qkv_rope)([y_codes], [y_scale], [], [], *norm, "none", 128, bf16)
        case(f"qkv backward from codes {name}", qkv.qkv_rope_backward)(
            [heads] * 3, [y_codes], [y_scale], *norm, 128, bf16
        )
        case(f"mlp backward from codes {name}", mlp_activation_backward)(
            mlp, *no_adapter, mlp_codes, mlp_scale, 128, bf16
        )
    case("qkv backward", qkv.qkv_rope_backward)([heads] * 3, streams, [], *norm, 128, bf16)
    case("qkv and mlp backward", qkv.qkv_mlp_backward)(
        [heads] * 3, y_codes, y_scale, weights[:2], *norm[1:], mlp, dh, down, mlp_codes, mlp_scale, 128, bf16
    )
    case("mlp, values alone", gelu.mlp_activation)(out, mlp, *no_adapter, "none", "none", "none", 128, bf16)
    case("mlp alone, no adapter", gelu.mlp_activation)(None, mlp, *no_adapter, "e5m2", "per_row", "e4m3", 128, bf16)
    case("mlp backward, no adapter", mlp_activation_backward)(mlp, *no_adapter, mlp, None, 128, bf16)


def _swiglu_cases() -> None:
    """Kernels that read both halves of FLUX.2-klein-4B's MLP: of FLUX.1's cases, those that need most registers."""
    f, rank, fp32, bf16, fp8 = 3 * HIDDEN, 128, torch.float32, torch.bfloat16, FORMATS["e4m3"].dtype
    out, mlp = _empty(1, TOKENS, HIDDEN), _empty(1, TOKENS, 3 * HIDDEN + 2 * f)[..., 3 * HIDDEN :]
    kept = _empty(*mlp.shape, dtype=fp8), _empty(1, TOKENS, 2 * f // 128, dtype=fp32)
    out_kept = _empty(*out.shape, dtype=fp8), _empty(1, TOKENS, HIDDEN // 128, dtype=fp32)
    grad, act = _empty(1, TOKENS, HIDDEN + f)[..., HIDDEN:], "silu_and_mul"
    h, up, down = _empty(1, TOKENS, rank), _empty(2 * f, rank), _empty(rank, HIDDEN + f)
    how = ("e4m3", "per_row", "e4m3", 128, bf16, act)
    case("swiglu and down-projection", mlp_activation_down)(out, mlp, h, up, down, *how)
    case("swiglu backward", mlp_activation_backward)(grad, h, down[:, HIDDEN:], *kept, 128, bf16, act)
    case("swiglu down gradient", mlp_down_gradient)(h, *out_kept, *kept, 128, bf16, fp32, act)


def _mlp_gradient_cases() -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    for rank, name, group in ((16, "e4m3", 128), (24, "e5m2", 128), (64, "e4m3", 256), (256, "e5m2", 16)):
        saved = [
            (_empty(1, TOKENS, width, dtype=FORMATS[name].dtype), _empty(1, TOKENS, width // group, dtype=fp32))
            for width in (HIDDEN, MLP)
        ]
        dh, how = _empty(1, TOKENS, rank), (group, bf16, fp32)
        label = f"mlp down gradient, rank {rank}, {name} 1x{group}"
        case(label, mlp_down_gradient)(dh, *saved[0], *saved[1], *how)
        case(f"{label}, alone", mlp_down_gradient)(dh, None, None, *saved[1], *how)
    values = _empty(1, TOKENS, HIDDEN), None, _empty(1, TOKENS, MLP), None
    case("mlp down gradient from values", mlp_down_gradient)(dh[..., :16], *values, 128, bf16, bf16)
    case("mlp down gradient, attention's values", mlp_down_gradient)(
        dh[..., :16], *values[:2], *saved[1], 16, bf16, fp32
    )


def _lora_cases() -> None:
    joined, bf16, fp32 = [HIDDEN] * 3 + [MLP], torch.bfloat16, torch.float32  # q, k, v and the MLP
    for rank, widths, dtype, dtype_up in (
        (4, [HIDDEN], bf16, fp32),
        (16, [HIDDEN], bf16, fp32),
        (16, joined, bf16, fp32),
        (16, joined, bf16, bf16),
        (16, joined, fp32, fp32),
        (24, joined[:3], bf16, fp32),
        (32, joined, fp32, fp32),
    ):
        dy, h = _empty(1, TOKENS, sum(widths), dtype=dtype), _empty(1, TOKENS, len(widths) * rank, dtype=dtype)
        case(f"lora up, rank {rank}, {len(widths)} linears, {dtype} to {dtype_up}", lora_up_gradients)(
            dy, h, _empty(sum(widths), rank, dtype=dtype), widths, dtype_up
        )


def _adamw_cases() -> None:
    def adamw(
        label: str,
        dtype: torch.dtype,
        kinds: tuple[torch.dtype, torch.dtype],
        numbers: tuple[int, int],
        block: int,
        *,
        stochastic: bool = False,
        table: bool = False,
        draws: bool = False,
    ) -> None:
        size, n = 16 * HIDDEN, -(-16 * HIDDEN // block)
        moments = []
        for kind, count in zip(kinds, numbers, strict=True):
            moments += [_empty(2 * n, block, dtype=kind), _empty(count, 2 * n, dtype=torch.float32)]
        tensors = [_empty(size, dtype=dtype)] * 2
        rows = _empty(2, 3, dtype=torch.float32) if table else None
        drawn, rounded = (_empty(2, 3, dtype=torch.int32) if wanted else None for wanted in (draws, stochastic))
        hyper = [0.1, 0.999, 0.001, 1e-8, 0.99, 0.1, 0.3]
        how = ([0, n], hyper, rows, drawn, rounded, [4 / 7, 0.0, 256.0], False)
        case(f"adamw {label}", fp8_adamw_step)(tensors, tensors, *moments, *how)

    e4m3, e5m2, fp32, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
    integers = (torch.int8, torch.uint8), (1, 2)
    for block in (128, 4096):
        adamw(f"fp32 e4m3 block {block}", fp32, (e4m3, e4m3), (3, 3), block)
    adamw("bf16 e5m2 on the device", bf16, (e5m2, e5m2), (3, 3), 128, table=True)
    adamw("bf16 stochastic", bf16, (e4m3, e4m3), (3, 3), 128, stochastic=True)
    adamw("plain block 16", fp32, (e4m3, e4m3), (1, 1), 16)
    for block in (16, 128, 4096):
        adamw(f"integers block {block}", fp32, *integers, block)
    adamw("integers bf16 on the device", bf16, *integers, 128, stochastic=True, table=True)
    adamw("int8_ratio e4m3", fp32, (torch.int8, e4m3), (1, 3), 128)
    adamw("e4m3 uint8_log", fp32, (e4m3, torch.uint8), (3, 2), 128)
    adamw("e4m3, v drawn", fp32, (e4m3, e4m3), (3, 3), 128, draws=True)
    adamw("bf16 e5m2, v drawn on the device", bf16, (e5m2, e5m2), (3, 3), 4096, table=True, draws=True)
    adamw("plain, v drawn", fp32, (e4m3, e4m3), (1, 1), 16, draws=True)
    adamw("integers, v drawn", fp32, *integers, 128, draws=True)
    adamw("unquantized", fp32, (fp32, fp32), (0, 0), 128)


def _z_image_cases() -> None:
    """As Z-Image's blocks alone make them: RMSNorm, SwiGLU of two linears, each image's own angles."""
    d, f, eps, fp32, bf16 = 3840, 10240, 1e-5, torch.float32, torch.bfloat16
    x, vectors, weight, none = _empty(2, TOKENS, d), _empty(2, 4 * d)[:, :d], _empty(d), ("none", 0)
    kept_scale = _empty(2, TOKENS, d // 128, dtype=fp32)
    for name, fmt in FORMATS.items():
        kept = _empty(2, TOKENS, d, dtype=fmt.dtype), kept_scale, 128
        case(f"z-image: rms norm, saved {name}", norm_modulate_quantize)(
            x, vectors, None, eps, "e4m3", "per_row", name, 128, weight
        )
        case(f"z-image: rms norm from codes {name}", norm_modulate)(*kept, vectors, None, eps, bf16, weight)
        case(f"z-image: rms norm backward from codes {name}", norm_modulate_backward)(
            x, *kept, vectors, eps, x, bf16, weight
        )
        case(f"z-image: gate and norm backward from codes {name}", gated_sum_backward)(
            x, vectors, *kept, bf16, "e5m2", "per_row", weight, eps
        )
    norm = (weight, eps)
    case("z-image: rms norm backward", norm_modulate_backward)(x, x, None, 0, vectors, eps, None, bf16, weight)
    case("z-image: gate and norm", gated_sum)(x, vectors, x, None, None, *none, *norm)
    case("z-image: gate and norm backward", gated_sum_backward)(
        x, vectors, x, None, 0, bf16, "e4m3", "per_tensor", *norm
    )
    for rank, saved in ((16, ("e4m3", 128)), (64, ("e5m2", 16)), (256, ("e4m3", 256)), (16, none)):
        h, up = _empty(2, TOKENS, rank), _empty(d, rank)
        case(f"z-image: gate and norm, rank {rank}, saved {saved[0]}", gated_sum)(x, vectors, x, h, up, *saved, *norm)
    rank, mlp = 128, _empty(2, TOKENS, 2 * f)
    case("z-image: swiglu of two linears", mlp_activation_down)(
        *(None, mlp, _empty(2, TOKENS, 2 * rank), _empty(2 * f, rank), _empty(rank, f)),
        *("e4m3", "per_row", "e4m3", 128, bf16, "silu_and_mul"),
    )
    y, angles, heads = _empty(2, TOKENS, 3 * d), _empty(2, TOKENS, 128, dtype=fp32), _empty(2, TOKENS, 30, 128)
    rope = ([_empty(128)] * 2, angles, angles, eps)
    h, up = _empty(2, TOKENS, 3 * rank), _empty(3 * d, rank)
    case("z-image: qkv, angles of each image", qkv_rope)([y], [], [h], [up], *rope, "e4m3", 128, bf16)
    case("z-image: qkv backward, angles of each image", qkv_rope_backward)(
        [heads] * 3, [y.to(FORMATS["e4m3"].dtype)], [_empty(2, TOKENS, 90, dtype=fp32)], *rope, 128, bf16
    )


for add_cases in (
    *(_quantize_cases, _weight_only_cases, _int8_cases, _nvfp4_cases, _norm_cases, _gate_cases, _qkv_cases),
    *(_mlp_gradient_cases, _swiglu_cases, _z_image_cases, _lora_cases, _adamw_cases),
):
    add_cases()
