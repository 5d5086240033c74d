"""Keep what operators save for backward in FP8, for any block of any model.

Norms, GELU, gates and attention save their inputs and outputs in high precision. Inside `PackedSavedTensors` every
large floating tensor that autograd saves is stored as FP8 with 1×G (or per tensor) scales and comes back in its own
dtype in backward. Each storage is packed once, however many operators save it and through whatever views.

Left alone: parameters and buffers, integer and FP8 tensors, small tensors (row statistics), tensors whose last
dimension is short (a LoRA's rank-r activations), and everything but q, k, v and out inside attention (its
log-sum-exp must stay exact).

Do not open this inside a block under `torch.utils.checkpoint`: its hooks would displace checkpoint's own.
Source: arXiv 2410.19313, section 5.1 (non-linear layers keep FP8 with 1×G groups).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from coat_core.formats import get_format
from coat_core.granularity import PER_GROUP, Granularity
from coat_core.quantize import Quantized, quantize

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORTEST_ROW = 32  # tensors with a shorter last dimension are row statistics or rank-r activations


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
        flat = self.storage.quantized.dequantize(self.storage.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class PackedSavedTensors:
    """Context manager: tensors saved for backward inside it are stored in FP8.

    Args:
        config: how they are stored.
        keep: frozen parameters, buffers and shared constants: they and all views of them are left alone, as trainable
            parameters are without being named.
    """

    def __init__(self, config: PackingConfig, keep: Iterable[Tensor] = ()) -> None:
        self.config = config
        self._kept_storages = {tensor.untyped_storage().data_ptr() for tensor in keep}
        self._packed: dict[tuple[Any, ...], tuple[StorageWeakRef, _PackedStorage]] = {}
        self._stack: list[Any] = []

    def __enter__(self) -> PackedSavedTensors:
        for context in (saved_tensors_hooks(self._pack, _unpack), _AttentionMode(self._attention_hooks)):
            context.__enter__()
            self._stack.append(context)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        while self._stack:
            self._stack.pop().__exit__(*exc_info)
        self._packed.clear()

    def _attention_hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack_attention, _unpack)

    def _pack_attention(self, tensor: Tensor) -> Tensor | _PackedView:
        return self._pack(tensor) if self.config.attention == "fp8" and tensor.ndim == 4 else tensor.detach()

    def _pack(self, tensor: Tensor) -> Tensor | _PackedView:
        if not self._is_worth_packing(tensor):
            # an operator's own output, returned as it is, would hold the operator that holds it: a graph that is
            # dropped without a backward pass would never be freed
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype, tensor._version)
        if key not in self._packed:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            packed = _PackedStorage(quantize(flat, self.config.format, self.config.granularity), tensor.dtype)
            self._packed[key] = (StorageWeakRef(storage), packed)  # the weak reference keeps the address from reuse
        return _PackedView(self._packed[key][1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _is_worth_packing(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype in PACKED_DTYPES
            and tensor.layout == torch.strided
            and tensor.numel() >= self.config.min_elements
            and tensor.shape[-1] >= SHORTEST_ROW
            and not _is_trained(tensor)
            and tensor.untyped_storage().data_ptr() not in self._kept_storages
        )


def _is_trained(tensor: Tensor) -> bool:
    """Whether this is a trainable parameter, a cast of one (autocast makes those) or a view of either."""
    base = tensor._base if tensor._base is not None else tensor
    if base.grad_fn is None:
        return base.requires_grad
    made_by, source = base.grad_fn.name(), base.grad_fn.next_functions[0][0] if base.grad_fn.next_functions else None
    return made_by == "ToCopyBackward0" and source is not None and source.name() == "torch::autograd::AccumulateGrad"


def _unpack(packed: Tensor | _PackedView) -> Tensor:
    return packed.unpack() if isinstance(packed, _PackedView) else packed


class _AttentionMode(TorchFunctionMode):
    """Opens its own saved-tensor hooks around each scaled_dot_product_attention call."""

    def __init__(self, hooks: Callable[[], saved_tensors_hooks]) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            with self._hooks():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
