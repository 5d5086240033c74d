"""Keep what operators save for backward in FP8, for any block of any model.

Norms, GELU, gates and attention save their inputs and outputs in high precision. Inside `PackedSavedTensors` every
large floating tensor that autograd saves is stored as FP8 with 1×G (or per tensor) scales and comes back in its own
dtype in backward. Each storage is packed once, however many operators save it and through whatever views.

Left alone: parameters, buffers and all that is passed as `keep`, trained parameters and their autocast copies, integer
and FP8 tensors, small tensors, tensors with short rows (a LoRA's rank-r activations), and statistics: one fp32 value
per row of the tensor saved just before (attention's log-sum-exp, whichever kernel saved it) or the scales of FP8 codes
saved just before. Of scaled_dot_product_attention only q, k, v, out and probabilities are packed, no mask. A frozen
weight that autocast copies is no longer a parameter: its copy is packed as an activation is.

A tensor may be changed in place after it was packed: backward sees the values that were saved. One that was left alone
may not, and backward says so, as it does without hooks.

Opened inside a block under non-reentrant `torch.utils.checkpoint` this does nothing: its hooks would displace those of
checkpoint, which keeps none of these tensors.
Source: arXiv 2410.19313, section 5.1 (non-linear layers keep FP8 with 1×G groups).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from coat_core.autograd import refuse_second_order
from coat_core.formats import FORMATS, get_format
from coat_core.granularity import PER_GROUP, Granularity
from coat_core.ops.quantize import quantize
from coat_core.quantize import Quantized

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE_DTYPES = tuple(fmt.dtype for fmt in FORMATS.values())
SHORTEST_ROW = 32  # tensors with shorter rows are row statistics or rank-r activations
STATISTICS_PADDING = 32  # some attention kernels round the rows of their log-sum-exp up to a multiple of this

_thread = threading.local()  # .innermost: the PackedSavedTensors opened last in this thread


@dataclass(frozen=True)
class PackingConfig:
    """How saved tensors are stored.

    Args:
        format: "e4m3" or "e5m2".
        granularity: per_group or per_tensor; groups run along the storage.
        attention: "fp8" packs q, k, v and out of scaled_dot_product_attention, "bf16" leaves them as they are.
        min_elements: smaller tensors are left alone.

    Raises:
        ValueError: an option outside its range.
    """

    format: str = "e4m3"
    granularity: Granularity = PER_GROUP
    attention: str = "fp8"
    min_elements: int = 4096

    def __post_init__(self) -> None:
        get_format(self.format)
        if self.granularity.name == "per_row":
            raise ValueError("granularity='per_row': saved tensors are packed per_group or per_tensor")
        if self.attention not in ("fp8", "bf16"):
            raise ValueError(f"attention={self.attention!r}: must be fp8 or bf16")
        if self.min_elements < 1:
            raise ValueError(f"min_elements={self.min_elements!r}: must be at least 1")


@dataclass
class _PackedStorage:
    quantized: Quantized
    dtype: torch.dtype


@dataclass
class _PackedView:
    """A view into a packed storage: enough to give the saved tensor back."""

    storage: _PackedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        refuse_second_order()
        flat = self.storage.quantized.dequantize(self.storage.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class ExactTensor:
    """A tensor that is left alone, with torch's own check that it is not changed in place until backward.

    Autograd does not check what passes through hooks. Detached: an operator's own output, held as it is, would hold the
    operator that holds it, and a graph that is dropped without a backward pass would never be freed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # shares the version counter
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor, or raise RuntimeError where it was changed since."""
        if self.tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} and {self.tensor.dtype} saved for backward was changed "
                f"in place since (version {self._version}, now {self.tensor._version}): change a clone of it, or after "
                "the backward pass"
            )
        return self.tensor


def unpack_saved(saved: ExactTensor | _PackedView) -> Tensor:
    """Return the tensor that was saved: the unpack hook."""
    return saved.unpack()


class PackedSavedTensors:
    """Context manager: tensors saved for backward inside it are stored in FP8.

    It belongs to the thread that opens it. Opened inside another one it takes over, and what the outer one has packed
    or keeps is neither packed again nor packed at all.

    Args:
        config: how they are stored.
        keep: frozen parameters, buffers and shared constants: they and all views of them are left alone, as trainable
            parameters are without being named.
    """

    def __init__(self, config: PackingConfig, keep: Iterable[Tensor] = ()) -> None:
        self.config = config
        self._kept_storages = {tensor.untyped_storage()._cdata for tensor in keep}
        self._packed: dict[tuple[Any, ...], tuple[StorageWeakRef, _PackedStorage]] = {}
        self._before: tuple[torch.dtype, torch.Size] | None = None  # of the tensor saved just before
        self._open: list[ExitStack] = []

    def __enter__(self) -> PackedSavedTensors:
        with ExitStack() as stack:
            if not checkpoint_records():
                outer: PackedSavedTensors | None = getattr(_thread, "innermost", None)
                stack.callback(setattr, _thread, "innermost", outer)
                if outer is None:
                    stack.callback(self._packed.clear)
                else:
                    self._packed = outer._packed
                    self._kept_storages |= outer._kept_storages
                _thread.innermost = self
                stack.enter_context(saved_tensors_hooks(self._pack, unpack_saved))
                stack.enter_context(_AttentionMode(self))
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._open.pop().__exit__(*exc_info)

    def _is_on_top(self) -> bool:
        """Whether a tensor that is saved now comes to this one, and not to hooks that were opened after it."""
        top = _top_hooks()
        return top is not None and top[0] == self._pack

    def _pack_attention(self, tensor: Tensor, ndim: int, mask_length: int | None) -> ExactTensor | _PackedView:
        """As `_pack`, for what attention with inputs of `ndim` dimensions saves.

        A mask holds −inf, which FP8 has not. It or torch's copy of it has rows of `mask_length`, the number of keys.
        """
        is_mask = mask_length is not None and tensor.shape[-1:] == (mask_length,)
        if self.config.attention == "bf16" or is_mask or tensor.ndim != ndim:
            return ExactTensor(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> ExactTensor | _PackedView:
        worth_packing = self._is_worth_packing(tensor)
        self._before = tensor.dtype, tensor.shape
        if not worth_packing:
            return ExactTensor(tensor)
        storage, how = tensor.untyped_storage(), (self.config.format, self.config.granularity)
        key = (storage._cdata, tensor.dtype, tensor._version, how)
        if key not in self._packed:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            packed = _PackedStorage(quantize(flat, *how), tensor.dtype)
            self._packed[key] = (StorageWeakRef(storage), packed)  # the weak reference keeps the address from reuse
        return _PackedView(self._packed[key][1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _is_worth_packing(self, tensor: Tensor) -> bool:
        if tensor.dtype not in PACKED_DTYPES or tensor.layout != torch.strided or tensor.ndim == 0:
            return False
        storage = tensor.untyped_storage()
        return (
            min(tensor.numel(), storage.nbytes() // tensor.itemsize) >= self.config.min_elements  # expanded: few
            and _row_length(tensor) >= SHORTEST_ROW
            and not self._is_statistics(tensor)
            and not _is_trained(tensor)
            and storage._cdata not in self._kept_storages
        )

    def _is_statistics(self, tensor: Tensor) -> bool:
        """Whether this is fp32 with one value per row, or the scales, of the tensor saved just before it."""
        if tensor.dtype != torch.float32 or self._before is None:
            return False
        dtype, shape = self._before
        if dtype in CODE_DTYPES:
            return tensor.ndim <= len(shape)
        if tensor.ndim != len(shape) - 1:
            return False
        padding = tensor.numel() - shape[:-1].numel()
        return 0 <= padding < STATISTICS_PADDING * tensor.shape[:-1].numel()


def _row_length(tensor: Tensor) -> int:
    """Elements of one row; of one plane H×W where convolutions give four dimensions or more [B, C, ..., H, W]."""
    width = tensor.shape[-1]
    return width * tensor.shape[-2] if tensor.ndim >= 4 and width > 1 else width


def _top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The saved-tensor hooks that are called now, (pack, unpack); there is no public function for it."""
    top: tuple[Callable[..., Any], Callable[..., Any]] | None = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )
    return top


