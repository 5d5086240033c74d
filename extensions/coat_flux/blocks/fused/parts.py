"""The parts of a block's forward and backward passes (`forms`).

    NormLinears    n = norm(x)·(1 + scale) + shift,   y = n Wᵀ + b                  saves x, and the adapters' h
    Attention      out = attention(rotate(RMSNorm(q)), rotate(RMSNorm(k)), v)       saves q, k, v and its statistics
    GatedLinear    y = residual + gate·(x Wᵀ + b), or gate·RMSNorm(x Wᵀ + b)        saves x Wᵀ + b if it needs it
    Modulation     [shift | scale | gate …] = silu(temb) Wᵀ + b                     one row per image

Autograd would hold every tensor an operator reads and accumulate gradients in separate kernels. Here a part saves
tensors by name (`Kept`), the large ones in FP8, and kernels add gradients as they go. n is quantized on the fly;
backward recomputes it from the FP8 x for dA and the norm's gradient. q, k and v are saved before norm and rotation.

As leaves of the graph, FLUX.1-dev's 988 adapter matrices cost a tenth of a step's host time: one autograd node
each. Inside `written_gradients` a block returns one stand-in tensor and adds their gradients to `.grad` itself.

Shapes: per stream y [B, S_i, 3·H·d], q, k and v side by side; joint q, k, v [B, S, H, d], of k and v fewer heads in
grouped-query attention; out [B, S, H·d]; cos, sin [S, d], or [B, S, d] per image; shift, scale and gate [B, D].
Source: arXiv 2410.19313, section 5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.activation import Saving
from coat_core.autograd import first_order_only, without_autocast
from coat_core.granularity import PER_GROUP, Storage
from coat_core.ops.attention import AttentionContext, attention_backward, attention_forward
from coat_core.ops.codes import product
from coat_core.ops.gate import gated_sum, gated_sum_backward
from coat_core.ops.gelu import mlp_activation, mlp_activation_down
from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize
from coat_core.ops.qkv import qkv_rope
from coat_core.ops.quantize import dequantize, quantize, rotate
from coat_core.quantize import Quantized

from .linears import LinearGroup, cast_by_kernel, quantized_by

Rotary = tuple[Tensor, Tensor]
EXACT = Saving(None)


class Shared(NamedTuple):
    """Inputs that the attention of all blocks of a pass shares; `mask` (`additive_mask`) broadcasts to [B, H, S, S]."""

    cos: Tensor  # fp32 [S, d] or [B, S, d]; [0] where nothing is rotated
    sin: Tensor  # fp32, like cos
    mask: Tensor | None = None


class Call(NamedTuple):
    """A block's inputs in any model."""

    image: Tensor  # [B, S, D]
    text: Tensor | None  # [B, T, D]; None where `image` has the tokens of both, text first
    shared: Shared  # of the tokens of both, text first
    temb: Tensor | None = None  # [B, D], for the block's own modulations
    vectors: tuple[Tensor, ...] = ()  # or its vectors [B, n·D], of each stream, text first


# --- saved tensors ---


class Saved(NamedTuple):
    """A saved tensor as kernels read it: codes with their scale of 1×G groups, or values (scale None)."""

    x: Any  # a tensor; None where its dtype alone was kept
    scale: Tensor | None
    group_size: int
    dtype: torch.dtype  # before it was quantized


def packed_by_kernel(storage: Storage | None) -> tuple[str, int]:
    """A kernel's arguments `saved_format` and `group_size` for `storage`; "none" where `Kept.pack` quantizes."""
    if storage is None or storage.granularity.name != "per_group":
        return "none", PER_GROUP.group_size
    return storage.format, storage.granularity.group_size


_version = attrgetter("_version")


