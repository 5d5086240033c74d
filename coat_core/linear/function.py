"""y = x Wᵀ + b with W in FP8, and its gradients, as autograd functions.

    fprop   y  = (x_q · s_x)(W_q · s_W)ᵀ + b
    dgrad   dx = (dy_q · s_dy)(W_q · s_W)          dy_q in `grad_format`
    wgrad   dW = dyᵀ (x_q · s_x)                   trainable weights only; from the FP8 x
            dW = ((dy · s_x)ᵀ_q · s_t) x_q         the same as an FP8 product, with `wgrad_format`

With W in INT8, x, dy and W are rotated before they are rounded, y and dx after their products (`int8.py`):

    fprop   y  = ((x H)_q · s_x)((H W H)_q · s_W)ᵀ H + b
    dgrad   dx = ((dy H)_q · s_dy)((H W H)_q · s_W) H

A frozen W needs no x for dgrad, so `fp8_linear` saves nothing, or a reference to the codes of W. A per-row scale of W
is on dgrad's contraction axis, so it is multiplied into dy before dy is cast. Tensor cores of sm_89 and sm_90 read W
along its rows only, so dgrad needs Wᵀ [K, N]: a second copy of the codes, or one made at each use.

wgrad sums over tokens, where a scale per token s_x [M, 1] cannot be taken out of the sum. It is multiplied into dy
before dy is cast along its tokens, with one scale s_t [N, 1] per output feature: the saved codes of x are reused, and
dy's cast is the only rounding added. dgrad's codes of dy, scaled per token, would not work.

A frozen W is stored in buffers whose dtype is uint8 or int32 (`BUFFERS`): `module.to(torch.bfloat16)`, which trainers
call at will, casts every floating buffer and would silently turn FP8 codes and fp32 scales into bf16.

Shapes: M tokens, K in, N out. x [..., K], W [N, K], y [..., N].
Source: arXiv 2410.19313, section 5; the frozen-weight case is LoRA's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from coat_core import nvfp4
from coat_core.autograd import autocast_is_on, first_order_only, refuse_second_order
from coat_core.config import FP8LinearConfig
from coat_core.formats import INT8, NVFP4, get_format, product_format
from coat_core.granularity import PER_ROW, PER_TENSOR, Granularity, Storage
from coat_core.int8 import rotation_size
from coat_core.ops.quantize import (
    decode_nvfp4,
    dequantize,
    quantize,
    quantize_once,
    read_saved_input,
    rotate,
    saved_input,
    transpose_codes,
)
from coat_core.ops.scaled_mm import (
    ALIGNMENT,
    int8_mm,
    int8_unsupported_reason,
    scaled_mm,
    unsupported_reason,
    weight_only_linear,
)
from coat_core.quantize import Quantized

# --- a frozen weight ---

CODES, SCALE, BLOCK_SCALES = "weight_codes", "weight_scale_bits", "weight_block_scales"
TRANSPOSED = "weight_codes_transposed"
BUFFERS = (CODES, SCALE, BLOCK_SCALES, TRANSPOSED)
# of those that several linears can have as one, the dimension along which their outputs follow each other
OUTPUT_DIM = {CODES: 0, BLOCK_SCALES: 0, TRANSPOSED: 1}


class StoredWeight(NamedTuple):
    """Views of a module's buffers: (decoded) codes · scale is W, or H W H for INT8."""

    codes: Tensor  # FP8 or INT8 [N, K]; of nvfp4, uint8 [N, K/2]
    scale: Tensor  # fp32 [] or [N, 1]
    transposed: Tensor | None = None  # FP8 codes as a contiguous [K, N] for dgrad, where there is such a copy
    block_scales: Tensor | None = None  # of nvfp4, uint8 [N, K/16]; else None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k if self.block_scales is None else 2 * k

    @property
    def rotations(self) -> tuple[int, int]:
        """Sizes of the blocks in which rows and columns are rotated (`int8.py`); 1: none."""
        if self.codes.dtype != INT8.dtype:
            return 1, 1
        n, k = self.shape
        return rotation_size(n), rotation_size(k)

    def for_fprop(self) -> Tensor:
        """Return FP8 or INT8 codes [N, K], to be multiplied by `scale`."""
        return self.codes if self.block_scales is None else decode_nvfp4(self.codes, self.block_scales, False)

    def for_dgrad(self) -> Tensor:
        """Return FP8 or INT8 codes [K, N], contiguous unless they are a view of `codes`."""
        if self.block_scales is not None:
            return decode_nvfp4(self.codes, self.block_scales, True)
        return self.codes.t() if self.transposed is None else self.transposed

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return W [N, K] in `dtype`."""
        values = dequantize(self.for_fprop(), self.scale, PER_ROW if self.scale.ndim else PER_TENSOR, dtype)
        rows, columns = self.rotations
        if columns > 1:
            values = rotate(values, columns)
        return values if rows == 1 else rotate(values.t(), rows).t().contiguous()


def quantize_weight(weight: Tensor, config: FP8LinearConfig) -> StoredWeight:
    """Quantize W [N, K] as the configuration says."""
    if config.weight_format == NVFP4:
        codes, block_scales, scale = nvfp4.quantize(weight)
        return StoredWeight(codes, scale, None, block_scales)
    granularity = PER_ROW if config.weight_has_row_scales else PER_TENSOR
    if config.weight_format == INT8.name:
        weight = rotate(weight.detach().t(), rotation_size(len(weight))).t()
    codes, scale, _ = quantize(weight, config.weight_format, granularity)
    return StoredWeight(codes, scale)


def weight_buffers(weight: Tensor | StoredWeight, config: FP8LinearConfig) -> dict[str, Tensor]:
    """The buffers that store W [N, K], by name; it is quantized unless it is already."""
    stored = weight if isinstance(weight, StoredWeight) else quantize_weight(weight, config)
    buffers = {CODES: stored.codes.view(torch.uint8), SCALE: stored.scale.view(torch.int32)}
    if stored.block_scales is not None:
        buffers[BLOCK_SCALES] = stored.block_scales
    return buffers


def store_weight(
    module: nn.Module, weight: Tensor | StoredWeight, config: FP8LinearConfig, persistent: bool = True
) -> None:
    """Register `weight` [N, K] on `module`, quantized unless it is already, replacing a stored one."""
    buffers = weight_buffers(weight, config)
    drop_weight(module)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent)


def drop_weight(module: nn.Module) -> None:
    """Undo `store_weight`."""
    for name in BUFFERS:
        if name in module._buffers:
            delattr(module, name)


def load_weight(module: nn.Module, config: FP8LinearConfig) -> StoredWeight:
    """The weight that `store_weight` registered, as views."""
    bits = module._buffers[SCALE]
    assert bits is not None
    return as_stored(module._buffers, bits.view(torch.float32), config)


def read_weight(module: nn.Module, config: FP8LinearConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return W [N, K] in `dtype` at any time: `module.fetch_weight` brings codes that are offloaded."""
    if (fetch := vars(module).get("fetch_weight")) is not None:
        fetch()
    return load_weight(module, config).dequantize(dtype)