def checkpoint_records() -> bool:
    """Whether we are inside a function under non-reentrant torch.utils.checkpoint, first time or recomputing."""
    top = _top_hooks()
    return top is not None and top[0].__module__ == "torch.utils.checkpoint"


def _is_trained(tensor: Tensor) -> bool:
    """Whether this is a trainable parameter, a cast of one (autocast makes those) or a view of either."""
    base = tensor._base if tensor._base is not None else tensor
    if base.grad_fn is None:
        return base.requires_grad
    made_by, source = base.grad_fn.name(), base.grad_fn.next_functions[0][0] if base.grad_fn.next_functions else None
    return made_by == "ToCopyBackward0" and source is not None and source.name() == "torch::autograd::AccumulateGrad"


class _AttentionMode(TorchFunctionMode):
    """Opens hooks of its own around each scaled_dot_product_attention call, where `packing` is what is called there."""

    def __init__(self, packing: PackedSavedTensors) -> None:
        super().__init__()
        self._packing = packing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or not self._packing._is_on_top():
            return func(*args, **kwargs)
        shape = _attention_shape(*args, **kwargs)
        args, kwargs = _with_shared_mask(*args, **kwargs)
        with saved_tensors_hooks(lambda tensor: self._packing._pack_attention(tensor, *shape), unpack_saved):
            return func(*args, **kwargs)


_additive: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # bool mask → what attention adds for it


def _with_shared_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of attention, a bool mask in them as what is added: 0 and −inf, as attention itself makes it.

    Attention makes one for each layer and keeps it for backward. Here all layers that are given the same mask share
    one, as small as the mask was before it was expanded.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        made = _additive.setdefault(attn_mask, {})
        as_now = query.dtype, 0 if attn_mask.is_inference() else attn_mask._version
        if as_now not in made:
            expanded = (step == 0 for step in attn_mask.stride()[:-1])
            small = attn_mask[tuple(slice(0, 1 if each else None) for each in expanded)].detach()
            zeros = torch.zeros(small.shape, dtype=query.dtype, device=small.device)
            made[as_now] = zeros.masked_fill_(~small, -torch.inf)
        attn_mask = made[as_now].expand(attn_mask.shape)
    return (query, key, value, attn_mask, *args), kwargs


def _attention_shape(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> tuple[int, int | None]:
    """Dimensions of attention's inputs, and the number of keys where it has a mask."""
    return query.ndim, None if attn_mask is None else key.shape[-2]
