"""The blocks of all models, put together from `parts`: double, single and stream blocks.

Double block, of a text and an image stream with joint attention, each:

    x = x + gate·linear(attention(q, k, v)),   q, k, v = linears(LayerNorm(x)·(1 + scale) + shift)
    x = x + gate·linear(act(linear(LayerNorm(x)·(1 + scale) + shift)))

Single block, of one stream over the tokens of text and image, with n = LayerNorm(x)·(1 + scale) + shift:

    y = x + gate·linear([attention(q, k, v) | act(mlp)]),   [q | k | v | mlp] = linears(n)

Stream block, of one stream of all tokens, with norms before its linears and in some models (Z-Image) after them, and in
some (Krea 2) with a gate g on attention's out:

    x1 = x + gate·norm(linear(attention(q, k, v)·sigmoid(g))),   q, k, v, g = linears(RMSNorm(x)·(1 + scale) + shift)
    y = x1 + gate·norm(linear(silu(a)·b)),                       a, b = linears(RMSNorm(x1)·(1 + scale) + shift)

Forward and backward stand one below the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coat_core.activation import Saving
from coat_core.autograd import first_order_only, without_autocast
from coat_core.ops.gate import gated_sum
from coat_core.ops.gelu import activated_width, mlp_activation_backward, mlp_down_gradient
from coat_core.ops.qkv import qkv_mlp_backward, qkv_rope_backward
from coat_core.ops.quantize import quantize, quantize_and_save
from coat_core.quantize import Quantized

from .linears import LinearGroup, NotFusable, cast_by_kernel, quantized_by
from .parts import (
    Activated,
    Attention,
    Call,
    GatedLinear,
    Kept,
    Modulation,
    NormLinears,
    Rotary,
    Shared,
    activate,
    activation_values,
    gradient_of_vectors,
    leaves_of,
    packed_by_kernel,
    returned,
)

GELU, SWIGLU = "gelu_tanh", "silu_and_mul"  # as `coat_core.ops.gelu` names them
UNTURNED = torch.empty(0), torch.empty(0)  # the rotary tables of blocks without any
Tensors = Sequence[Tensor]
Gradients = tuple[list[Tensor | None], list[Tensor]]  # of a block's inputs, and of its adapters' matrices


class Reader:
    """Knows the blocks of one class."""

    arguments: tuple[str, ...]  # of the class's forward, by name; of another diffusers version they may differ
    processor: str = ""  # class of diffusers' attention processor; empty where the blocks have none
    heads: tuple[str, str] = ("attn.heads", "attn.inner_dim")  # where a block has their number, and all their features
    of_text: bool = False  # blocks that run before all others, on text alone; nothing is measured on those
    image_first: bool = False  # the results of two streams are those of image and text, in this order
    call: Callable[..., Call]  # a call's arguments, by position → `Call`; or NotFusable
    # a block → its fused form; or NotFusable. `join` makes one matrix of weights that read the same tensor
    read: Callable[[Any, bool], Form]


def shared_of(rotary: Rotary | None, kwargs: Any = None, mask: Tensor | None = None) -> Shared:
    """A call's rotary tables and mask; NotFusable without tables, or with further arguments of attention."""
    if kwargs:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, kwargs))}")
    if rotary is None:
        raise NotFusable("no rotary embedding is given")
    return Shared(*rotary, mask)


