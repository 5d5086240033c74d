"""Calls of every launcher at FLUX.1's shapes, on tensors without memory: what compile_kernels.py compiles."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coat_core import ops
from coat_core.formats import FORMATS
from coat_core.ops.adamw_kernel import fp8_adamw_step
from coat_core.ops.device import cast_by_amax
from coat_core.ops.gate_kernel import gated_sum, gated_sum_backward
from coat_core.ops.gelu_kernel import mlp_activation, mlp_activation_backward, mlp_activation_down, mlp_down_gradient
from coat_core.ops.lora_kernel import lora_up_gradients
from coat_core.ops.norm_kernel import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.ops.qkv_kernel import qkv_mlp_backward, qkv_rope, qkv_rope_backward
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
FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
E4M3, E5M2 = FORMATS["e4m3"].dtype, FORMATS["e5m2"].dtype
NO_ADAPTER = (None, None)


def launcher_modules() -> list[Any]:
    return [importlib.import_module(f"{ops.__name__}.{found.name}") for found in pkgutil.iter_modules(ops.__path__)]


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(width: int, dtype: torch.dtype = BF16, images: int = 1) -> Tensor:
    """Of all tokens."""
    return _empty(images, TOKENS, width, dtype=dtype)


def _saved(width: int, name: str = "e4m3", group: int = 128, images: int = 1) -> tuple[Tensor, Tensor]:
    """Codes of all tokens, and the scales of their groups."""
    return _rows(width, FORMATS[name].dtype, images), _rows(width // group, FP32, images)


CASES: dict[str, Callable[[], Any]] = {}


def case(name: str, launch: Callable[..., Any], *args: Any) -> None:
    CASES[name] = partial(launch, *args)


def _quantize_cases() -> None:
    x, wide, row_scale = _empty(TOKENS, HIDDEN), _empty(TOKENS, MLP), _empty(TOKENS, 1, dtype=FP32)
    for name, fmt in FORMATS.items():
        codes = _empty(TOKENS, HIDDEN, dtype=fmt.dtype)
        case(f"quantize per tensor {name}", quantize, x, name, "per_tensor", 128, None)
        case(f"quantize per row {name}", quantize, wide, name, "per_row", 128, None)
        for group in (16, 128, 256) if name == "e4m3" else (128,):
            case(f"quantize 1x{group} {name}", quantize, x, name, "per_group", group, None)
            scale = _empty(TOKENS, HIDDEN // group, dtype=FP32)
            case(f"dequantize 1x{group} {name}", dequantize, codes, scale, "per_group", group, BF16)
        case(f"dequantize per row {name}", dequantize, codes, row_scale, "per_row", 128, BF16)
    narrow, factors = _empty(8, 64, dtype=FP32), _empty(HIDDEN, dtype=FP32)
    for granularity in ("per_row", "per_tensor", "per_group"):
        case(f"quantize fp32 {granularity} e4m3", quantize, narrow, "e4m3", granularity, 128, None)
    case("dequantize to fp32", dequantize, codes, _empty(dtype=FP32), "per_tensor", 128, FP32)
    joined = _empty(TOKENS, 3 * HIDDEN + MLP), _empty(3 * HIDDEN + MLP, dtype=FP32)  # q, k, v and the MLP
    case("quantize with factors per row e5m2", quantize, joined[0], "e5m2", "per_row", 128, joined[1])
    case("quantize with factors per tensor e5m2", quantize, x, "e5m2", "per_tensor", 128, factors)
    case("cast by amax e4m3", cast_by_amax, x, row_scale.view(-1), "e4m3")
    case("transpose", transpose_codes, codes)
    joint = _rows(HIDDEN + 16)[:, 512:, :HIDDEN]  # a stream's rows
    for *spec, saved, group in (
        ("e4m3", "per_row", "e4m3", 128),
        ("e5m2", "per_tensor", "e5m2", 16),
        ("e4m3", "per_row", "e4m3", 256),
        ("none", "none", "e4m3", 128),
        ("e4m3", "per_row", "none", 128),
        ("e5m2", "per_row", "e5m2", 128),
    ):
        case(f"quantize {' '.join(spec)} and save {saved}", quantize_and_save, joint, *spec, saved, group)


def _weight_only_cases() -> None:
    bias, wide = _empty(6 * HIDDEN), 3 * HIDDEN + MLP
    for name, batch in (("e4m3", 1), ("e4m3", 4), ("e5m2", 4)):
        weight = _empty(6 * HIDDEN, HIDDEN, dtype=FORMATS[name].dtype), _empty(dtype=FP32), bias
        case(f"weight only, batch {batch} {name}", weight_only_linear, _empty(batch, HIDDEN), *weight, BF16)
    case("rotate", rotate, _empty(TOKENS, HIDDEN), 256)
    case("rotate blocks of 64", rotate, _empty(TOKENS, 64), 64)
    case("rotate fp32", rotate, _empty(8, 64, dtype=FP32), 64)
    case("quantize int8", quantize_int8, _rows(HIDDEN + MLP), 256, None)
    case("quantize int8 of blocks of 64", quantize_int8, _empty(TOKENS, 64), 64, None)
    case("quantize int8 fp32", quantize_int8, _empty(8, HIDDEN, dtype=FP32), 256, None)
    case("quantize int8 with factors", quantize_int8, _empty(TOKENS, wide), 256, _empty(wide, dtype=FP32))
    codes, scale = _empty(6 * HIDDEN, HIDDEN, dtype=INT8), _empty(6 * HIDDEN, 1, dtype=FP32)
    case("dequantize per row int8", dequantize, codes, scale, "per_row", 128, BF16)
    for batch in (1, 4):
        case(f"weight only, batch {batch} int8", weight_only_linear, _empty(batch, HIDDEN), codes, scale, None, BF16)
    for m, n, k in ((TOKENS, wide, HIDDEN), (512, HIDDEN, MLP)):
        a, b = ((_empty(rows, k, dtype=INT8), _empty(rows, 1, dtype=FP32)) for rows in (m, n))
        for rotation in (64, 256):
            how = BF16, True, rotation
            case(f"int8 gemm {m}x{n}x{k} rotated by {rotation}", int8_mm, *a, *b, None, *how)
            case(f"int8 gemm {m}x{n}x{k} rotated by {rotation}, and bias", int8_mm, *a, *b, _empty(n), *how)
    codes, scales = (_empty(3 * HIDDEN, HIDDEN // size, dtype=torch.uint8) for size in (2, 16))
    case("decode nvfp4", decode_nvfp4, codes, scales, False)
    case("decode nvfp4, transposed", decode_nvfp4, codes, scales, True)


def _gate_cases() -> None:
    x, modulation, saved = _rows(HIDDEN), _empty(1, HIDDEN), _saved(HIDDEN)
    case("gate", gated_sum, x, modulation, x, *NO_ADAPTER, "none", 0)
    case("gate, saved", gated_sum, x, modulation, x, *NO_ADAPTER, "e4m3", 128)
    for rank, form in ((16, ("e4m3", 128)), (64, ("e5m2", 16)), (256, ("e4m3", 256)), (16, ("none", 0))):
        adapter = _rows(4 * rank)[..., :rank], _empty(HIDDEN, rank)
        case(f"gate, rank {rank}, saved {form[0]}", gated_sum, x, modulation, x, *adapter, *form)
    args = (x, modulation, _rows(HIDDEN, E5M2), saved[1], 128, BF16, "e5m2", "per_tensor")
    case("gate backward bf16 from codes e5m2 per_tensor", gated_sum_backward, *args)
    for spec in (("e4m3", "none"), ("e4m3", "per_row"), ("e5m2", "per_row"), ("e4m3", "per_tensor")):
        results = {"from codes": saved}
        if spec[1] == "none":
            results = {"from values": (x, None), "alone": (None, None)}
        for name, result in results.items():
            args = (_rows(HIDDEN, FP32), modulation, *result, 128, BF16, *spec)
            case(f"gate backward {name} {' '.join(spec)}", gated_sum_backward, *args)


def _norm_cases() -> None:
    x, modulation, eps = _rows(HIDDEN), _empty(1, 6 * HIDDEN)[:, :HIDDEN], 1e-6
    for fmt, granularity, saved, group in (
        ("e4m3", "none", "none", 0),
        ("e4m3", "per_row", "none", 0),
        ("e4m3", "per_row", "e4m3", 128),
        ("e5m2", "per_row", "e5m2", 16),
        ("e4m3", "per_tensor", "e4m3", 256),
    ):
        args = (x, modulation, modulation, eps, fmt, granularity, saved, group)
        case(f"norm {fmt} {granularity}, saved {saved} 1x{group}", norm_modulate_quantize, *args)
    case("norm backward", norm_modulate_backward, _rows(HIDDEN, FP32), x, None, 0, modulation, eps, None, BF16)
    case("norm backward bf16", norm_modulate_backward, x, x, None, 0, modulation, eps, x, BF16)
    for name in FORMATS:
        codes = (*_saved(HIDDEN, name), 128)
        case(f"norm from codes {name}", norm_modulate, *codes, modulation, modulation, eps, BF16)
        case(f"norm backward from codes {name}", norm_modulate_backward, x, *codes, modulation, eps, x, BF16)


def _qkv_cases() -> None:
    wide, heads, out = _rows(3 * HIDDEN + MLP), [_empty(1, TOKENS, 24, 128)] * 3, _rows(HIDDEN)
    y, mlp = wide[..., : 3 * HIDDEN], wide[..., 3 * HIDDEN :]
    angles = _empty(TOKENS, 128, dtype=FP32)
    norm, norm_of_one = (([_empty(128)] * weights, angles, angles, 1e-6) for weights in (4, 2))
    streams = [_empty(1, 512, 3 * HIDDEN), _empty(1, 4096, 3 * HIDDEN)]
    mlp_saved = _saved(MLP)
    for rank, form in ((16, "e4m3"), (24, "e5m2"), (64, "e4m3"), (128, "e4m3")):
        hs, ups = [_empty(1, x.shape[1], 3 * rank) for x in streams], [_empty(3 * HIDDEN, rank)] * 2
        both = _rows(4 * rank)  # q, k, v and the MLP's
        label, how = f"rank {rank}, {form}", (form, 128, BF16)
        case(f"qkv, double block, {label}", qkv_rope, streams, [], hs, ups, *norm, *how)
        case(f"qkv, single block, {label}", qkv_rope, [y], [], [both[..., : 3 * rank]], ups[:1], *norm, *how)
        adapted = (mlp, both[..., 3 * rank :], _empty(MLP, rank))
        case(f"mlp, {label}", mlp_activation, out, *adapted, "e4m3", "per_row", *how)
        down = _empty(rank, HIDDEN + MLP)
        case(f"mlp and down-projection, {label}", mlp_activation_down, out, *adapted, down, "e4m3", "per_row", *how)
        back = (mlp, both[..., :rank], down[:, HIDDEN:])
        case(f"mlp backward, rank {rank}", mlp_activation_backward, *back, *mlp_saved, 128, BF16)
    plain = (mlp, *NO_ADAPTER)
    for group in (16, 256):
        label, how = f"groups of {group}", (group, BF16)
        case(f"qkv, {label}", qkv_rope, [y], [], [], [], *norm, "e4m3", *how)
        case(f"mlp, {label}", mlp_activation, out, *plain, "e4m3", "per_tensor", "e4m3", *how)
        args = (None, *plain, _empty(256, MLP), "e5m2", "per_tensor", "e5m2", *how)
        case(f"mlp and down-projection alone, {label}", mlp_activation_down, *args)
    narrow_down = _empty(16, HIDDEN + MLP)
    args = (out, *adapted, narrow_down, "e4m3", "per_row", "e4m3", 256, BF16)
    case("mlp and down-projection, groups of 256", mlp_activation_down, *args)
    for form in FORMATS:  # images are drawn without saving anything
        args = (out, *plain, narrow_down, form, "per_row", "none", 128, BF16)
        case(f"mlp and down-projection, nothing saved, {form}", mlp_activation_down, *args)
    fp32 = [_empty(*x.shape, dtype=FP32) for x in (out, *adapted, down)]
    case("mlp and down-projection in fp32", mlp_activation_down, *fp32, "e4m3", "per_row", "e4m3", 128, FP32)
    y_scale = _rows(72, FP32)
    for name, fmt in FORMATS.items():
        codes = [_rows(3 * HIDDEN, fmt.dtype)], [y_scale]
        case(f"qkv from codes {name}", qkv_rope, *codes, [], [], *norm, "none", 128, BF16)
        case(f"qkv backward from codes {name}", qkv_rope_backward, heads, *codes, *norm, 128, BF16)
        saved = _saved(MLP, name)
        case(f"mlp backward from codes {name}", mlp_activation_backward, *plain, *saved, 128, BF16)
    case("qkv backward", qkv_rope_backward, heads, streams, [], *norm, 128, BF16)
    args = (heads, codes[0][0], y_scale, *norm_of_one, *back, *saved, 128, BF16)
    case("qkv and mlp backward", qkv_mlp_backward, *args)
    case("mlp, values alone", mlp_activation, out, *plain, "none", "none", "none", 128, BF16)
    case("mlp alone, no adapter", mlp_activation, None, *plain, "e5m2", "per_row", "e4m3", 128, BF16)
    case("mlp backward, no adapter", mlp_activation_backward, *plain, mlp, None, 128, BF16)


def _mlp_gradient_cases() -> None:
    for rank, name, group in ((16, "e4m3", 128), (24, "e5m2", 128), (64, "e4m3", 256), (256, "e5m2", 16)):
        attention, mlp = (_saved(width, name, group) for width in (HIDDEN, MLP))
        dh, how = _rows(rank), (group, BF16, FP32)
        label = f"mlp down gradient, rank {rank}, {name} 1x{group}"
        case(label, mlp_down_gradient, dh, *attention, *mlp, *how)
        case(f"{label}, alone", mlp_down_gradient, dh, None, None, *mlp, *how)
    dh, out = dh[..., :16], _rows(HIDDEN)
    case("mlp down gradient from values", mlp_down_gradient, dh, out, None, _rows(MLP), None, 128, BF16, BF16)
    case("mlp down gradient, attention's values", mlp_down_gradient, dh, out, None, *mlp, *how)


def _swiglu_cases() -> None:
    """Kernels that read both halves of FLUX.2-klein-4B's MLP: of FLUX.1's cases, those that need most registers."""
    f, rank, swiglu = 3 * HIDDEN, 128, (128, BF16, "silu_and_mul")
    mlp, grad = _rows(3 * HIDDEN + 2 * f)[..., 3 * HIDDEN :], _rows(HIDDEN + f)[..., HIDDEN:]
    h, up, down, saved = _rows(rank), _empty(2 * f, rank), _empty(rank, HIDDEN + f), _saved(2 * f)
    args = (_rows(HIDDEN), mlp, h, up, down, "e4m3", "per_row", "e4m3", *swiglu)
    case("swiglu and down-projection", mlp_activation_down, *args)
    case("swiglu backward", mlp_activation_backward, grad, h, down[:, HIDDEN:], *saved, *swiglu)
    args = (h, *_saved(HIDDEN), *saved, 128, BF16, FP32, "silu_and_mul")
    case("swiglu down gradient", mlp_down_gradient, *args)


def _lora_cases() -> None:
    joined = [HIDDEN] * 3 + [MLP]  # q, k, v and the MLP
    for rank, widths, dtype, dtype_up in (
        (4, [HIDDEN], BF16, FP32),
        (16, [HIDDEN], BF16, FP32),
        (16, joined, BF16, FP32),
        (16, joined, BF16, BF16),
        (16, joined, FP32, FP32),
        (24, joined[:3], BF16, FP32),
        (32, joined, FP32, FP32),
    ):
        dy, h = _rows(sum(widths), dtype), _rows(len(widths) * rank, dtype)
        args = (dy, h, _empty(sum(widths), rank, dtype=dtype), widths, dtype_up)
        case(f"lora up, rank {rank}, {len(widths)} linears, {dtype} to {dtype_up}", lora_up_gradients, *args)


def _adamw_cases() -> None:
    expanded = ((E4M3, 3), (E4M3, 3))  # codes of both moments, and how many rows of numbers they have
    of_e5m2, plain, integers = ((E5M2, 3), (E5M2, 3)), ((E4M3, 1), (E4M3, 1)), ((INT8, 1), (torch.uint8, 2))
    for label, dtype, moments, block, *given in (  # given: a table of numbers, draws for moments and for parameters
        ("fp32 e4m3 block 128", FP32, expanded, 128),
        ("fp32 e4m3 block 4096", FP32, expanded, 4096),
        ("bf16 e5m2 on the device", BF16, of_e5m2, 128, "table"),
        ("bf16 stochastic", BF16, expanded, 128, "rounded"),
        ("plain block 16", FP32, plain, 16),
        ("integers block 16", FP32, integers, 16),
        ("integers block 128", FP32, integers, 128),
        ("integers block 4096", FP32, integers, 4096),
        ("integers bf16 on the device", BF16, integers, 128, "table", "rounded"),
        ("int8_ratio e4m3", FP32, ((INT8, 1), (E4M3, 3)), 128),
        ("e4m3 uint8_log", FP32, ((E4M3, 3), (torch.uint8, 2)), 128),
        ("e4m3, v drawn", FP32, expanded, 128, "drawn"),
        ("bf16 e5m2, v drawn on the device", BF16, of_e5m2, 4096, "table", "drawn"),
        ("plain, v drawn", FP32, plain, 16, "drawn"),
        ("integers, v drawn", FP32, integers, 128, "drawn"),
        ("unquantized", FP32, ((FP32, 0), (FP32, 0)), 128),
    ):
        n = -(-16 * HIDDEN // block)
        states = []
        for kind, count in moments:
            states += [_empty(2 * n, block, dtype=kind), _empty(count, 2 * n, dtype=FP32)]
        tensors = [_empty(16 * HIDDEN, dtype=dtype)] * 2
        kinds = {"table": FP32, "drawn": torch.int32, "rounded": torch.int32}
        rows = [_empty(2, 3, dtype=kind) if name in given else None for name, kind in kinds.items()]
        hyper = [0.1, 0.999, 0.001, 1e-8, 0.99, 0.1, 0.3]
        args = (tensors, tensors, *states, [0, n], hyper, *rows, [4 / 7, 0.0, 256.0], False)
        case(f"adamw {label}", fp8_adamw_step, *args)


def _z_image_cases() -> None:
    """As Z-Image's blocks alone make them: RMSNorm, SwiGLU of two linears, each image's own angles; Krea 2's groups."""
    d, f, eps, none = 3840, 10240, 1e-5, ("none", 0)
    x, vectors, weight = _rows(d, images=2), _empty(2, 4 * d)[:, :d], _empty(d)
    norm, modulation = (weight, eps), (vectors, None, eps)
    for name in FORMATS:
        saved = (*_saved(d, name, images=2), 128)
        args = (x, *modulation, "e4m3", "per_row", name, 128, weight)
        case(f"z-image: rms norm, saved {name}", norm_modulate_quantize, *args)
        case(f"z-image: rms norm from codes {name}", norm_modulate, *saved, *modulation, BF16, weight)
        args = (x, *saved, vectors, eps, x, BF16, weight)
        case(f"z-image: rms norm backward from codes {name}", norm_modulate_backward, *args)
        args = (x, vectors, *saved, BF16, "e5m2", "per_row", *norm)
        case(f"z-image: gate and norm backward from codes {name}", gated_sum_backward, *args)
    case("z-image: rms norm backward", norm_modulate_backward, x, x, None, 0, vectors, eps, None, BF16, weight)
    case("z-image: gate and norm", gated_sum, x, vectors, x, *NO_ADAPTER, *none, *norm)
    args = (x, vectors, x, None, 0, BF16, "e4m3", "per_tensor", *norm)
    case("z-image: gate and norm backward", gated_sum_backward, *args)
    for rank, form in ((16, ("e4m3", 128)), (64, ("e5m2", 16)), (256, ("e4m3", 256)), (16, none)):
        args = (x, vectors, x, _rows(rank, images=2), _empty(d, rank), *form, *norm)
        case(f"z-image: gate and norm, rank {rank}, saved {form[0]}", gated_sum, *args)
    rank = 128
    adapted = (_rows(2 * f, images=2), _rows(2 * rank, images=2), _empty(2 * f, rank), _empty(rank, f))
    args = (None, *adapted, "e4m3", "per_row", "e4m3", 128, BF16, "silu_and_mul")
    case("z-image: swiglu of two linears", mlp_activation_down, *args)
    angles, heads = _rows(128, FP32, images=2), [_empty(2, TOKENS, 30, 128)] * 3
    rope = ([_empty(128)] * 2, angles, angles, eps)
    adapted = ([_rows(3 * d, images=2)], [], [_rows(3 * rank, images=2)], [_empty(3 * d, rank)])
    case("z-image: qkv, angles of each image", qkv_rope, *adapted, *rope, "e4m3", 128, BF16)
    codes, scale = _saved(3 * d, images=2)
    case("z-image: qkv backward, angles of each image", qkv_rope_backward, heads, [codes], [scale], *rope, 128, BF16)
    grouped, rope = [_rows(72 * 128)], ([_empty(128)] * 2, angles[0], angles[0], eps)
    case("krea 2: qkv", qkv_rope, grouped, [], [], [], *rope, "e4m3", 128, BF16, 4)
    codes, scale = _saved(72 * 128)
    heads = [_empty(1, TOKENS, count, 128) for count in (48, 12, 12)]
    case("krea 2: qkv backward", qkv_rope_backward, heads, [codes], [scale], *rope, 128, BF16)


