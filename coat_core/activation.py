"""Save tensors for backward in FP8 or not at all, or recompute them from FP8 inputs, for any block of any model.

Inside `PackedSavedTensors` every large floating tensor that autograd saves is stored as FP8 with 1×G (or per tensor)
scales and dequantized to its own dtype in backward; each storage once, however many operators and views save it.

Saved exactly: all `keep` tensors, trained parameters and their autocast copies, integer and FP8 tensors, small tensors,
tensors with short rows (a LoRA's rank-r activations), and statistics: one fp32 value per row of the tensor saved just
before (attention's log-sum-exp) or the scales of FP8 codes saved just before. Of scaled_dot_product_attention only q,
k, v, out and probabilities are packed, no mask.

A packed tensor may be changed in place: backward sees the saved values. If one saved exactly is changed, backward
raises, as without hooks. Under non-reentrant `torch.utils.checkpoint` nothing is packed: hooks would displace its own.

`fp8_checkpoint` recomputes a function in backward. `torch.utils.checkpoint` saves the inputs in high precision; here a
large one is replaced by an *anchor*, a one-element tensor expanded to the input's shape, through which its gradient
flows; the values are saved beside it as FP8 with 1×G scales. The first forward pass sees the exact input,
recomputation the FP8 one. RNG state, autocast and dropout are reproduced by torch's non-reentrant checkpoint.

A LoRA's down-projection (`FP8InputLinear`), which saves its input in FP8:

    h = x Aᵀ            computed from the high precision x; A is never quantized
    dx = dh A
    dA = dhᵀ x_q        from the FP8 x, which only dA needs

An FP8 base linear that reads the same x shares its FP8 copy (`hands_input_to_adapter`), since the trainer may cast x
before the adapter reads it: q, k, v and their adapters save 1 byte per element of x among them. Of a parameter or an
input, such as a caption's embedding, they save x itself, which is kept in any case.

Convolution with frozen weights (`keep_no_input`), which saves no input:

    dx = convolution_backward(dy, W)        needs the shape of x, not its values

torch saves x whenever any gradient is needed, since one formula gives dx, dW and db; only dW reads x.

Shapes: x [..., K], A [r, K], h [..., r]; of convolutions x [B, C, ...], weight [O, C / groups, ...].
Source: arXiv 2410.19313, section 5: 1×G groups for non-linear layers, efficient checkpoint; the rest is LoRA's case.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core.autograd import autocast_is_on, checkpoint_records, first_order_only, refuse_second_order
from coat_core.formats import FP8_DTYPES, INT8
from coat_core.granularity import FP8_GROUPS, Storage
from coat_core.int8 import rotation_size
from coat_core.ops.quantize import dequantize, quantize, quantize_once, read_saved_input, rotate, saved_input
from coat_core.quantize import Quantized

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 4096  # smaller tensors are saved exactly
SHORTEST_ROW = 32  # tensors with shorter rows are row statistics or rank-r activations
STATISTICS_PADDING = 32  # some attention kernels round the rows of their log-sum-exp up to a multiple of this

# bool mask → its additive forms, by dtype and version
Masks: TypeAlias = MutableMapping[Tensor, dict[tuple[torch.dtype, int], Tensor]]

_thread = threading.local()  # .innermost: the PackedSavedTensors opened last in this thread


@dataclass(frozen=True)
class Saving:
    """How a block's tensors are saved for backward."""

    tensors: Storage | None = FP8_GROUPS  # per_group or per_tensor; None: not packed
    attention: str = "fp8"  # q, k, v, out: "fp8" like all tensors, "bf16" not packed
    min_elements: int = MIN_ELEMENTS  # of `PackedSavedTensors`: smaller ones are exact


SAVED_IN_FP8 = Saving()


def unpacked_view(quantized: Quantized, dtype: torch.dtype, *place: Any) -> Tensor:
    """Dequantize a whole storage and view it at `place` (size, stride, offset)."""
    refuse_second_order()
    return quantized.dequantize(dtype).as_strided(*place)