def as_stored(buffers: Mapping[str, Tensor | None], scale: Tensor, config: FP8LinearConfig) -> StoredWeight:
    """The weight in these buffers, with `scale` fp32 [] or [N, 1]."""
    codes, transposed = buffers[CODES], buffers.get(TRANSPOSED)
    assert codes is not None
    if config.weight_format == NVFP4:
        return StoredWeight(codes, scale, None, buffers[BLOCK_SCALES])
    dtype = product_format(config.weight_format).dtype
    return StoredWeight(codes.view(dtype), scale, None if transposed is None else transposed.view(dtype))


@functools.lru_cache(maxsize=256)
def stored_bytes(outputs: int, inputs: int, config: FP8LinearConfig) -> dict[str, int]:
    """The bytes of each buffer of a stored weight [N, K], without a transposed copy."""
    buffers = weight_buffers(torch.empty(outputs, inputs, device="meta"), config)
    return {name: buffer.nbytes for name, buffer in buffers.items()}


def wants_transposed(config: FP8LinearConfig) -> bool:
    """Whether dgrad needs the 8-bit codes transposed; other formats are decoded to either layout."""
    return config.use_fp8_gemm and config.grad_format != "bf16" and config.weight_format != NVFP4


def keep_transposed(module: nn.Module, config: FP8LinearConfig) -> None:
    """Store a second copy of the codes as [K, N], for dgrad, outside the state dict."""
    codes = load_weight(module, config).codes
    module.register_buffer(TRANSPOSED, transpose_codes(codes).view(torch.uint8), persistent=False)