class Kept:
    """Collects tensors by name for `ctx.save_for_backward` and finds them in backward; `wanted=False` saves nothing."""

    def __init__(self, saving: Saving = EXACT, wanted: bool = True) -> None:
        self.wanted = wanted
        self.storage = saving.tensors if wanted else None
        self.attention = self.storage if saving.attention == "fp8" else None  # of q, k, v and out
        self.context: AttentionContext | None = None  # without its tensors
        self._places: dict[str, slice] = {}  # in `_tensors`
        self._stored: dict[str, tuple[Storage | None, torch.dtype]] = {}  # and its dtype
        self._tensors: list[Any] = []

    def add(self, name: str, *tensors: Tensor | None) -> None:
        """Save these tensors exactly under one name."""
        start = len(self._tensors)
        if self.wanted:
            self._tensors += tensors
        self._places[name] = slice(start, len(self._tensors))

    def pack(
        self, name: str, x: Tensor, storage: Storage | None, codes: Tensor, scale: Tensor, saves: bool = True
    ) -> None:
        """Save x by `storage`, or only its dtype; a kernel has made `codes` and `scale` (see `packed_by_kernel`)."""
        self._stored[name] = storage, x.dtype
        if not (saves and self.wanted):
            self.add(name)
        elif storage is None:
            self.add(name, x.contiguous())
        elif storage.granularity.name == "per_group":
            self.add(name, codes, scale)
        else:
            packed = quantize(x, storage.format, storage.granularity)
            self.add(name, packed.codes, packed.scale)

    def added(self, name: str) -> list[Any]:
        """The tensors of `add`, in backward."""
        return self._tensors[self._places[name]]

    def read(self, name: str) -> Saved:
        """A tensor of `pack` for kernels, in backward."""
        (storage, dtype), tensors = self._stored[name], self._tensors[self._places[name]]
        if not tensors:
            return Saved(None, None, PER_GROUP.group_size, dtype)
        if storage is not None and storage.granularity.name == "per_group":
            return Saved(tensors[0], tensors[1], storage.granularity.group_size, dtype)
        return Saved(self.values(name), None, PER_GROUP.group_size, dtype)

    def values(self, name: str) -> Tensor:
        """A tensor of `pack` in its own dtype, in backward."""
        (storage, dtype), tensors = self._stored[name], self._tensors[self._places[name]]
        return tensors[0] if storage is None else dequantize(tensors[0], tensors[1], storage.granularity, dtype)

    def save(self, ctx: Any, watched: Sequence[Tensor]) -> None:
        """Hand all tensors to autograd, which detects in-place changes; of `watched` it compares versions."""
        ctx.save_for_backward(*self._tensors)
        self._tensors = []
        ctx.kept, ctx.watched, ctx.versions = self, watched, list(map(_version, watched))

    @classmethod
    def of(cls, ctx: Any) -> Kept:
        """The saved tensors, in backward; RuntimeError if one was changed in place since."""
        if list(map(_version, ctx.watched)) != ctx.versions:
            changed = "an adapter that backward needs has been modified by an inplace operation"
            raise RuntimeError(f"{changed}: change adapters after it")
        kept = copy.copy(ctx.kept)
        kept._tensors = list(ctx.saved_tensors)
        return kept


# --- gradients of adapters ---

_written: ContextVar[bool] = ContextVar("written", default=False)
_requires_grad = attrgetter("requires_grad")
_STAND_IN = torch.zeros((), requires_grad=True)


@contextmanager
def written_gradients(on: bool = True) -> Iterator[None]:
    """Let blocks write their adapters' gradients, for a trainer that reads `.grad` after `backward()`.

    Not for `torch.autograd.grad`, nor with hooks on adapters (DistributedDataParallel).
    """
    token = _written.set(on)
    try:
        yield
    finally:
        _written.reset(token)