class Form:
    """A block as read, called with the block's own arguments; a subclass has the two passes.

    `forward` returns the outputs and saves in `kept` what backward reads; `backward` returns all gradients.
    """

    reader: Reader
    saving: Saving
    attention: Attention

    def __post_init__(self) -> None:
        self.groups: list[LinearGroup] = []  # all linears but the modulations'
        self.modulations: list[Modulation] = []  # the block's own
        for part in list(vars(self).values()):
            for each in vars(part).values() if isinstance(part, Stream) else (part,):
                if isinstance(each, Modulation):
                    self.modulations.append(each)
                elif isinstance(each, NormLinears):
                    self.groups.append(each.linears)
                elif isinstance(each, GatedLinear):
                    self.groups.append(each.linear)
        self.parameters = [parameter for group in self.groups for parameter in group.parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; NotFusable for unknown arguments."""
        if kwargs:
            raise NotFusable(f"called with keywords ({', '.join(kwargs)})")
        call = self.reader.call(*args)
        shared = call.shared
        streams = [call.image] if call.text is None else [call.text, call.image]
        if not shared.cos.numel():
            tokens = sum(stream.shape[1] for stream in streams)
            shared = Shared(*_unturned(tokens, self.attention.head_dim, call.image.device), shared.mask)
        inputs, keeps = [*streams, *call.vectors], torch.is_grad_enabled()
        for modulation in self.modulations:
            inputs.append(modulation(call.temb))
        outputs = _Block.apply(self, shared, keeps, len(inputs), *inputs, *leaves_of(self.parameters))
        if call.text is None:
            return outputs[0]
        text, image = outputs
        if text.ndim == 1:  # it ends with this block
            text = None
        return (image, text) if self.reader.image_first else (text, image)


@functools.cache  # without a limit: a captured graph goes on reading them
def _unturned(tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin [tokens, d] of no angle."""
    cos = torch.ones(tokens, head_dim, device=device)
    return cos, torch.zeros_like(cos)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, shared: Shared, keeps: bool, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept = Kept(form.saving, keeps)
        outputs = form.forward(kept, shared, tensors[:count], ctx.needs_input_grad[4 : 4 + count])
        kept.save(ctx, form.parameters)
        ctx.form, ctx.shared, ctx.count, ctx.leaves = form, shared, count, len(tensors) - count
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[4 : 4 + ctx.count]
        with without_autocast(grads[0].device):
            of_inputs, of_parameters = ctx.form.backward(Kept.of(ctx), ctx.shared, grads, needs)
        for i, needed in enumerate(needs):
            if not needed:
                of_inputs[i] = None
        return None, None, None, None, *of_inputs, *returned(ctx.leaves, ctx.form.parameters, of_parameters)


def _save_out(kept: Kept, out: Tensor, cast: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Save attention's out; return its codes for the next linear, by `cast_by_kernel`, and their scale."""
    packing = packed_by_kernel(kept.attention)
    codes, code_scale, saved, saved_scale = quantize_and_save(out, *cast, *packing)
    kept.pack("out", out, kept.attention, saved, saved_scale)
    return codes, code_scale


# --- double blocks ---


@dataclass(eq=False)
class Stream:
    """The stream of a stream block, or one of a double block's two.

    `modulation` is None if the model passes in shift, scale and gate. A stream that ends with the block has inputs
    alone: image tokens attend to it. With norms after its linears, whose results backward needs, x1 is recomputed.
    A fourth part of the inputs is the gate on attention's out.
    """

    modulation: Modulation | None
    inputs: NormLinears  # to q, k and v
    output: GatedLinear | None = None  # attention's projection
    up: NormLinears | None = None  # the MLP's first linear
    down: GatedLinear | None = None  # the MLP's second linear
    activation: str = GELU

    @property
    def gates_out(self) -> bool:
        """Whether attention's out is multiplied by a sigmoid."""
        return len(self.inputs.linears.parts) > 3

    def rest(
        self, kept: Kept, name: str, x: Tensor, out: Activated, modulation: Sequence[Tensor], trains_gates: bool
    ) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        if self.output is None or self.up is None or self.down is None:
            return x.new_empty(0)
        _, _, gate, shift, scale, gate_mlp = modulation
        x = self.output.forward(kept, f"{name}out_", x, gate, out, trains_gates)
        projected = self.up.forward(kept, f"{name}up_", x, scale, shift, saves_x=not self.output.norm)
        activated = activate(kept, projected, None, self.down.linear, self.activation, name)
        del projected
        return self.down.forward(kept, f"{name}down_", x, gate_mlp, activated, trains_gates)

    def rest_backward(
        self, kept: Kept, name: str, grad: Tensor, out: Tensor | None, modulation: Sequence[Any]
    ) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor]]:
        """Gradients of x, of attention's out, of gate, MLP shift and scale, MLP gate (fp32), and of each adapter.

        `out` is None if the stream is the block's only one.
        """
        if self.output is None or self.up is None or self.down is None:
            zeros = torch.zeros_like(out)
            return zeros, zeros, [], []
        _, _, gate, shift, scale, gate_mlp = modulation
        reads, linear = kept.read(f"{name}mlp"), self.down.linear
        dx, dh, ups, dgate_mlp, of_krons = self.down.backward(
            kept, f"{name}down_", grad, gate_mlp, lambda: activation_values(kept, None, self.activation, name)
        )
        matrix = downs = x = None
        if dh is not None:
            matrix = linear.matrices(dh.dtype).down
            downs = mlp_down_gradient(dh, None, None, *reads, linear.dtype, self.activation)
        of_down = [*linear.adapter_gradients(downs, ups), *of_krons]
        dmlp = mlp_activation_backward(dx, dh, matrix, *reads, self.activation)
        del dx, dh, reads
        if self.output.norm:
            x, result = kept.values(f"{name}in_x"), kept.values(f"{name}out_result")
            x = gated_sum(x, gate, result, None, None, *packed_by_kernel(None), *self.output.norm)[0]
            del result
        dx, dnorm, of_up = self.up.backward(kept, f"{name}up_", dmlp, grad, scale, shift, x=x)
        del dmlp, x
        attended = kept.values("out") if out is None else out
        if self.gates_out:
            attended = attended * kept.values("out_gate").sigmoid()
        linear = self.output.linear
        dout, dh, ups, dgate, of_krons = self.output.backward(kept, f"{name}out_", dx, gate, lambda: attended)
        of_output = [*linear.adapter_gradients(linear.down_gradients(dh, attended), ups), *of_krons]
        dout = linear.complete_dx(dout, dh)
        return dx, dout, [dgate, dnorm, dgate_mlp], [*of_output, *of_up, *of_down]