# --- a trained weight ---


class TrainedCodes:
    """The FP8 codes of a weight being trained: cast once per version of the weight, or at each use.

    Between two optimizer steps all micro-batches, their recomputation and dgrad can read one cast of W. A version is
    the parameter's storage and autograd's count of in-place changes, plus every optimizer step: fused AdamW and writes
    through `param.data` do not count in autograd.

    Not counted: other writes through `.data`, replays of a CUDA graph that holds the optimizer's step, and FSDP2, which
    gathers a weight into the same storage. Call `forget_codes` after each, or leave `cache_weight` off.
    Compiled code and CUDA graphs always cast: they would record no cast and read old codes.
    """

    codes: Tensor | None = None
    scale: Tensor | None = None
    _made_from: tuple[Any, ...] = ()

    def cast(self, weight: Tensor, config: FP8LinearConfig) -> StoredWeight:
        """Return W [N, K] as FP8 codes and scales, cached while the weight does not change."""
        if not config.cache_weight:
            self.forget()
            return quantize_weight(weight, config)
        is_recorded = torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        if is_recorded or torch.is_inference_mode_enabled() or weight.is_inference():
            return quantize_weight(weight, config)  # inference tensors count no changes, and cannot be saved later

        storage = StorageWeakRef(weight.untyped_storage())  # holds the address: no other storage can get it
        stored_as = config.weight_format, config.weight_granularity
        made_from = storage, weight.storage_offset(), weight._version, weight.dtype, stored_as

        if self.codes is None or self.scale is None or self._made_from != made_from:
            _register_once(_count_optimizer_step)
            self.forget()  # the old codes first, so that there is never a second copy
            stored = quantize_weight(weight, config)
            self.codes, self.scale, self._made_from = stored.codes, stored.scale, made_from
        return StoredWeight(self.codes, self.scale)

    def forget(self) -> None:
        """Free the codes; the next use casts the weight."""
        self.codes = self.scale = None
        self._made_from = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainedCodes, ()  # a copy or a pickle of a module casts for itself


def forget_codes(model: nn.Module) -> None:
    """Free the codes of a model's trained FP8 linears after changes that `TrainedCodes` does not count."""
    for module in model.modules():
        codes = vars(module).get("trained_codes")
        if isinstance(codes, TrainedCodes):
            codes.forget()


_register_once = functools.cache(register_optimizer_step_post_hook)


def _count_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        increment_version([param for param in group["params"] if not param.is_inference()])


# --- products ---


@functools.cache
def input_storage(config: FP8LinearConfig) -> Storage:
    """Format and granularity of x in the GEMM."""
    return Storage(config.input_format, Granularity(config.input_granularity))


def fp8_gemm_obstacle(device: torch.device, config: FP8LinearConfig) -> str | None:
    """Why `config` cannot run as FP8 GEMMs on `device` (fprop, dgrad or wgrad), or None."""
    if device.type == "meta":
        return None
    if config.weight_format == INT8.name:
        return int8_unsupported_reason(device)
    x, weight = get_format(config.input_format), product_format(config.weight_format)
    row_wise = config.input_granularity == "per_row"
    products = [(x, weight, row_wise or config.weight_granularity == "per_row")]
    if config.grad_format != "bf16":
        products.append((get_format(config.grad_format), weight, row_wise))
    if config.wgrad_format != "bf16":
        products.append((get_format(config.wgrad_format), x, True))
    for a, b, scaled_by_row in products:
        reason = unsupported_reason(device, a.dtype, b.dtype, scaled_by_row)
        if reason is not None:
            return reason
    return None