def leaves_of(parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """An autograd function's inputs for its adapters: the matrices, or their stand-in."""
    is_written = _written.get() and parameters and all(map(_requires_grad, parameters))
    return (_STAND_IN,) if is_written else parameters


def returned(count: int, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> Sequence[Any]:
    """What backward returns for the `count` leaves of `leaves_of`; with a stand-in, `.grad` is written here."""
    if count == len(parameters):
        return grads
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad
    return (None,)


# --- the parts ---


# a stream's linears, the first three those of q, k and v, and their outputs: y [B, S_i, ΣN] without the adapters' part,
# and the adapters' h, None without them
Projected = tuple[LinearGroup, Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class NormLinears:
    """A norm with its eps, and all linears that read its modulated result: RMSNorm with a weight, else LayerNorm."""

    eps: float
    linears: LinearGroup
    weight: Tensor | None = None

    def forward(
        self, kept: Kept, name: str, x: Tensor, scale: Tensor, shift: Tensor | None, saves_x: bool = True
    ) -> Projected:
        """Norm and linears of x [B, S, D], which is saved; shift None stands for zeros."""
        cast, storage = self.linears.input_storage, kept.storage if saves_x else None
        n, codes, code_scale, x_codes, x_scale = norm_modulate_quantize(
            x, scale, shift, self.eps, *cast_by_kernel(cast), *packed_by_kernel(storage), self.weight
        )
        if saves_x:
            kept.pack(f"{name}x", x, storage, x_codes, x_scale)
        y, h = self.linears.forward(n, quantized_by(cast, codes, code_scale))
        kept.add(f"{name}h", h)
        return self.linears, y, h

    def backward(
        self,
        kept: Kept,
        name: str,
        dy: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        needs_dx: bool = True,
        x: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Return dx [B, S, D] in the dtype of x; dshift and dscale, fp32 [B, 2, D]; the adapters' gradients.

        `residual` [B, S, D] is added to dx; `x` is there if it was not saved.
        """
        saved = kept.read(f"{name}x") if x is None else Saved(x, None, PER_GROUP.group_size, x.dtype)
        (h,) = kept.added(f"{name}h")
        dh, grad_up = self.linears.up_gradients(dy, h)
        grad_down, kron_grads, kron_us = None, [], []
        if dh is not None or self.linears.krons:
            n = norm_modulate(saved.x, saved.scale, saved.group_size, scale, shift, self.eps, saved.dtype, self.weight)
            grad_down = self.linears.down_gradients(dh, n)
            kron_grads, kron_us = self.linears.kron_gradients(dy, n)
            del n  # as large as x
        gradients = [*self.linears.adapter_gradients(grad_down, grad_up), *kron_grads]
        if not needs_dx:
            return None, None, gradients
        dn = self.linears.complete_dx(self.linears.dgrad(dy, kron_us=kron_us), dh)
        del kron_us
        dx, dmodulation = norm_modulate_backward(
            dn, saved.x, saved.scale, saved.group_size, scale, self.eps, residual, saved.dtype, self.weight
        )
        return dx, dmodulation, gradients


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention over the tokens of one or two streams together."""

    head_dim: int  # d
    eps: float  # of the RMSNorms
    norms: tuple[Tensor, ...]  # weights [d] of norm_q and norm_k of each stream in turn
    kv_groups: int = 1  # heads of q for each head of k and v; those are saved once and repeated for torch's kernels

    def forward(self, kept: Kept, streams: Sequence[Projected], shared: Shared) -> Tensor:
        """Return out [B, S, H·d] of streams, text first; adapters' parts are added in place if the kernel cannot."""
        packing = packed_by_kernel(kept.attention)
        in_kernel = packing[0] != "none" and self.kv_groups == 1
        for _, _, h in streams:
            in_kernel = in_kernel and h is not None
        ys, hs, ups = [], [], []
        for linears, y, h in streams:
            if in_kernel:
                rows, up = linears.low_rank(h, 0, 3, y.dtype)
                hs.append(rows)
                ups.append(up)
            else:
                linears.complete(y, h, 0, 3)
            ys.append(y[..., : sum(linears.parts[:3])])
        dtype = ys[0].dtype
        q, k, v, *packed = qkv_rope(
            ys, [], hs, ups, list(self.norms), shared.cos, shared.sin, self.eps, *packing, dtype, self.kv_groups
        )
        for i, y in enumerate(ys):
            codes, scale = packed[2 * i : 2 * i + 2] if packed else (y, y)  # y: not read
            kept.pack(f"qkv{i}", y, kept.attention, codes, scale)
        if self.kv_groups > 1:
            k, v = (x.repeat_interleave(self.kv_groups, dim=2) for x in (k, v))
        out, context = attention_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), shared.mask)
        kept.add("statistics", *context.tensors)
        kept.context = context._replace(tensors=())
        return out.transpose(1, 2).flatten(2).to(dtype)

    def backward(
        self, kept: Kept, grad: Tensor, out: Tensor, shared: Shared
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], int, torch.dtype]:
        """Return [dq, dk, dv] after norm and rotation; saved [q|k|v] of each stream, scales, group size, dtype."""
        ys, y_scales = [], []
        for i in range(len(self.norms) // 2):  # streams
            y, scale, size, dtype = kept.read(f"qkv{i}")
            ys.append(y)
            if scale is not None:
                y_scales.append(scale)
        norms = list(self.norms)
        angles = shared.cos, shared.sin
        q, k, v = qkv_rope(ys, y_scales, [], [], norms, *angles, self.eps, "none", size, dtype, self.kv_groups)
        if self.kv_groups > 1:
            k, v = (x.repeat_interleave(self.kv_groups, dim=2) for x in (k, v))
        by_head = (*out.shape[:-1], -1, self.head_dim)
        grad, out = grad.view(by_head).to(q.dtype), out.view(by_head).to(q.dtype)
        assert kept.context is not None
        dq, dk, dv = attention_backward(
            grad.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            kept.context._replace(tensors=tuple(kept.added("statistics"))),
            shared.mask,
        )
        joint = [dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)]
        if self.kv_groups > 1:
            joint[1:] = [grad.unflatten(2, (-1, self.kv_groups)).sum(3) for grad in joint[1:]]
        return joint, ys, y_scales, size, dtype


# arguments of `LinearGroup.forward`: x [B, S, K], [0] if the other two suffice; x by `input_storage`, or None; x Dᵀ,
# or None if the kernel that made x has not computed it
LinearInput = tuple[Tensor, Quantized | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class GatedLinear:
    """A linear whose result goes through a gate, and before it through an RMSNorm of this weight [D] and eps."""

    linear: LinearGroup
    norm: tuple[Tensor, float] | tuple[()] = ()

    def forward(
        self, kept: Kept, name: str, residual: Tensor, gate: Tensor, x: LinearInput, trains_gate: bool
    ) -> Tensor:
        """Return residual + gate·norm(linear(x)) [B, S, D]."""
        result, h = self.linear.forward(*x)
        saves = trains_gate or bool(self.norm)
        packing = packed_by_kernel(kept.storage if saves else None)
        rows = up = None
        if h is not None and saves and packing[0] == "none":  # no kernel saves the sum
            self.linear.complete(result, h)
        elif h is not None:
            rows, up = self.linear.low_rank(h, 0, 1, result.dtype)
        y, codes, scale = gated_sum(residual, gate, result, rows, up, *packing, *self.norm)
        kept.pack(f"{name}result", result, kept.storage, codes, scale, saves)
        kept.add(f"{name}h", h)
        return y

    def backward(
        self, kept: Kept, name: str, grad: Tensor, gate: Tensor, x: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
        """Return dx without the LoRAs' part; dh; dyᵀ h; dgate, fp32 or None; and gradients of LoKr matrices.

        `x` makes the linear's input, which only the last need.
        """
        saved, cast = kept.read(f"{name}result"), cast_by_kernel(self.linear.grad_storage, "e5m2")
        weight, eps = self.norm or (None, 0.0)
        args = (grad, gate, saved.x, saved.scale, saved.group_size, saved.dtype, *cast)
        dy, codes, code_scale, dgate = gated_sum_backward(*args, weight, eps, self.linear.grad_factors)
        quantized = quantized_by(self.linear.grad_storage, codes, code_scale)
        (h,) = kept.added(f"{name}h")
        dh, grad_up = self.linear.up_gradients(dy, h)
        kron_grads, kron_us = self.linear.kron_gradients(dy, x()) if self.linear.krons else ([], [])
        dx = self.linear.dgrad(dy, quantized, kron_us)
        return dx, dh, grad_up, None if saved.x is None else dgate, kron_grads


def activate(
    kept: Kept, projected: Projected, out: Tensor | None, reader: LinearGroup, activation: str, name: str = ""
) -> LinearInput:
    """Return [out | act(mlp)] as `reader` takes it, and save out and mlp; out None: act(mlp) alone."""
    linears, y, h = projected
    first = 0 if out is None else 3  # after q, k, v
    cast, packing = cast_by_kernel(reader.input_storage), packed_by_kernel(kept.storage)
    mlp = y[..., sum(linears.parts[:first]) :]
    rows = up = x_down = None
    if packing[0] == "none":
        linears.complete(y, h, first)
    elif h is not None:
        rows, up = linears.low_rank(h, first, len(linears.parts), y.dtype)
    options = (*cast, *packing, y.dtype, activation)
    if cast[1] != "none" and reader.rank and not reader.krons:
        x_down, *packed = mlp_activation_down(out, mlp, rows, up, reader.matrices(y.dtype).down, *options)
        values = y.new_empty(0)
    else:
        values, *packed = mlp_activation(out, mlp, rows, up, *options)
    codes, scale, out_codes, out_scale, mlp_codes, mlp_scale = packed
    if out is not None:
        kept.pack(f"{name}out", out, kept.attention, out_codes, out_scale)
    kept.pack(f"{name}mlp", mlp, kept.storage, mlp_codes, mlp_scale)
    return values, quantized_by(reader.input_storage, codes, scale), x_down


def activation_values(kept: Kept, out: Tensor | None, activation: str, name: str = "") -> Tensor:
    """[out | act(mlp)] again, from the mlp that `activate` saved."""
    mlp = kept.values(f"{name}mlp")
    packing = *cast_by_kernel(None), *packed_by_kernel(None)
    values: Tensor = mlp_activation(out, mlp, None, None, *packing, mlp.dtype, activation)[0]
    return values


# --- adaLN ---


class Modulation:
    """The linear of an adaLN, one row per image; it reads silu(temb), or temb itself."""

    def __init__(self, linear: LinearGroup, silu: bool = True) -> None:
        self.linear, self.silu = linear, silu
        self.temb: Tensor | None = None
        self.vectors: Tensor | None = None  # those of `temb`, made by `modulate_ahead`

    def __call__(self, temb: Tensor) -> Tensor:
        """The adaLN vectors of a block, side by side [B, n·D], for temb [B, D]."""
        vectors, their_temb = self.vectors, self.temb
        self.vectors = self.temb = None  # for one call
        if vectors is not None and their_temb is temb:
            return vectors
        x = torch.nn.functional.silu(temb) if self.silu else temb
        result: Tensor = _OneModulation.apply(x, self.linear, *leaves_of(self.linear.parameters))
        return result


def modulate_ahead(modulations: Sequence[Modulation], temb: Tensor | None) -> None:
    """Compute the vectors that these modulations of a model return if their next call is for this temb [B, D].

    Frozen weights multiply one by one, adapters of equal shape as one batched product. Only for blocks that are not
    recomputed, since the graph is built here, and a temb without a gradient.
    """
    if temb is None or temb.requires_grad or not modulations:
        return
    x = torch.nn.functional.silu(temb) if modulations[0].silu else temb
    groups: dict[Any, list[Modulation]] = {}
    for modulation in modulations:
        linear = modulation.linear
        has_one_lora = len(linear.all_adapters) == 1 and not linear.krons
        if has_one_lora and linear.strengths is None and linear.input_storage is None:
            base = linear.bases[0]
            key = linear.widths, linear.rank, linear.dtype, base.rotations, base.bias is None
            groups.setdefault(key, []).append(modulation)
    for alike in groups.values():
        linears: list[LinearGroup] = []
        parameters: list[nn.Parameter] = []
        for modulation in alike:
            linears.append(modulation.linear)
            parameters += modulation.linear.parameters
        results = _AlikeModulations.apply(x, linears, *leaves_of(parameters))
        for modulation, vectors in zip(alike, results, strict=True):
            modulation.temb, modulation.vectors = temb, vectors


def gradient_of_vectors(vectors: Tensor, *parts: Tensor | None) -> Tensor | None:
    """Gradients of shift, scale and gate side by side [B, n·D]; None if one is missing."""
    gradients: list[Tensor] = []
    for part in parts:
        if part is None:
            return None
        gradients.append(part.flatten(1))
    return torch.cat(gradients, dim=1).to(vectors.dtype)


class _OneModulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LinearGroup, *leaves: Tensor) -> Tensor:
        storage = linear.input_storage
        y, h = linear.forward(x, None if storage is None else quantize(x, storage.format, storage.granularity))
        kept = Kept()
        kept.add("rows", x, h)
        kept.save(ctx, linear.parameters)
        ctx.linear, ctx.leaves = linear, len(leaves)
        return linear.complete(y, h)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with without_autocast(grad.device):
            kept, linear, dx = Kept.of(ctx), ctx.linear, None
            x, h = kept.added("rows")
            dh, grad_up = linear.up_gradients(grad, h)
            kron_grads, kron_us = linear.kron_gradients(grad, x)
            gradients = [*linear.adapter_gradients(linear.down_gradients(dh, x), grad_up), *kron_grads]
            if ctx.needs_input_grad[0]:
                dx = linear.complete_dx(linear.dgrad(grad, kron_us=kron_us), dh).to(x.dtype)
        return dx, None, *returned(ctx.leaves, linear.parameters, gradients)


class _AlikeModulations(torch.autograd.Function):
    """n modulations of one shape with one LoRA each: x [B, D] (no gradient), h [n, B, r], U [n, N, r], D [n·r, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linears: Sequence[LinearGroup], *leaves: Tensor) -> tuple[Tensor, ...]:
        ys, downs, ups = [], [], []
        parameters: list[nn.Parameter] = []
        outputs, inputs = linears[0].bases[0].rotations
        is_rotated = outputs * inputs > 1  # INT8 weights
        rotated = rotate(x, inputs) if is_rotated else x
        for linear in linears:
            base = linear.bases[0]
            y = base.rotated_product(rotated) if is_rotated else base.forward(x, None)
            down, up = linear.matrices(y.dtype)
            ys.append(y)
            downs.append(down)
            ups.append(up)
            parameters += linear.parameters
        h = x.to(ys[0].dtype) @ torch.cat(downs).t()
        h = h.unflatten(1, (-1, linears[0].rank)).transpose(0, 1)
        kept = Kept()
        kept.add("rows", x, h)
        kept.save(ctx, parameters)
        ctx.linears, ctx.parameters, ctx.leaves = linears, parameters, len(leaves)
        y = torch.stack(ys)
        if is_rotated:
            y = rotate(y, outputs)
            if base.bias is not None:
                y += torch.stack([linear.bases[0].bias for linear in linears])[:, None]
        return torch.baddbmm(y, h, torch.stack(ups).transpose(1, 2)).unbind()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with without_autocast(grads[0].device):
            kept, linears = Kept.of(ctx), ctx.linears
            x, h = kept.added("rows")
            dy, ups = torch.stack(grads).to(h.dtype), []
            for linear in linears:
                ups.append(linear.matrices(h.dtype).up)
            dh = (dy @ torch.stack(ups)).transpose(0, 1).flatten(1)
            grad_downs = product(dh.t(), x.to(h.dtype), linears[0].dtype).split(linears[0].rank)
            grad_ups = product(dy.transpose(1, 2), h, linears[0].dtype)
            gradients: list[Tensor] = []
            for linear, grad_down, grad_up in zip(linears, grad_downs, grad_ups, strict=True):
                adapter = linear.all_adapters[0]
                gradients.append(grad_down if adapter.factor == 1.0 else grad_down * adapter.factor)
                gradients.append(grad_up.to(adapter.up.dtype))
        return None, None, *returned(ctx.leaves, ctx.parameters, gradients)