@dataclass(eq=False)
class DoubleBlock(Form):
    """Two streams and their joint attention; inputs: x [B, S_i, D] of text and image, then modulations [B, n·D]."""

    attention: Attention  # of both streams
    text: Stream
    image: Stream

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.text.output is not None
            and self.text.output.linear.input_storage != self.image.output.linear.input_storage
        ):
            raise NotFusable("the outputs of attention want it in different formats")

    def forward(self, kept: Kept, shared: Shared, inputs: Tensors, needs: Sequence[bool]) -> tuple[Tensor, ...]:
        """See `Form`."""
        streams = (("text_", self.text), ("image_", self.image))
        modulations, projected = [], []
        for i, (name, stream) in enumerate(streams):
            modulations.append(inputs[2 + i].split(inputs[1].shape[-1], dim=1))
            shift, scale = modulations[i][:2]
            projected.append(stream.inputs.forward(kept, f"{name}in_", inputs[i], scale, shift))
        out = self.attention.forward(kept, projected, shared)
        del projected
        storage = self.image.output.linear.input_storage
        # one scale for both streams would be coarser than one for each
        cast = cast_by_kernel(storage if storage is not None and storage.granularity.name == "per_row" else None)
        codes, code_scale = _save_out(kept, out, cast)
        kept.add("modulation", *inputs[2:])
        results, start = [], 0
        for i, (name, stream) in enumerate(streams):
            rows = slice(start, start + inputs[i].shape[1])
            part, start = out[:, rows], rows.stop
            quantized = None
            if storage is not None and cast[1] != "none":
                quantized = Quantized(codes[:, rows], code_scale[:, rows], storage.granularity)
            elif storage is not None:
                quantized = quantize(part, storage.format, storage.granularity)
            read = part, quantized, None
            results.append(stream.rest(kept, name, inputs[i], read, modulations[i], needs[2 + i]))
        return results[0], results[1]

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        out, vectors = kept.values("out"), kept.all("modulation")
        outs = out.tensor_split([-grads[1].shape[1]], dim=1)
        streams = (("text_", self.text), ("image_", self.image))
        modulations, rest = [], []
        for i, (name, stream) in enumerate(streams):
            modulations.append(vectors[i].split(grads[1].shape[-1], dim=1))
            rest.append(stream.rest_backward(kept, name, grads[i], outs[i], modulations[i]))
        dxs_of_rest, douts, of_gates, of_rest = zip(*rest, strict=True)
        dout = torch.cat(douts, dim=1)
        joint, ys, y_scales, size, dtype = self.attention.backward(kept, dout, out, shared)
        del dout, out, outs
        norms, eps = list(self.attention.norms), self.attention.eps
        dys = qkv_rope_backward(joint, ys, y_scales, norms, shared.cos, shared.sin, eps, size, dtype)
        del joint
        dxs: list[Tensor | None] = []
        of_modulations: list[Tensor | None] = []
        of_parameters: list[Tensor] = []
        for i, (name, stream) in enumerate(streams):
            shift, scale = modulations[i][:2]
            dx, dmodulation, of_inputs = stream.inputs.backward(
                kept, f"{name}in_", dys[i], dxs_of_rest[i], scale, shift, needs[i] or needs[2 + i]
            )
            dxs.append(dx)
            of_modulations.append(gradient_of_vectors(vectors[i], dmodulation, *of_gates[i]))
            of_parameters += [*of_inputs, *of_rest[i]]
        return [*dxs, *of_modulations], of_parameters