def wants_fp8_gemm(device: torch.device, config: FP8LinearConfig) -> bool:
    """Whether this device multiplies in FP8; RuntimeError if it cannot and `config.fallback` is "error"."""
    if not config.use_fp8_gemm:
        return False
    obstacle = fp8_gemm_obstacle(device, config)
    if obstacle is not None and config.fallback == "error":
        raise RuntimeError(f"fallback='error': {obstacle}; set fallback: bf16 or change the formats")
    return obstacle is None


def _rows(x: Tensor) -> Tensor:
    """View x [..., K] as [M, K], with less work for torch than a reshape."""
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def multiply(
    a: Quantized,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    forward: bool = False,
    rotation: int = 1,
) -> Tensor:
    """Return (a)(weight · scale)ᵀ + bias, [..., N], in INT8 rotated before the bias; `forward` as in `scaled_mm`."""
    lead = a.codes.shape[:-1]
    a_scale = _rows(a.scale) if a.scale.ndim else a.scale
    args = (_rows(a.codes), a_scale, weight, scale, bias, dtype, forward)
    out: Tensor = int8_mm(*args, rotation) if weight.dtype == INT8.dtype else scaled_mm(*args)
    if len(lead) != 1:  # no view can leave an autograd function
        out = torch.ops.aten._unsafe_view.default(out, (*lead, out.shape[-1]))
    return out