def _int8_cases() -> None:
    """Kernels that write rotated INT8 codes, and the product that turns a gradient back."""
    x, modulation, saved, how = _rows(HIDDEN), _empty(1, HIDDEN), _saved(HIDDEN), ("int8", "per_row", "e4m3", 128)
    case("int8: quantize and save", quantize_and_save, _rows(HIDDEN + 16)[:, 512:, :HIDDEN], *how)
    case("int8: norm", norm_modulate_quantize, x, modulation, modulation, 1e-6, *how)
    factors = _empty(HIDDEN, dtype=FP32)
    args = (x, modulation, *saved, 128, BF16, "int8", "per_row", None, 0.0, factors)
    case("int8: gate backward with factors", gated_sum_backward, *args)
    wide = _rows(3 * HIDDEN + MLP)
    for rank in (16, 24, 64, 128):
        adapted = wide[..., 3 * HIDDEN :], _rows(4 * rank)[..., 3 * rank :], _empty(MLP, rank)
        down = _empty(rank, HIDDEN + MLP)
        case(f"int8: mlp and down-projection, rank {rank}", mlp_activation_down, x, *adapted, down, *how, BF16)
    turned, one = _empty(MLP, HIDDEN, dtype=INT8).t(), _empty(dtype=FP32)
    for rows in (TOKENS, 512):
        grad = _empty(rows, MLP, dtype=INT8), _empty(rows, 1, dtype=FP32)
        case(f"int8: gemm, dgrad, {rows} rows", int8_mm, *grad, turned, one, None, BF16, False, 256)


for add_cases in (
    *(_quantize_cases, _weight_only_cases, _norm_cases, _gate_cases, _qkv_cases),
    *(_mlp_gradient_cases, _swiglu_cases, _z_image_cases, _lora_cases, _adamw_cases, _int8_cases),
):
    add_cases()
