"""Records the launches of a step with their bytes and operations, on the meta device, without a GPU.

A dispatch mode sees every operator with its shapes. Operators of `coat_core` run their CUDA launchers, whose kernels
are recorded instead of started: there is no separate list of launches to maintain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.ops import scaled_mm
from coat_core.ops.dispatch import launcher_of, launchers
from coat_core.ops.launch import recorded_launches

from ..blocks.held import tensors_in
from .limits import NARROW

META = torch.device("meta")


class Launch(NamedTuple):
    """GPU work of one operator.

    Attributes:
        part: Triton kernel, or torch operator, inside an operator of ours; else empty.
        reads, writes: storage → bytes, each once.
        flops: operations of matrix products.
        kind: "fp8" or "bf16" matrix product, "attention", "attention_backward"; empty if only bytes count.
        shape: (M, N, K) of a matrix product.
    """

    region: str
    category: str
    operator: str
    part: str
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    flops: float = 0.0
    kind: str = ""
    shape: tuple[int, int, int] | None = None
    count: int = 1

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


GEMM_FP8, GEMM_BF16, ATTENTION, GEMM_LORA = "FP8 GEMM", "bf16 GEMM", "attention", "LoRA GEMM"
FUSED = "norm, GELU, gate, rotary"
QUANTIZE, MOVE, PACK, CAST = "quantize for GEMM", "cat, add, zero", "pack and unpack", "casts of LoRA"
MODULATION, UPDATE, OUTSIDE = "modulation", "clip, optimizer, EMA", "embedders and loss"
CATEGORIES = (
    *(GEMM_FP8, GEMM_BF16, ATTENTION, GEMM_LORA, FUSED, QUANTIZE, MOVE, PACK, CAST, MODULATION, UPDATE, OUTSIDE),
)
ONLY_METADATA = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
LORA_GRADIENTS = {"coat::lora_up_gradients", "coat::mlp_down_gradient"}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "_scaled_mm": 0}  # index of the first factor
ATTENTION_PREFIX = "_scaled_dot_product_"
ATTENTION_KERNELS = {False: (1, 1.0), True: (3, 2.5)}  # backward: kernels of cuDNN's, and operations over 4·B·H·S²·d
OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}  # do not read their outputs
FOREACH_TENSORS, FOREACH_CHUNKS, FOREACH_CHUNK = (110, 64, 48, 36, 30), 320, 65536  # of a launch, by number of lists


class Recorder(TorchDispatchMode):
    """Records launches inside the `with` block.

    Attributes:
        region: current region; set by the code that runs the step.
        times: region → its number per step, by default 1.
        host: region → calls of the dispatcher.
        reads: region → tensors that the host reads from the device (`.item()`, `.tolist()`), waiting for new ones.
    """

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region = region
        self.times: dict[str, int] = {}
        self.launches: list[Launch] = []
        self.host: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._operator, self._args = "", ()  # of ours, that runs
        self._storages: dict[int, Any] = {}  # kept alive, so that its id is not reused
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if self._operator and func._can_decompose():  # below autograd torch's composite operators come whole
            with self:
                return func.decompose(*args, **kwargs)
        self.host[self.region] += 1
        if name == "coat::fp8_mm":
            run = scaled_mm.scaled_mm_on_cuda
        elif name in launchers:
            run = launcher_of(name)
        else:
            return self._of_torch(func, args, kwargs)
        outer = self._operator, self._args
        if not self._operator:
            self._operator, self._args = name, args
        try:
            with self, recorded_launches(self._of_triton):
                return run(*args, **kwargs)
        finally:
            self._operator, self._args = outer

    def _of_triton(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        """Each tensor counts as read or written; for the bytes it does not matter which."""
        self._add(kernel.__name__, list(tensors_in(args)), [])

    def _of_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = list(tensors_in((*args, *kwargs.values())))
        on_device = any(x.device == META for x in given)
        is_read = name == "_local_scalar_dense" or (name == "_to_copy" and kwargs.get("device") == torch.device("cpu"))
        if on_device and is_read:  # answered with zeros in place of a tensor without memory
            if given[0].untyped_storage()._cdata not in self._read:
                self.reads[self.region] += 1
                self._add("copy to the host", given, [])
                self._read.update(self.launches[-1].reads)
            values = torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
            return values if name == "_to_copy" else values.item()
        result = func(*args, **kwargs)
        made = list(tensors_in((result,)))
        if not (on_device or any(x.device == META for x in made)) or name in ONLY_METADATA or _is_view(func):
            return result
        if name.startswith(("_foreach", "_fused")):
            lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            count = _foreach_launches(lists) + ("norm" in name)  # partial norms are added up by one more
            reads = list(tensors_in(lists[1:])) if name in OVERWRITING else given
            self._add(name, reads, [*made, *(lists[0] if name.endswith("_") else ())], count=count)
        elif name in PRODUCTS:
            a, b = given[PRODUCTS[name] : PRODUCTS[name] + 2]
            shape = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
            kind = "fp8" if name == "_scaled_mm" else "bf16"
            self._add(name, given, made, 2.0 * math.prod(shape), kind, shape)
        elif name.startswith(ATTENTION_PREFIX):
            backward = name.endswith("_backward")
            count, share = ATTENTION_KERNELS[backward]
            batch, heads, length, width = given[0].shape
            kind = "attention_backward" if backward else "attention"
            self._add(name, given, made, share * 4.0 * batch * heads * length**2 * width, kind, count=count)
        else:
            self._add(name, given[1:] if name in OVERWRITING else given, made)
        return result

    def _add(self, part: str, reads: list[Tensor], writes: list[Tensor], *work: Any, count: int = 1) -> None:
        operator, read, written = self._operator or part, self._bytes(reads), self._bytes(writes)
        category = self._category(operator, part, work[-1] if work and isinstance(work[-1], tuple) else None)
        part = part if self._operator else ""
        launch = Launch(self.region, category, operator, part, read, written, *work)
        self.launches.append(launch._replace(count=count))

    def _bytes(self, tensors: list[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for x in tensors:
            storage = x.untyped_storage()
            self._storages[storage._cdata] = storage
            # repeated (expanded) elements count once
            size = math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step) * x.itemsize
            found[storage._cdata] = min(found.get(storage._cdata, 0) + size, max(storage.nbytes(), size))
        return found

    def _category(self, operator: str, part: str, shape: tuple[int, int, int] | None) -> str:
        if self.region in (UPDATE, OUTSIDE, MODULATION):
            return self.region
        if part.startswith(ATTENTION_PREFIX):
            return ATTENTION
        if shape is not None:
            if part == "_scaled_mm":
                return GEMM_FP8
            has_rank = min(shape[1:]) < NARROW or 1 < shape[0] < NARROW
            return GEMM_LORA if has_rank else MODULATION if shape[0] == 1 else GEMM_BF16
        if operator == "coat::dequantize" or (operator == "coat::quantize" and "per_group" in self._args):
            return PACK
        if operator in ("coat::quantize", "coat::fp8_mm") or "amax" in part:
            return QUANTIZE
        if operator == "coat::weight_only_linear":
            return MODULATION
        if operator in LORA_GRADIENTS:
            return GEMM_LORA
        return FUSED if self._operator else CAST if part == "_to_copy" else MOVE


def _is_view(func: Any) -> bool:
    results = func._schema.returns
    return bool(results) and all(x.alias_info is not None and not x.alias_info.is_write for x in results)


def _foreach_launches(lists: list[Any]) -> int:
    launches = tensors = chunks = 0
    for x in lists[0]:
        tensors += 1
        for _ in range(-(-x.numel() // FOREACH_CHUNK)):
            chunks += 1
            if chunks == FOREACH_CHUNKS:
                launches, chunks, tensors = launches + 1, 0, 1
        if tensors == FOREACH_TENSORS[len(lists) - 1]:
            launches, chunks, tensors = launches + bool(chunks), 0, 0
    return launches + bool(chunks)