# --- single blocks ---


@dataclass(eq=False)
class SingleBlock(Form):
    """A single block; inputs: text and image [B, S_i, D], or both as one, and modulation [B, 3·D]."""

    modulation: Modulation | None  # makes shift, scale and gate; None where the model hands them in
    inputs: NormLinears  # to q, k, v and the MLP
    attention: Attention  # of its one stream
    output: GatedLinear  # reads attention's out and the MLP
    activation: str = GELU

    def forward(self, kept: Kept, shared: Shared, inputs: Tensors, needs: Sequence[bool]) -> tuple[Tensor, ...]:
        """See `Form`."""
        *streams, modulation = inputs
        x = streams[0] if len(streams) == 1 else join(streams[0], streams[1])
        shift, scale, gate = modulation.chunk(3, dim=1)
        projected = self.inputs.forward(kept, "", x, scale, shift)
        out = self.attention.forward(kept, [projected], shared)
        activated = activate(kept, projected, out, self.output.linear, self.activation)
        del projected, out  # not needed any more, and large
        kept.add("modulation", modulation)
        y = self.output.forward(kept, "out_", x, gate, activated, needs[-1])
        tokens = streams[0].shape[1]  # views of one tensor, which the next block joins without a copy
        return (y,) if len(streams) == 1 else (y[:, :tokens], y[:, tokens:])

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        grad = grads[0] if len(grads) == 1 else join(grads[0], grads[1])
        (modulation,) = kept.all("modulation")
        shift, scale, gate = modulation.chunk(3, dim=1)
        mlp, mlp_scale, size, dtype = kept.read("mlp")
        attended, attended_scale, *_ = kept.read("out")
        linear, width = self.output.linear, activated_width(mlp, self.activation)
        dx, dh, ups, dgate, of_krons = self.output.backward(
            kept, "out_", grad, gate, lambda: activation_values(kept, kept.values("out"), self.activation)
        )
        dout, dmlp, down, downs = dx[..., :-width], dx[..., -width:], None, None
        if dh is not None:
            reads = (attended, attended_scale, mlp, mlp_scale, size, dtype)
            downs = mlp_down_gradient(dh, *reads, linear.dtype, self.activation)
            down = linear.matrices(dh.dtype).down
            dout = torch.addmm(dout.flatten(0, -2), dh.flatten(0, -2), down[:, :-width]).view(dout.shape)
            down = down[:, -width:]
        of_output = [*linear.adapter_gradients(downs, ups), *of_krons]
        out = kept.values("out")
        joint, ys, y_scales, *_ = self.attention.backward(kept, dout, out, shared)
        del out, dout
        y_scale = y_scales[0] if y_scales else None
        norms, eps = list(self.attention.norms), self.attention.eps
        of_mlp = (dmlp, dh, down, mlp, mlp_scale, size, dtype, self.activation)
        dy = qkv_mlp_backward(joint, ys[0], y_scale, norms, shared.cos, shared.sin, eps, *of_mlp)
        del dx, dmlp, of_mlp, joint
        dx, dmodulation, of_inputs = self.inputs.backward(kept, "", dy, grad, scale, shift, any(needs))
        dxs: Sequence[Tensor | None] = [dx] * len(grads)
        if dx is not None and len(grads) == 2:
            tokens = grads[0].shape[1]
            dxs = dx[:, :tokens], dx[:, tokens:]
        return [*dxs, gradient_of_vectors(modulation, dmodulation, dgate)], [*of_inputs, *of_output]


