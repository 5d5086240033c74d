"""Frozen linears with LoRA or LoKr adapters, forward and backward apart.

Linears that read the same x form a group: their FP8 weights become one matrix, x is quantized once, and all their
adapters share one down-projection.

    h  = s · x Dᵀ                        D: every A · factor, one above the other
    y  = x Wᵀ + b  (+ h_i U_iᵀ)          each linear's columns of y with its own columns of h; U: every B
    dx = dy W  (+ dh D)                  dh_i = s · dy_i U_i
    dA = factor · dhᵀ x,  dB = dy_iᵀ h_i                 `grad_down` is dhᵀ x, `grad_up` dyᵀ h

s is 1, or the adapter strength of the row's image. Adapters multiply in the dtype of y. The terms in parentheses
are left to the kernels that read y or dx (arguments `h`, `U` and `dh`, `D`); others call `complete`. A LoKr is
always added to y and dx, and its matrices' gradients need dy and x.

Each joined weight becomes a view of the matrix, so nothing is stored twice; weights that were moved apart are
joined again at the next read. One GEMM then makes dx: summed in fp32 over all outputs and rounded once.

LoRA matrices are fp32 and multiply in bf16. Casts at each use would be 2,500 small kernels per step of FLUX.1-dev;
one shared buffer (`AdapterCopies`) takes nine.

Shapes: x [..., K], y [..., ΣN], W [N, K], A [r, K], B [N, r], h [..., n·r] with r columns for each of n linears, D
[n·r, K], U [ΣN, r]; r is the largest rank of a group, smaller ones are zero-padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.config import FP8LinearConfig
from coat_core.granularity import Storage
from coat_core.int8 import rotation_size
from coat_core.linear.function import (
    OUTPUT_DIM,
    StoredWeight,
    as_stored,
    compute_dtype,
    dgrad,
    fp8_gemm_obstacle,
    fprop,
    input_storage,
    load_weight,
    quantize_weight,
    unit_scale,
    wants_fp8_gemm,
)
from coat_core.linear.module import FP8Linear, FP8TrainableLinear
from coat_core.ops.codes import product
from coat_core.ops.lora import lora_up_gradients
from coat_core.ops.scaled_mm import row_scale, weight_only_linear
from coat_core.quantize import Quantized

from ..lora import KroneckerAdapter, NotFusable, PlainAdapter, plain_adapters
from ..quantized import input_gradient, is_adopted, own_product

# --- the frozen part ---


class FrozenLinear:
    """The base: one of our FP8 linears, a plain frozen nn.Linear (`config` None), or several as one."""

    def __init__(
        self,
        weight: StoredWeight | Tensor | None,  # W [N, K] as it is stored, or its values; None for `adopted`
        bias: Tensor | None,
        config: FP8LinearConfig | None = None,
        in_fp8: bool = False,  # whether to multiply in FP8; False multiplies by the dequantized weight
        adopted: nn.Module | None = None,  # a linear that ai-toolkit quantized (`quantized.adopt`)
    ) -> None:
        self.weight, self.bias, self.config, self.in_fp8, self.adopted = weight, bias, config, in_fp8, adopted
        self.input_storage: Storage | None = None  # of x in the GEMM; None in high precision
        self.grad_storage: Storage | None = None  # of dy · `grad_factors`, if the producer of dy can cast it
        self.grad_factors: Tensor | None = None  # the weight's row scales, fp32 [N]
        self.rotations = weight.rotations if isinstance(weight, StoredWeight) else (1, 1)  # of y and x
        self._fprop_weight = weight
        self._unit: Tensor | None = None  # see `dgrad`

        if config is None or not in_fp8:
            return
        self.input_storage = input_storage(config)
        if isinstance(weight, StoredWeight):
            self.grad_factors = weight.scale.reshape(-1) if weight.scale.ndim else None
            if config.input_granularity == "per_row":  # made now: a pass may be captured as a CUDA graph
                rows, width = weight.shape
                self._fprop_weight = weight._replace(scale=row_scale(weight.scale, rows))
                self._unit = row_scale(unit_scale(weight.scale), width)
        elif config.weight_granularity == "per_row":  # made at each use: the producer of dy has none
            return
        if config.grad_format != "bf16":
            self.grad_storage = Storage(config.grad_format, self.input_storage.granularity)

    def forward(self, x: Tensor, quantized: Quantized | None) -> Tensor:
        """Return x Wᵀ + b; `quantized` is x by `input_storage`, None if that is None."""
        if self.adopted is not None:  # tokens are quantized as in training, rows [B, K] if x trains
            return own_product(self.adopted, x, x.ndim > 2 or x.requires_grad)
        weight = self._fprop_weight
        if isinstance(weight, Tensor):
            if self.config is None:
                return torch.nn.functional.linear(x, weight, self.bias)
            weight = quantize_weight(weight, self.config)
        return fprop(x, quantized, weight, self.bias, compute_dtype(x))

    def rotated_product(self, x: Tensor) -> Tensor:
        """Return y - b rotated, for x rotated, of an INT8 weight and few rows; `rotations` are the block sizes."""
        weight = self.weight
        assert isinstance(weight, StoredWeight)
        y: Tensor = weight_only_linear(x, weight.codes, weight.scale, None, compute_dtype(x))
        return y

    def dgrad(self, grad: Tensor, quantized: Quantized | None = None) -> Tensor:
        """Return dy W; `quantized` is dy by `grad_storage`, if its producer quantized it."""
        if self.adopted is not None:
            return input_gradient(self.adopted, grad)
        weight = self.weight
        if isinstance(weight, Tensor):
            if self.config is None:
                return grad @ weight.to(grad.dtype)
            weight = quantize_weight(weight, self.config)
        return dgrad(grad, weight, self.config, self.in_fp8, quantized, self._unit)


def read_frozen(base: Any) -> FrozenLinear:
    """Read a linear; NotFusable if it is trained or of unknown quantization."""
    bias = base.bias
    if bias is not None and bias.requires_grad:
        raise NotFusable("a linear whose bias is trained")
    if is_adopted(base):
        return FrozenLinear(None, bias, adopted=base)
    config = base.config if isinstance(base, FP8Linear) else getattr(base, "coat_linear_config", None)
    if config is not None:
        weight = load_weight(base, config)
        return FrozenLinear(weight, bias, config, wants_fp8_gemm(weight.scale.device, config))
    if not isinstance(base, nn.Linear) or type(base.weight.data) is not Tensor:
        raise NotFusable(f"a {type(base).__name__} of another quantization")
    if base.weight.requires_grad:
        raise NotFusable("a linear whose weight is trained")
    if isinstance(base, FP8TrainableLinear) and wants_fp8_gemm(base.weight.device, base.config):
        return FrozenLinear(base.weight, bias, base.config, True)
    return FrozenLinear(base.weight, bias)


def _joined(modules: Sequence[Any], bases: Sequence[Any]) -> Sequence[Any]:
    """One base for all, if they are FP8 weights of one config, on one device, with a row-wise GEMM; else `bases`.

    Weights and transposed copies are joined in place, scales and biases copied.
    """
    first = bases[0]
    for base in bases:
        if not isinstance(base.weight, StoredWeight):
            return bases
        if base.config != first.config or base.in_fp8 != first.in_fp8 or (base.bias is None) != (first.bias is None):
            return bases
        if base.weight.scale.device != first.weight.scale.device or base.rotations != first.rotations:
            return bases
    row_wise = replace(first.config, weight_granularity="per_row")  # each linear's scale becomes that of its rows
    if first.in_fp8 and fp8_gemm_obstacle(first.weight.scale.device, row_wise) is not None:
        return bases
    scales = [base.weight.scale.reshape(-1, 1).expand(base.weight.shape[0], 1) for base in bases]
    scale = torch.cat(scales)
    if first.rotations[0] not in (1, rotation_size(len(scale))):  # INT8: the joined rows would be in other blocks
        return bases

    buffers = {name: join_buffers(modules, name, dim) for name, dim in OUTPUT_DIM.items()}
    bias = None if first.bias is None else torch.cat([base.bias for base in bases])
    return [FrozenLinear(as_stored(buffers, scale, first.config), bias, first.config, first.in_fp8)]


def join_buffers(modules: Sequence[nn.Module], name: str, dim: int) -> Tensor | None:
    """The modules' 2D buffers of that name as one along `dim`; they become views of it. None if one is missing."""
    parts: list[Any] = [module._buffers.get(name) for module in modules]
    if any(part is None for part in parts):
        return None
    first, shape = parts[0], list(parts[0].shape)
    sizes = [part.shape[dim] for part in parts]
    shape[dim] = sum(sizes)
    stride, offset, is_joined = (shape[1], 1), first.storage_offset(), True
    for part in parts:
        shares = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        is_joined = is_joined and shares and part.stride() == stride and part.storage_offset() == offset
        offset += part.shape[dim] * stride[dim]
    if is_joined:
        return first.as_strided(tuple(shape), stride)
    whole = torch.cat(parts, dim=dim)
    for module, view in zip(modules, whole.split(sizes, dim=dim), strict=True):
        module._buffers[name] = view
    return whole