def fprop(
    x: Tensor,
    quantized: Quantized | None,
    weight: StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return y = x Wᵀ + b, outside of autograd; `quantized` is x as codes, or None."""
    rows, columns = weight.rotations
    if quantized is not None:
        return multiply(quantized, weight.for_fprop(), weight.scale, bias, dtype, forward=True, rotation=rows)
    if weight.rotations == (1, 1):
        y: Tensor = weight_only_linear(x, weight.for_fprop(), weight.scale, bias, dtype)
        return y
    rotated = weight_only_linear(rotate(x, columns), weight.for_fprop(), weight.scale, None, dtype)
    y = rotate(rotated, rows)
    return y if bias is None else y + bias.to(dtype)


def dgrad(
    grad: Tensor,
    weight: StoredWeight,
    config: FP8LinearConfig,
    in_fp8: bool,
    quantized: Quantized | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """Return dx = dy W [..., K]; `quantized` is dy · W's row scales as codes; `unit` a cached `unit_scale`."""
    if not in_fp8 or config.grad_format == "bf16":
        return grad @ weight.dequantize(grad.dtype)
    if quantized is None:
        factors = weight.scale.reshape(-1) if weight.scale.ndim == 2 else None
        quantized = quantize(grad, config.grad_format, Granularity(config.input_granularity), factors)
    unit = unit_scale(weight.scale) if unit is None else unit
    return multiply(quantized, weight.for_dgrad(), unit, None, grad.dtype, rotation=weight.rotations[1])


def wgrad(grad: Tensor, x: Quantized, config: FP8LinearConfig) -> Tensor:
    """Return dW = dyᵀ x; Gaussian e4m3 × e4m3 at 28 dB, e5m2 × e4m3 at 24 dB or better."""
    if config.wgrad_format == "bf16":
        x_hat = dequantize(x.codes, x.scale, x.granularity, grad.dtype)
        return _rows(grad).t() @ _rows(x_hat)
    dy, bits = _rows(grad), _rows(x.codes).view(torch.uint8)
    factors = x.scale.reshape(-1) if x.scale.ndim else None
    if tail := -dy.shape[0] % ALIGNMENT:  # GEMMs want M aligned: tokens of zeros
        dy, bits = (torch.nn.functional.pad(values, (0, 0, 0, tail)) for values in (dy, bits))
        factors = None if factors is None else torch.nn.functional.pad(factors, (0, tail))
    by_feature = quantize(dy.t(), config.wgrad_format, PER_ROW, factors)
    unit = x.scale if factors is None else torch.ones((), device=dy.device)
    codes = bits.view(x.codes.dtype).t()
    dw: Tensor = scaled_mm(by_feature.codes, by_feature.scale, codes, unit, None, grad.dtype)
    return dw


def unit_scale(scale: Tensor) -> Tensor:
    """The scale of W in dgrad's product: 1 for row scales [N, 1], which go into dy before its cast."""
    return scale.new_ones(()) if scale.ndim == 2 else scale


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantized: Quantized | None,
        weight: StoredWeight | Callable[[], StoredWeight],
        bias: Tensor | None,
        config: FP8LinearConfig,
        dtype: torch.dtype,
    ) -> Tensor:
        if callable(weight):
            ctx.load, stored = weight, weight()
        else:
            ctx.load, stored = None, weight
            ctx.save_for_backward(*weight)
        ctx.config, ctx.in_fp8, ctx.x_dtype = config, quantized is not None, x.dtype
        return fprop(x, quantized, stored, bias, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.in_fp8:  # else dx is an ordinary product, differentiable any number of times
            refuse_second_order()
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            weight = StoredWeight(*ctx.saved_tensors) if ctx.load is None else ctx.load()
            dx = dgrad(grad, weight, ctx.config, ctx.in_fp8).to(ctx.x_dtype)
        if ctx.needs_input_grad[3]:
            dbias = _rows(grad).sum(0)
        return dx, None, None, dbias, None, None


class _TrainableLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantized: Quantized,
        weight: Tensor,
        bias: Tensor | None,
        config: FP8LinearConfig,
        dtype: torch.dtype,
        codes: TrainedCodes,
    ) -> Tensor:
        ctx.save_for_backward(*saved_input(x, input_storage(config)), weight)
        ctx.config, ctx.codes, ctx.x_dtype = config, codes, x.dtype
        return fprop(x, quantized, codes.cast(weight, config), bias, dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, weight = ctx.saved_tensors
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dgrad(grad, ctx.codes.cast(weight, ctx.config), ctx.config, in_fp8=True).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            x = read_saved_input(saved, input_storage(ctx.config))
            dw = wgrad(grad, x, ctx.config).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            dbias = _rows(grad).sum(0)
        return dx, None, dw, dbias, None, None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """A linear's output dtype: autocast's where autocast is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocast_is_on(device) else x.dtype


def fp8_linear(
    x: Tensor,
    weight: StoredWeight | Callable[[], StoredWeight],
    bias: Tensor | None,
    config: FP8LinearConfig,
) -> Tensor:
    """Linear layer with a frozen weight stored in few bits: y = x Wᵀ + b.

    x: fp32, bf16 or fp16 [..., K]; y [..., N] in the dtype of x (autocast's under autocast). A callable `weight` is
    called again in backward, so nothing keeps W [N, K] alive in between. Raises RuntimeError as `wants_fp8_gemm`.

    Numerics: forward e4m3 × e4m3 of Gaussian data at 28 dB, dgrad e5m2 × e4m3 at 24 dB or better; tests/tolerances.py.
    """
    in_fp8 = wants_fp8_gemm(x.device, config) and x.numel() > 0
    quantized = quantize_once(x, input_storage(config)) if in_fp8 else None
    result: Tensor = _FrozenLinear.apply(x, quantized, weight, bias, config, compute_dtype(x))
    return result


def fp8_trainable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: FP8LinearConfig, codes: TrainedCodes
) -> Tensor:
    """Linear layer whose high precision weight [N, K] is trained: FP8 fprop and dgrad, wgrad from the FP8 x.

    Without FP8 it is torch's own linear. A weight that requires no gradient saves no x. All else as in `fp8_linear`.
    """
    if not wants_fp8_gemm(x.device, config) or not x.numel():
        return torch.nn.functional.linear(x, weight, bias)
    if not weight.requires_grad:
        return fp8_linear(x, codes.cast(weight, config), bias, config)
    quantized = quantize_once(x, input_storage(config))
    result: Tensor = _TrainableLinear.apply(x, quantized, weight, bias, config, compute_dtype(x), codes)
    return result