def join(text: Tensor, image: Tensor) -> Tensor:
    """Both streams [B, T, D] and [B, S, D] as one, text first, without a copy if they are views of one tensor.

    Diffusers passes them separately; slices and `torch.cat` would copy both ways and zero-fill two gradients.
    """
    batch, tokens, width = text.shape
    rows = tokens + image.shape[1]
    follows = (
        text.untyped_storage()._cdata == image.untyped_storage()._cdata
        and text.dtype == image.dtype
        and text.stride() == image.stride() == (rows * width, width, 1)
        and image.storage_offset() == text.storage_offset() + tokens * width
    )
    if follows:
        return text.as_strided((batch, rows, width), text.stride())
    return torch.cat([text, image], dim=1)


# --- stream blocks ---


@dataclass(eq=False)
class StreamBlock(Form):
    """A stream block; inputs: x [B, S, D], and where it is modulated [B, 6·D]: scale, shift, gate, then the MLP's.

    `table` [6·D] is added to those.
    """

    attention: Attention
    stream: Stream
    table: Tensor | None = None

    def _vectors(self, x: Tensor, modulation: Sequence[Tensor]) -> tuple[Any, ...]:
        """Shift, scale and gate [B, D] of attention, then of the MLP; by default those that change nothing."""
        if not modulation:
            ones = x.new_ones((len(x), x.shape[-1]), dtype=self.stream.inputs.weight.dtype)
            return None, torch.zeros_like(ones), ones, None, torch.zeros_like(ones), ones
        vectors = modulation[0] if self.table is None else modulation[0] + self.table
        scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = vectors.chunk(6, dim=1)
        return shift, scale, gate, shift_mlp, scale_mlp, gate_mlp

    def forward(self, kept: Kept, shared: Shared, inputs: Tensors, needs: Sequence[bool]) -> tuple[Tensor, ...]:
        """See `Form`."""
        x, *modulation = inputs
        vectors = self._vectors(x, modulation)
        linears, y, h = self.stream.inputs.forward(kept, "in_", x, vectors[1], vectors[0])
        out = self.attention.forward(kept, [(linears, y, h)], shared)
        storage = self.stream.output.linear.input_storage
        if self.stream.gates_out:
            _save_out(kept, out, cast_by_kernel(None))
            gate = linears.complete(y, h, 3)[..., sum(linears.parts[:3]) :]
            *_, saved, saved_scale = quantize_and_save(gate, *cast_by_kernel(None), *packed_by_kernel(kept.storage))
            kept.pack("out_gate", gate, kept.storage, saved, saved_scale)
            out = out * gate.sigmoid()
            quantized = None if storage is None else quantize(out, storage.format, storage.granularity)
            del gate
        else:
            quantized = quantized_by(storage, *_save_out(kept, out, cast_by_kernel(storage)))
        del y, h
        kept.add("modulation", *modulation)
        return (self.stream.rest(kept, "", x, (out, quantized, None), vectors, any(needs[1:])),)

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        modulation, stream = kept.all("modulation"), self.stream
        vectors = self._vectors(grads[0], modulation)
        dx, dout, of_gates, adapters = stream.rest_backward(kept, "", grads[0], None, vectors)
        out, of_parts = kept.values("out"), []
        if stream.gates_out:
            sigmoid = kept.values("out_gate").sigmoid()
            of_parts = [torch.ops.aten.sigmoid_backward(dout * out, sigmoid)]
            dout = dout * sigmoid
            del sigmoid
        joint, ys, y_scales, size, dtype = self.attention.backward(kept, dout, out, shared)
        del dout, out
        norms, eps = list(self.attention.norms), self.attention.eps
        of_parts[:0] = qkv_rope_backward(joint, ys, y_scales, norms, shared.cos, shared.sin, eps, size, dtype)
        del joint
        dy = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts, dim=-1)
        del of_parts
        dx, dmodulation, of_inputs = stream.inputs.backward(kept, "in_", dy, dx, vectors[1], vectors[0], any(needs))
        dxs = [dx]
        if modulation:
            dgate, dmodulation_mlp, dgate_mlp = of_gates
            parts: list[Tensor | None] = []
            for shift_and_scale, of_gate in ((dmodulation, dgate), (dmodulation_mlp, dgate_mlp)):
                parts += (None if shift_and_scale is None else shift_and_scale.flip(1), of_gate)
            dxs.append(gradient_of_vectors(modulation[0], *parts))
        return dxs, [*of_inputs, *adapters]