def cast_by_kernel(storage: Storage | None, fmt: str = "e4m3") -> tuple[str, str]:
    """A kernel's arguments `fmt` and `granularity` for its output's `storage`; "none" if that is None."""
    return (fmt, "none") if storage is None else (storage.format, storage.granularity.name)


def quantized_by(storage: Storage | None, codes: Tensor, scale: Tensor) -> Quantized | None:
    """The codes and scale of a kernel called with `cast_by_kernel(storage)`."""
    return None if storage is None else Quantized(codes, scale, storage.granularity)


# --- LoKr ---
# y + factor·(W1 ⊗ W2) x without the Kronecker product: with a row of x as a matrix X [c, d], its row of y as Y [a, b],
# and the factor in W1,
#
#     Z = X W2ᵀ,   Y += W1 Z
#     U = dY W2,   dX += W1ᵀ U,   dW1 = Σ U Xᵀ,   dW2 = Σ dYᵀ V,   V = W1 X
#
# Two products of about 1/c of the linear's in backward, and one in forward; those with W1 are small. Only x is saved.
# x [..., c·d], y [..., a·b] (or a slice of its columns), W1 [a, c], W2 [b, d], Z [T, c, b], U and V [T, a, d].


def add_kronecker(y: Tensor, x: Tensor, adapter: KroneckerAdapter) -> None:
    """Add the adapter's part to y, in place."""
    first, second = adapter.matrices(y.dtype)
    rows = x.to(y.dtype).reshape(-1, second.shape[1])
    z = (rows @ second.t()).view(-1, first.shape[1], len(second))
    y_matrices = y.flatten(0, -2).unflatten(1, (len(first), len(second)))
    y_matrices.baddbmm_(first.expand(len(z), *first.shape), z)