class ExactTensor:
    """A tensor saved exactly, with autograd's check for in-place changes, which hooks bypass.

    Detached: an operator's own output would otherwise hold the operator that holds it, and a graph dropped without a
    backward pass would never be freed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # shares the version counter
        self._version = tensor._version

    def __call__(self) -> Tensor:
        """The tensor; RuntimeError if it has been changed since."""
        if self.tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} and {self.tensor.dtype} saved for backward was changed "
                f"in place since (version {self._version}, now {self.tensor._version}): change a clone of it, or after "
                "the backward pass"
            )
        return self.tensor


unpack_saved = methodcaller("__call__")


class PackedSavedTensors(TorchFunctionMode):
    """Context manager: tensors saved for backward inside it, in this thread, are stored in FP8.

    `keep`: tensors that are saved exactly, as are all views of them. `masks`: a cache for the contexts of one forward
    pass, not of several: NumPy can change a mask without a new version. A nested context replaces the outer one and
    shares its packed storages and `keep`.
    """

    def __init__(self, saving: Saving = SAVED_IN_FP8, keep: Iterable[Tensor] = (), masks: Masks | None = None) -> None:
        super().__init__()
        self._saving = saving
        self._masks: Masks = WeakTensorKeyDictionary() if masks is None else masks
        self._exact_storages = {tensor.untyped_storage()._cdata for tensor in keep}
        self._packed: dict[tuple[Any, ...], tuple[StorageWeakRef, Quantized]] = {}
        self._before: tuple[torch.dtype, torch.Size] | None = None  # of the tensor saved just before
        self._open: list[ExitStack] = []  # one for each `with`

    def __enter__(self) -> PackedSavedTensors:
        with ExitStack() as stack:
            if not checkpoint_records():
                outer: PackedSavedTensors | None = getattr(_thread, "innermost", None)
                stack.callback(setattr, _thread, "innermost", outer)
                if outer is None:
                    stack.callback(self._packed.clear)
                else:
                    self._packed = outer._packed
                    self._exact_storages |= outer._exact_storages
                _thread.innermost = self
                stack.enter_context(saved_tensors_hooks(self._pack, unpack_saved))
                super().__enter__()
                stack.push(super().__exit__)
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._open.pop().__exit__(*exc_info)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Open hooks around scaled_dot_product_attention, if those of `__enter__` are on top."""
        kwargs = kwargs or {}
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if func is not torch.nn.functional.scaled_dot_product_attention or top is None or top[0] != self._pack:
            return func(*args, **kwargs)
        args, kwargs = _with_shared_mask(self._masks, *args, **kwargs)
        query, key, _, mask, *_ = args
        ndim, mask_length = query.ndim, None if mask is None else key.shape[-2]
        with saved_tensors_hooks(lambda tensor: self._pack_attention(tensor, ndim, mask_length), unpack_saved):
            return func(*args, **kwargs)

    def _pack_attention(self, tensor: Tensor, ndim: int, mask_length: int | None) -> Callable[[], Tensor]:
        """As `_pack`, for attention with inputs of `ndim` dimensions; FP8 has no −inf for masks."""
        is_mask = mask_length is not None and tensor.shape[-1:] == (mask_length,)
        if self._saving.attention == "bf16" or is_mask or tensor.ndim != ndim:
            return ExactTensor(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        target, worth_packing = self._saving.tensors, self._is_worth_packing(tensor)
        self._before = tensor.dtype, tensor.shape
        if target is None or not worth_packing:
            return ExactTensor(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype, tensor._version, target)
        if key not in self._packed:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            packed = quantize(flat, target.format, target.granularity)
            self._packed[key] = (StorageWeakRef(storage), packed)  # the weak reference keeps the address from reuse
        _, packed = self._packed[key]
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return functools.partial(unpacked_view, packed, tensor.dtype, *place)

    def _is_worth_packing(self, tensor: Tensor) -> bool:
        if tensor.dtype not in PACKED_DTYPES or tensor.layout != torch.strided or tensor.ndim == 0:
            return False
        storage = tensor.untyped_storage()
        row_length = tensor.shape[-1]
        if tensor.ndim >= 4 and row_length > 1:  # of convolutions [B, C, ..., H, W]: a row is a plane H×W
            row_length *= tensor.shape[-2]
        elements = min(tensor.numel(), storage.nbytes() // tensor.itemsize)  # an expanded tensor has few
        return (
            elements >= self._saving.min_elements
            and row_length >= SHORTEST_ROW
            and not self._is_statistics(tensor)
            and not _is_trained(tensor)
            and storage._cdata not in self._exact_storages
        )

    def _is_statistics(self, tensor: Tensor) -> bool:
        """Whether these are, in fp32, one value per row of the tensor saved just before, or its scales."""
        if tensor.dtype != torch.float32 or self._before is None:
            return False
        dtype, shape = self._before
        if dtype in FP8_DTYPES:
            return tensor.ndim <= len(shape)
        if tensor.ndim != len(shape) - 1:
            return False
        padding = tensor.numel() - shape[:-1].numel()
        return 0 <= padding < STATISTICS_PADDING * tensor.shape[:-1].numel()


def _is_trained(tensor: Tensor) -> bool:
    """Whether this is a trainable parameter, an (autocast) cast of one or a view of either."""
    base = tensor._base if tensor._base is not None else tensor
    if base.grad_fn is None:
        return base.requires_grad
    if base.grad_fn.name() != "ToCopyBackward0":
        return False
    source = base.grad_fn.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def _with_shared_mask(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return attention's arguments with a bool mask made additive, once for all layers."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        forms = masks.setdefault(attn_mask, {})
        key_of_form = query.dtype, 0 if attn_mask.is_inference() else attn_mask._version
        if key_of_form not in forms:
            ends = (1 if stride == 0 else None for stride in attn_mask.stride()[:-1])  # 1: an expanded dimension
            small = attn_mask[tuple(slice(0, end) for end in ends)].detach()
            zeros = torch.zeros(small.shape, dtype=query.dtype, device=small.device)
            forms[key_of_form] = zeros.masked_fill_(~small, -torch.inf)
        attn_mask = forms[key_of_form].expand(attn_mask.shape)
    return (query, key, value, attn_mask, *args), kwargs


# --- recomputation ---


class _Keeper:
    """The values of one input: exact for the first read, then from FP8."""

    def __init__(self, x: Tensor, storage: Storage) -> None:
        self._exact: Tensor | None = x.detach()
        self._quantized: Quantized = quantize(x, storage.format, storage.granularity)
        self._dtype = x.dtype

    def read(self) -> Tensor:
        if self._exact is not None:
            exact, self._exact = self._exact, None
            return exact
        return self._quantized.dequantize(self._dtype)


class _Replaced(torch.autograd.Function):
    """Other values in place of x, through which the gradient of x flows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Callable[[], Tensor]) -> Tensor:
        return values()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def may_draw() -> bool:
    """Whether recomputation must restore the forward pass's random state; False while a CUDA graph is captured."""
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def fp8_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    storage: Storage = FP8_GROUPS,
    min_elements: int = MIN_ELEMENTS,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` under checkpointing, saving its large floating tensor arguments in FP8.

    fp32/bf16/fp16 tensors of at least `min_elements` that require a gradient are saved in FP8, others exactly (masks
    and rotary tables are shared constants that stay alive anyway). `function` returns a tensor or a tuple of tensors.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    inputs, positional, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
    keepers: dict[int, _Keeper] = {}  # by place in `inputs`
    for i, x in enumerate(inputs):
        if not (isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and x.ndim > 0):
            continue
        if x.dtype in PACKED_DTYPES and x.numel() >= max(min_elements, 1):
            keepers[i] = _Keeper(x, storage)
            inputs[i] = _Replaced.apply(x, lambda like=x: like.new_zeros(1).expand(like.shape))

    def run(*inputs: Any) -> Any:  # outlives this call: must not refer to args or kwargs
        values = [_Replaced.apply(x, keepers[i].read) if i in keepers else x for i, x in enumerate(inputs)]
        return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

    with saved_tensors_hooks(ExactTensor, unpack_saved):  # also inside PackedSavedTensors
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=may_draw())


# --- layers ---

CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class _LinearWithFP8Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saved: tuple[Tensor, ...], storage: Storage) -> Tensor:
        ctx.save_for_backward(*saved, weight)
        ctx.storage = storage
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        *saved, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grad @ weight
        if ctx.needs_input_grad[1]:
            codes, scale, granularity = read_saved_input(saved, ctx.storage)
            x_hat = dequantize(codes, scale, granularity, grad.dtype)
            dw = grad.reshape(-1, grad.shape[-1]).t() @ x_hat.reshape(-1, x_hat.shape[-1])
            if codes.dtype == INT8.dtype:  # of x H, and H is its own inverse
                dw = rotate(dw, rotation_size(dw.shape[-1]))
        return dx, dw, None, None


def _is_same_input(x: Tensor, base_input: Tensor) -> bool:
    """Whether x is the base linear's input or, by the autograd graph, a cast of it."""
    if x is base_input:
        return True
    if x.grad_fn is None or x.grad_fn.name() != "ToCopyBackward0" or not base_input.requires_grad:
        return False
    edge = torch.autograd.graph.get_gradient_edge(base_input)
    node, output = x.grad_fn.next_functions[0]
    return node is edge.node and output == edge.output_nr


class FP8InputLinear(nn.Linear):
    """A bias-free nn.Linear that saves its input in FP8; convert an adapter's down projection with `from_linear`."""

    storage: Storage  # of the saved x
    source: tuple[Any, ...]  # one-element tuple with the base linear that hands over its x, or empty

    @staticmethod
    def from_linear(linear: nn.Linear, storage: Storage, base: Any = None) -> FP8InputLinear:
        """Convert in place, keeping the parameter; ValueError if the layer has a bias."""
        if linear.bias is not None:
            raise ValueError(f"{type(linear).__name__} with a bias: an adapter's down projection must have none")
        linear.__class__ = FP8InputLinear
        assert isinstance(linear, FP8InputLinear)
        linear.storage = storage
        linear.source = () if base is None else (base,)
        if base is not None:
            base.hands_input_to_adapter = True
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return x Aᵀ, [..., K] to [..., r]."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad and x.numel()):
            return torch.nn.functional.linear(x, self.weight)
        shared, weight = None, self.weight
        for base in self.source:
            reference, base.adapter_input = getattr(base, "adapter_input", None), None
            base_input = None if reference is None else reference()
            if base_input is not None and _is_same_input(x, base_input):
                shared = base_input
        saved = quantize_once(x, self.storage)[:2] if shared is None else saved_input(shared, self.storage)
        device = x.device.type
        if autocast_is_on(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        result: Tensor = _LinearWithFP8Input.apply(x, weight, saved, self.storage)
        return result


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, convolve: Callable[..., Tensor], weight: Tensor, bias: Any, *sizes: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.strides, ctx.sizes = x.shape, x.stride(), sizes
        return convolve(x, weight, bias, *sizes)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        *sizes, groups = ctx.sizes
        x = grad.new_empty_strided(ctx.shape, ctx.strides)  # never read; its layout is that of dx
        weight = weight.to(grad.dtype)  # autocast multiplied by a copy
        wanted = (True, False, False)  # dx; not dW, not db
        dx = torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, False, [0], groups, wanted)[0]
        return dx, *[None] * 7


def keep_no_input(layer: Any) -> None:
    """Make an nn.Conv1d, Conv2d or Conv3d save no input for backward while its weights are frozen.

    Patches the instance, so trainers still find a layer of its class. Padding given as a string or by reflection, and
    inputs without a batch, run torch's own code. Output and dx are torch's own, bit for bit.
    """
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        layer._conv_forward = functools.partial(_convolve, layer)


def _convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    convolve = CONVOLUTIONS[weight.ndim - 3]
    sizes = (layer.stride, layer.padding, layer.dilation, layer.groups)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained or x.ndim != weight.ndim or not (x.requires_grad and torch.is_grad_enabled()):
        return convolve(x, weight, bias, *sizes)
    result: Tensor = _FrozenConvolution.apply(x, convolve, weight, bias, *sizes)
    return result