def kronecker_gradients(dy: Tensor, x: Tensor, adapter: KroneckerAdapter) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the adapter's matrices in turn, in their dtype, and U for `add_kronecker_dx`."""
    first, second = adapter.matrices(dy.dtype)
    (a, c), (b, d) = first.shape, second.shape
    x_matrices, dy_rows = x.to(dy.dtype).reshape(-1, c, d), dy.reshape(-1, b)
    v = first.expand(len(x_matrices), a, c) @ x_matrices
    grad_second = product(dy_rows.t(), v.view(-1, d), adapter.second[0].dtype)
    del v  # as large as x
    u = (dy_rows @ second).view(-1, a, d)
    grad_first = u.new_zeros((a, c), dtype=adapter.first[0].dtype)
    step = max(len(u) * d // (8 * a), 1)  # products of so many rows are at most a quarter of x
    for u_part, x_part in zip(u.split(step), x_matrices.split(step), strict=True):
        grad_first += product(u_part, x_part.transpose(1, 2), grad_first.dtype).sum(0)
    grad_first *= adapter.factor

    gradients: list[Tensor] = []
    for grad, factors in ((grad_first, adapter.first), (grad_second, adapter.second)):
        if len(factors) == 1:
            gradients.append(grad)
        else:
            gradients += [grad @ factors[1].t(), factors[0].t() @ grad]
    return gradients, u


def add_kronecker_dx(dx: Tensor, u: Tensor, adapter: KroneckerAdapter) -> None:
    """Add the adapter's part to dx [..., c·d], in place."""
    first, second = adapter.matrices(dx.dtype)
    dx_matrices = dx.view(-1, first.shape[1], second.shape[1])
    dx_matrices.baddbmm_(first.t().expand(len(u), *first.t().shape), u.to(dx.dtype))


# --- with adapters ---


class Copies(NamedTuple):
    """The matrices of a group's adapters, in the dtype that its linears multiply in: D [n·r, K] and U [ΣN, r]."""

    down: Tensor
    up: Tensor


class LinearGroup:
    """Linears that read the same x, with their adapters."""

    def __init__(
        self,
        bases: tuple[FrozenLinear, ...],  # one for all where their weights are joined, else one of each
        widths: tuple[int, ...],  # N of each linear
        adapters: tuple[tuple[PlainAdapter, ...], ...],  # of each linear
        parts: tuple[int, ...],  # widths in which y is read: one of each linear, or several of a single one
        krons: tuple[tuple[slice, KroneckerAdapter], ...] = (),  # columns of its linear in y, and each LoKr
    ) -> None:
        self.bases, self.widths, self.adapters, self.parts, self.krons = bases, widths, adapters, parts, krons
        self.all_adapters = list(chain.from_iterable(adapters))
        # A and B of each adapter in turn, then the LoKrs' matrices
        self.parameters = [matrix for adapter in self.all_adapters for matrix in (adapter.down, adapter.up)]
        self.parameters += [matrix for _, kron in krons for matrix in (*kron.first, *kron.second)]
        # r: a linear's rank is the sum of its adapters'; the largest of the group, 0 without adapters
        self.rank = max(sum(len(adapter.down) for adapter in of_linear) for of_linear in adapters)
        self.dtype = self.parameters[0].dtype if self.parameters else torch.float32
        self.strengths = self.all_adapters[0].strengths if self.all_adapters else None
        self.input_storage = next((base.input_storage for base in bases if base.input_storage), None)
        self.grad_storage, self.grad_factors = None, None  # with several bases dy is split before its cast
        if len(bases) == 1:
            self.grad_storage, self.grad_factors = bases[0].grad_storage, bases[0].grad_factors
        self.copies: Copies | None = None  # made by `AdapterCopies`; without it the matrices are cast at each use
        self._columns = list(pairwise(accumulate(parts, initial=0)))  # of each part in y

    def forward(
        self, x: Tensor, quantized: Quantized | None, x_down: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return y [..., ΣN] without the LoRAs' part, and h (None without them).

        `quantized` is x [..., K] by `input_storage`, `x_down` x Dᵀ [..., n·r]; with both, x gives its dtype.
        """
        outputs: list[Tensor] = []
        for base in self.bases:
            outputs.append(base.forward(x, quantized if base.input_storage else None))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        for columns, kron in self.krons:
            add_kronecker(y[..., columns], x, kron)
        if not self.rank:
            return y, None
        if x_down is None:
            x_down = torch.nn.functional.linear(x.to(y.dtype), self.matrices(y.dtype).down)
        h = x_down if self.strengths is None else self._times_strengths(x_down)
        return y, h

    def low_rank(self, h: Tensor, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For a kernel that adds h Uᵀ to parts `start` to `stop`: r columns of h for each, and their rows of U."""
        up = self.matrices(dtype).up[self._columns[start][0] : self._columns[stop - 1][1]]
        if len(self.widths) > 1:
            return h[..., start * self.rank : stop * self.rank], up
        if stop - start > 1:  # of one linear, which has one h
            h = torch.cat([h] * (stop - start), dim=-1)
        return h, up

    def complete(self, y: Tensor, h: Tensor | None, first: int = 0, last: int | None = None) -> Tensor:
        """Add h Uᵀ to parts `first` to `last` of y, in place."""
        if h is None:
            return y
        flat, rows = y.view(-1, y.shape[-1]), h.flatten(0, -2)
        r, up = self.rank, self.matrices(y.dtype).up
        for part in range(len(self.parts))[first:last]:
            start, stop = self._columns[part]
            linear = part if len(self.widths) > 1 else 0
            if self.adapters[linear]:
                flat[:, start:stop].addmm_(rows[:, linear * r : (linear + 1) * r], up[start:stop].t())
        return y

    def up_gradients(self, dy: Tensor, h: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return dh [..., n·r] in the dtype of h, and dyᵀ h [ΣN, r], for dy [..., ΣN]; None without adapters."""
        if h is None:
            return None, None
        dh, ups = lora_up_gradients(dy, h, self.matrices(h.dtype).up, list(self.widths), self.dtype)
        return dh if self.strengths is None else self._times_strengths(dh), ups

    def down_gradients(self, dh: Tensor | None, x: Tensor) -> Tensor | None:
        """Return dhᵀ x [n·r, K] in the dtype of the matrices, for x [..., K]."""
        if dh is None:
            return None
        return product(dh.flatten(0, -2).t(), x.to(dh.dtype).flatten(0, -2), self.dtype)

    def adapter_gradients(self, grad_down: Tensor | None, grad_up: Tensor | None) -> list[Tensor]:
        """Return dA, dB of each adapter in turn, from dhᵀ x [n·r, K] and dyᵀ h [ΣN, r]; [] without adapters."""
        gradients: list[Tensor] = []
        if grad_down is None or grad_up is None:
            return gradients
        by_linear = zip(grad_down.split(self.rank), grad_up.split(self.widths), self.adapters, strict=True)
        for down, up, adapters in by_linear:
            start = 0
            for adapter in adapters:
                stop = start + len(adapter.down)
                of_down = down[start:stop].to(adapter.down.dtype)
                gradients.append(of_down if adapter.factor == 1.0 else of_down * adapter.factor)
                gradients.append(up[:, start:stop].to(adapter.up.dtype).contiguous())
                start = stop
        return gradients

    def kron_gradients(self, dy: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the LoKrs' matrices in turn, and U of each LoKr for `dgrad`; x [..., K]."""
        gradients, us = [], []
        for columns, kron in self.krons:
            of_kron, u = kronecker_gradients(dy[..., columns], x, kron)
            gradients += of_kron
            us.append(u)
        return gradients, us

    def dgrad(self, dy: Tensor, quantized: Quantized | None = None, kron_us: Sequence[Tensor] = ()) -> Tensor:
        """Return dx [..., K] in the dtype of dy [..., ΣN], without the LoRAs' part; `kron_us` of `kron_gradients`."""
        if len(self.bases) == 1:
            dx = self.bases[0].dgrad(dy, quantized)
        else:
            parts = dy.split(self.widths, dim=-1)
            dx = self.bases[0].dgrad(parts[0])
            for base, part in zip(self.bases[1:], parts[1:], strict=True):
                dx = dx.add_(base.dgrad(part).to(dx.dtype))
        for (_, kron), u in zip(self.krons, kron_us, strict=False):
            add_kronecker_dx(dx, u, kron)
        return dx

    def complete_dx(self, dx: Tensor, dh: Tensor | None) -> Tensor:
        """Add dh D to dx, in place."""
        if dh is not None:
            dx.view(-1, dx.shape[-1]).addmm_(dh.to(dx.dtype).flatten(0, -2), self.matrices(dx.dtype).down)
        return dx

    def matrices(self, dtype: torch.dtype) -> Copies:
        """D and U in `dtype`: the copies, or made for this call."""
        if self.copies is not None and self.copies.down.dtype == dtype:
            return self.copies
        like = self.all_adapters[0]
        downs, ups = [], []
        for adapters, width in zip(self.adapters, self.widths, strict=True):
            missing = self.rank
            columns: list[Tensor] = []
            for adapter in adapters:
                downs.append(adapter.down if adapter.factor == 1.0 else adapter.down * adapter.factor)
                columns.append(adapter.up)
                missing -= len(adapter.down)
            if missing:
                downs.append(like.down.new_zeros(missing, like.down.shape[1]))
                columns.append(like.up.new_zeros(width, missing))
            ups.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        up = ups[0] if len(ups) == 1 else torch.cat(ups)
        return Copies(down.to(dtype), up.to(dtype))

    def _times_strengths(self, h: Tensor) -> Tensor:
        """Scale h or dh [B, ..., n·r], image by image, by the strengths, in fp32; neighbours may share one."""
        assert self.strengths is not None
        if len(h) % len(self.strengths):
            raise ValueError(f"{len(self.strengths)} LoRA strengths for a batch of {len(h)}: must be one per image")
        rows = self.strengths.float().repeat_interleave(len(h) // len(self.strengths))
        return (h * rows.view(-1, *[1] * (h.ndim - 1))).to(h.dtype)


def read_group(modules: Sequence[Any], join: bool, parts: tuple[int, ...] = ()) -> LinearGroup:
    """Read linears that share x, with adapters; `join` makes one matrix of FP8 weights. NotFusable if they differ."""
    linears, adapters, loras = [], [], []
    for module in modules:
        linear, own = plain_adapters(module)
        linears.append(linear)
        adapters.append(own)
        loras.append(tuple(each for each in own if isinstance(each, PlainAdapter)))

    if len({id(adapter.strengths) for adapter in chain.from_iterable(loras)}) > 1:
        raise NotFusable("LoRAs whose strengths per image are not the same")
    bases = tuple(map(read_frozen, linears))
    if len({base.input_storage for base in bases} - {None}) > 1:
        raise NotFusable("linears that read the same tensor want it in different formats")
    widths = tuple(linear.out_features for linear in linears)
    if parts and (len(widths) > 1 or sum(parts) != widths[0]):
        raise NotFusable(f"linears of {sum(widths)} outputs in all, where {sum(parts)} are read")
    if join and len(bases) > 1:
        bases = tuple(_joined(linears, bases))
    krons: list[tuple[slice, KroneckerAdapter]] = []
    for own, (start, stop) in zip(adapters, pairwise(accumulate(widths, initial=0)), strict=True):
        krons += [(slice(start, stop), each) for each in own if isinstance(each, KroneckerAdapter)]
    return LinearGroup(bases, widths, tuple(loras), parts or widths, tuple(krons))


def read_linear(module: Any) -> LinearGroup:
    """Read one linear; errors as `read_group`."""
    return read_group((module,), join=False)


class AdapterCopies:
    """bf16 copies of the adapters' matrices of all fused blocks, in one buffer (`LinearGroup.copies`)."""

    def __init__(self, groups: Sequence[LinearGroup], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.groups = [group for group in groups if group.rank]
        self._copies: list[Tensor] = []
        self._matrices: list[Tensor] = []  # the original of each copy
        self._scaled: list[tuple[Tensor, PlainAdapter]] = []  # copy of A·factor, its adapter
        shapes: list[tuple[int, int]] = []
        for group in self.groups:
            width = group.parameters[0].shape[1]
            shapes += [(len(group.widths) * group.rank, width), (sum(group.widths), group.rank)]
        if not shapes:
            return
        sizes = [math.prod(shape) for shape in shapes]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.groups[0].parameters[0].device)
        pieces = [piece.view(shape) for piece, shape in zip(buffer.split(sizes), shapes, strict=True)]

        for group, down, up in zip(self.groups, pieces[::2], pieces[1::2], strict=True):
            group.copies = Copies(down, up)
            of_linears = zip(down.split(group.rank), up.split(group.widths), group.adapters, strict=True)
            for of_downs, of_ups, adapters in of_linears:
                start = 0
                for adapter in adapters:
                    stop = start + len(adapter.down)
                    self._copies.append(of_ups[:, start:stop])
                    self._matrices.append(adapter.up)
                    if adapter.factor == 1.0:
                        self._copies.append(of_downs[start:stop])
                        self._matrices.append(adapter.down)
                    else:
                        self._scaled.append((of_downs[start:stop], adapter))
                    start = stop

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current matrices; where they have changed, not between a forward pass and its backward."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._matrices)
        for copy, adapter in self._scaled:
            copy.copy_(adapter.down * adapter.factor)
