"""The blocks of all models, put together from `parts`: double, single and stream blocks.

Double block: a text and an image stream, with one attention over both. Each stream:

    x = x + gate·linear(attention(q, k, v)),   q, k, v = linears(LayerNorm(x)·(1 + scale) + shift)
    x = x + gate·linear(act(linear(LayerNorm(x)·(1 + scale) + shift)))

Single block: one stream over the tokens of text and image, attention and MLP side by side:

    y = x + gate·linear([attention(q, k, v) | act(mlp)]),   q, k, v, mlp = linears(LayerNorm(x)·(1 + scale) + shift)

Stream block: one stream over all tokens, with norms before its linears, in some models (Z-Image) also after them, and
in some (Krea 2) with a gate g on attention's out:

    x1 = x + gate·norm(linear(attention(q, k, v)·sigmoid(g))),   q, k, v, g = linears(RMSNorm(x)·(1 + scale) + shift)
    y = x1 + gate·norm(linear(silu(a)·b)),                       a, b = linears(RMSNorm(x1)·(1 + scale) + shift)
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
    Attention,
    Call,
    GatedLinear,
    Kept,
    LinearInput,
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
NO_ROTATION = torch.empty(0), torch.empty(0)  # the rotary tables of models without any
Tensors = Sequence[Tensor]
Gradients = tuple[list[Tensor | None], list[Tensor]]  # of a block's inputs, and of its adapters' matrices


class Reader:
    """Knows the blocks of one class."""

    arguments: tuple[str, ...]  # names of the forward's arguments; a block with others is not fused
    processor: str = ""  # class of diffusers' attention processor; empty where the blocks have none
    heads: tuple[str, str] = ("attn.heads", "attn.inner_dim")  # where a block has their number and total width
    of_text: bool = False  # these run before all others, on text alone; nothing is measured on them
    image_first: bool = False  # the block returns (image, text), not (text, image)
    call: Callable[..., Call]  # the block's arguments, by position → `Call`; or NotFusable
    # (block, join) → its fused form; or NotFusable. `join` makes one matrix of weights that read the same tensor
    read: Callable[[Any, bool], Form]


def shared_of(rotary: Rotary | None, kwargs: Any = None, mask: Tensor | None = None) -> Shared:
    """Rotary tables and mask as one; NotFusable without tables, or with further arguments of attention."""
    if kwargs:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, kwargs))}")
    if rotary is None:
        raise NotFusable("no rotary embedding is given")
    return Shared(*rotary, mask)


class Form:
    """A fused block, called with the block's own arguments.

    `inputs` are x of each stream, then the modulations; `needs`: which of them need a gradient.
    `forward` returns the outputs and saves in `kept` what backward reads; `backward` returns all gradients.
    """

    reader: Reader  # set by `fused_block`, as is `saving`
    saving: Saving
    attention: Attention

    def __post_init__(self) -> None:
        parts: list[Any] = []
        for value in vars(self).values():
            parts += vars(value).values() if isinstance(value, Stream) else [value]

        self.groups: list[LinearGroup] = []  # all linears but the modulations'
        self.modulations: list[Modulation] = []  # the block's own
        for part in parts:
            if isinstance(part, Modulation):
                self.modulations.append(part)
            elif isinstance(part, NormLinears):
                self.groups.append(part.linears)
            elif isinstance(part, GatedLinear):
                self.groups.append(part.linear)
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
            shared = Shared(*_no_rotation(tokens, self.attention.head_dim, call.image.device), shared.mask)
        inputs = [*streams, *call.vectors]
        for modulation in self.modulations:
            inputs.append(modulation(call.temb))
        records = torch.is_grad_enabled()  # always off inside an autograd function
        outputs = _Block.apply(self, shared, records, len(inputs), *inputs, *leaves_of(self.parameters))
        if call.text is None:
            return outputs[0]
        text, image = outputs
        if text.ndim == 1:  # the text stream ends with this block
            text = None
        return (image, text) if self.reader.image_first else (text, image)


@functools.cache  # for good: captured graphs read these tensors
def _no_rotation(tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin [tokens, d] of angle 0."""
    cos = torch.ones(tokens, head_dim, device=device)
    return cos, torch.zeros_like(cos)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, shared: Shared, records: bool, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept = Kept(form.saving, records)  # `tensors`: the block's n inputs, then its adapters' leaves
        outputs = form.forward(kept, shared, tensors[:n], ctx.needs_input_grad[4 : 4 + n])
        kept.save(ctx, form.parameters)
        ctx.form, ctx.shared, ctx.n, ctx.leaves = form, shared, n, len(tensors) - n
        return outputs

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[4 : 4 + ctx.n]
        with without_autocast(grads[0].device):
            input_grads, parameter_grads = ctx.form.backward(Kept.of(ctx), ctx.shared, grads, needs)
        for i, needed in enumerate(needs):
            if not needed:
                input_grads[i] = None
        return None, None, None, None, *input_grads, *returned(ctx.leaves, ctx.form.parameters, parameter_grads)


def _save_out(kept: Kept, out: Tensor, cast: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Save attention's out; return its codes for the next linear, cast by `cast_by_kernel`, and their scale."""
    packing = packed_by_kernel(kept.attention)
    codes, code_scale, saved, saved_scale = quantize_and_save(out, *cast, *packing)
    kept.pack("out", out, kept.attention, saved, saved_scale)
    return codes, code_scale


# --- double blocks ---


@dataclass(eq=False)
class Stream:
    """The stream of a stream block, or one of a double block's two.

    `modulation` is None if the model passes in shift, scale and gate. A stream that ends with the block has only
    `inputs`, for attention: linears to q, k, v and, in some models, to the gate on attention's out. With norms after
    its linears, backward recomputes x1 from the saved result of `output`.
    """

    modulation: Modulation | None
    inputs: NormLinears
    output: GatedLinear | None = None  # attention's projection
    mlp_in: NormLinears | None = None
    mlp_out: GatedLinear | None = None
    activation: str = GELU

    @property
    def gates_out(self) -> bool:
        """Whether attention's out is multiplied by a sigmoid."""
        return len(self.inputs.linears.parts) > 3

    def finish(
        self, kept: Kept, name: str, x: Tensor, out: LinearInput, modulation: Sequence[Tensor], trains_gates: bool
    ) -> Tensor:
        """Return the stream's result [B, S_i, D] from attention's out: projection, then MLP; [0] if it ends here."""
        if self.output is None or self.mlp_in is None or self.mlp_out is None:
            return x.new_empty(0)
        _, _, gate, shift, scale, gate_mlp = modulation
        x = self.output.forward(kept, f"{name}out_", x, gate, out, trains_gates)
        projected = self.mlp_in.forward(kept, f"{name}mlp_in_", x, scale, shift, saves_x=not self.output.norm)
        activated = activate(kept, projected, None, self.mlp_out.linear, self.activation, name)
        del projected
        return self.mlp_out.forward(kept, f"{name}mlp_out_", x, gate_mlp, activated, trains_gates)

    def finish_backward(
        self, kept: Kept, name: str, grad: Tensor, out: Tensor | None, modulation: Sequence[Any]
    ) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor]]:
        """Gradients of x, of attention's out, of gate, MLP shift and scale, MLP gate (fp32), and of each adapter."""
        if self.output is None or self.mlp_in is None or self.mlp_out is None:
            zeros = torch.zeros_like(out)
            return zeros, zeros, [], []
        _, _, gate, shift, scale, gate_mlp = modulation
        mlp, linear = kept.read(f"{name}mlp"), self.mlp_out.linear
        dx, dh, grad_up, dgate_mlp, kron_grads = self.mlp_out.backward(
            kept, f"{name}mlp_out_", grad, gate_mlp, lambda: activation_values(kept, None, self.activation, name)
        )
        down = grad_down = x1 = None
        if dh is not None:
            down = linear.matrices(dh.dtype).down
            grad_down = mlp_down_gradient(dh, None, None, *mlp, linear.dtype, self.activation)
        mlp_out_grads = [*linear.adapter_gradients(grad_down, grad_up), *kron_grads]
        dmlp = mlp_activation_backward(dx, dh, down, *mlp, self.activation)
        del dx, dh, mlp
        if self.output.norm:
            x, result = kept.values(f"{name}in_x"), kept.values(f"{name}out_result")
            x1 = gated_sum(x, gate, result, None, None, *packed_by_kernel(None), *self.output.norm)[0]
            del x, result
        dx, dnorm, mlp_in_grads = self.mlp_in.backward(kept, f"{name}mlp_in_", dmlp, grad, scale, shift, x=x1)
        del dmlp, x1

        attended = kept.values("out") if out is None else out  # None: a stream block's
        if self.gates_out:
            attended = attended * kept.values("out_gate").sigmoid()
        linear = self.output.linear
        dout, dh, grad_up, dgate, kron_grads = self.output.backward(kept, f"{name}out_", dx, gate, lambda: attended)
        output_grads = [*linear.adapter_gradients(linear.down_gradients(dh, attended), grad_up), *kron_grads]
        dout = linear.complete_dx(dout, dh)
        return dx, dout, [dgate, dnorm, dgate_mlp], [*output_grads, *mlp_in_grads, *mlp_out_grads]


@dataclass(eq=False)
class DoubleBlock(Form):
    """Two streams and their joint attention; inputs: x [B, S_i, D] of text and image, then modulations [B, n·D]."""

    attention: Attention  # of both streams
    text: Stream
    image: Stream

    def __post_init__(self) -> None:
        super().__post_init__()
        text, image = self.text.output, self.image.output
        if text is not None and text.linear.input_storage != image.linear.input_storage:
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
            tokens = slice(start, start + inputs[i].shape[1])
            start = tokens.stop
            quantized = None
            if storage is not None and cast[1] != "none":
                quantized = Quantized(codes[:, tokens], code_scale[:, tokens], storage.granularity)
            elif storage is not None:
                quantized = quantize(out[:, tokens], storage.format, storage.granularity)
            own_out = out[:, tokens], quantized, None
            results.append(stream.finish(kept, name, inputs[i], own_out, modulations[i], needs[2 + i]))
        return results[0], results[1]

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        out, vectors = kept.values("out"), kept.added("modulation")
        outs = out.tensor_split([-grads[1].shape[1]], dim=1)  # grads[0] is [0] if the text stream ends
        streams = (("text_", self.text), ("image_", self.image))
        modulations, finished = [], []
        for i, (name, stream) in enumerate(streams):
            modulations.append(vectors[i].split(grads[1].shape[-1], dim=1))
            finished.append(stream.finish_backward(kept, name, grads[i], outs[i], modulations[i]))
        residuals, douts, gate_grads, finish_grads = zip(*finished, strict=True)
        dout = torch.cat(douts, dim=1)
        joint, ys, y_scales, size, dtype = self.attention.backward(kept, dout, out, shared)
        del dout, out, outs
        norms, eps = list(self.attention.norms), self.attention.eps
        dys = qkv_rope_backward(joint, ys, y_scales, norms, shared.cos, shared.sin, eps, size, dtype)
        del joint

        dxs, vector_grads = [], []
        parameter_grads: list[Tensor] = []
        for i, (name, stream) in enumerate(streams):
            shift, scale = modulations[i][:2]
            dx, dnorm, inputs_grads = stream.inputs.backward(
                kept, f"{name}in_", dys[i], residuals[i], scale, shift, needs[i] or needs[2 + i]
            )
            dxs.append(dx)
            vector_grads.append(gradient_of_vectors(vectors[i], dnorm, *gate_grads[i]))
            parameter_grads += [*inputs_grads, *finish_grads[i]]
        return [*dxs, *vector_grads], parameter_grads


# --- single blocks ---


@dataclass(eq=False)
class SingleBlock(Form):
    """A single block; inputs: text and image [B, S_i, D], or both as one, and modulation [B, 3·D]."""

    modulation: Modulation | None  # makes shift, scale and gate; None if the model passes them in
    inputs: NormLinears  # to q, k, v and the MLP
    attention: Attention
    output: GatedLinear  # reads [attention's out | act(mlp)]
    activation: str = GELU

    def forward(self, kept: Kept, shared: Shared, inputs: Tensors, needs: Sequence[bool]) -> tuple[Tensor, ...]:
        """See `Form`."""
        *streams, modulation = inputs
        x = streams[0] if len(streams) == 1 else join(streams[0], streams[1])
        shift, scale, gate = modulation.chunk(3, dim=1)
        projected = self.inputs.forward(kept, "", x, scale, shift)
        out = self.attention.forward(kept, [projected], shared)
        activated = activate(kept, projected, out, self.output.linear, self.activation)
        del projected, out  # large
        kept.add("modulation", modulation)
        y = self.output.forward(kept, "out_", x, gate, activated, needs[-1])
        if len(streams) == 1:
            return (y,)
        tokens = streams[0].shape[1]
        return y[:, :tokens], y[:, tokens:]  # views of one tensor, which the next block joins without a copy

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        grad = grads[0] if len(grads) == 1 else join(grads[0], grads[1])
        (modulation,) = kept.added("modulation")
        shift, scale, gate = modulation.chunk(3, dim=1)
        mlp, mlp_scale, size, dtype = kept.read("mlp")
        attended, attended_scale, *_ = kept.read("out")
        linear, width = self.output.linear, activated_width(mlp, self.activation)
        dx, dh, grad_up, dgate, kron_grads = self.output.backward(
            kept, "out_", grad, gate, lambda: activation_values(kept, kept.values("out"), self.activation)
        )
        dout, dmlp = dx[..., :-width], dx[..., -width:]
        mlp_down = grad_down = None
        if dh is not None:
            saved = (attended, attended_scale, mlp, mlp_scale, size, dtype)
            grad_down = mlp_down_gradient(dh, *saved, linear.dtype, self.activation)
            down = linear.matrices(dh.dtype).down
            dout = torch.addmm(dout.flatten(0, -2), dh.flatten(0, -2), down[:, :-width]).view(dout.shape)
            mlp_down = down[:, -width:]
        output_grads = [*linear.adapter_gradients(grad_down, grad_up), *kron_grads]

        out = kept.values("out")
        joint, ys, y_scales, *_ = self.attention.backward(kept, dout, out, shared)
        del out, dout
        y_scale = y_scales[0] if y_scales else None
        norms, eps = list(self.attention.norms), self.attention.eps
        of_mlp = (dmlp, dh, mlp_down, mlp, mlp_scale, size, dtype, self.activation)
        dy = qkv_mlp_backward(joint, ys[0], y_scale, norms, shared.cos, shared.sin, eps, *of_mlp)
        del dx, dmlp, of_mlp, joint
        dx, dnorm, inputs_grads = self.inputs.backward(kept, "", dy, grad, scale, shift, any(needs))
        dxs: Sequence[Tensor | None] = [dx] * len(grads)
        if dx is not None and len(grads) == 2:
            tokens = grads[0].shape[1]
            dxs = dx[:, :tokens], dx[:, tokens:]
        return [*dxs, gradient_of_vectors(modulation, dnorm, dgate)], [*inputs_grads, *output_grads]


def join(text: Tensor, image: Tensor) -> Tensor:
    """Both streams [B, T, D] and [B, S, D] as one, text first, without a copy if they are views of one tensor.

    Diffusers passes them separately; slices and `torch.cat` would copy both ways and zero-fill two gradients.
    """
    batch, tokens, width = text.shape
    rows = tokens + image.shape[1]
    is_adjacent = (
        text.untyped_storage()._cdata == image.untyped_storage()._cdata
        and text.dtype == image.dtype
        and text.stride() == image.stride() == (rows * width, width, 1)
        and image.storage_offset() == text.storage_offset() + tokens * width
    )
    if is_adjacent:
        return text.as_strided((batch, rows, width), text.stride())
    return torch.cat([text, image], dim=1)


# --- stream blocks ---


@dataclass(eq=False)
class StreamBlock(Form):
    """A stream block; inputs: x [B, S, D], and in most models vectors [B, 6·D], to which `table` [6·D] is added.

    Those are attention's scale, shift and gate, then the MLP's.
    """

    attention: Attention
    stream: Stream
    table: Tensor | None = None

    def _vectors(self, x: Tensor, modulation: Sequence[Tensor]) -> tuple[Any, ...]:
        """Shift, scale and gate [B, D] of attention, then of the MLP; without modulation those that change nothing."""
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
        shift, scale, *_ = vectors
        linears, y, h = self.stream.inputs.forward(kept, "in_", x, scale, shift)
        out = self.attention.forward(kept, [(linears, y, h)], shared)
        storage = self.stream.output.linear.input_storage
        if self.stream.gates_out:
            _save_out(kept, out, cast_by_kernel(None))
            linears.complete(y, h, 3)
            gate = y[..., sum(linears.parts[:3]) :]
            *_, saved, saved_scale = quantize_and_save(gate, *cast_by_kernel(None), *packed_by_kernel(kept.storage))
            kept.pack("out_gate", gate, kept.storage, saved, saved_scale)
            out = out * gate.sigmoid()
            quantized = None if storage is None else quantize(out, storage.format, storage.granularity)
            del gate
        else:
            quantized = quantized_by(storage, *_save_out(kept, out, cast_by_kernel(storage)))
        del y, h
        kept.add("modulation", *modulation)
        return (self.stream.finish(kept, "", x, (out, quantized, None), vectors, any(needs[1:])),)

    def backward(self, kept: Kept, shared: Shared, grads: Tensors, needs: Sequence[bool]) -> Gradients:
        """See `Form`."""
        modulation, stream = kept.added("modulation"), self.stream
        vectors = self._vectors(grads[0], modulation)
        shift, scale, *_ = vectors
        dx, dout, gate_grads, finish_grads = stream.finish_backward(kept, "", grads[0], None, vectors)

        out, dgate_out = kept.values("out"), None
        if stream.gates_out:
            sigmoid = kept.values("out_gate").sigmoid()
            dgate_out = torch.ops.aten.sigmoid_backward(dout * out, sigmoid)
            dout = dout * sigmoid
            del sigmoid
        joint, ys, y_scales, size, dtype = self.attention.backward(kept, dout, out, shared)
        del dout, out
        norms, eps = list(self.attention.norms), self.attention.eps
        (dy,) = qkv_rope_backward(joint, ys, y_scales, norms, shared.cos, shared.sin, eps, size, dtype)
        del joint
        if dgate_out is not None:
            dy = torch.cat([dy, dgate_out], dim=-1)
            del dgate_out
        dx, dnorm, inputs_grads = stream.inputs.backward(kept, "in_", dy, dx, scale, shift, any(needs))

        dxs = [dx]
        if modulation:
            dgate, dnorm_mlp, dgate_mlp = gate_grads
            parts: list[Tensor | None] = []
            for shift_and_scale, of_gate in ((dnorm, dgate), (dnorm_mlp, dgate_mlp)):
                parts += (None if shift_and_scale is None else shift_and_scale.flip(1), of_gate)  # scale comes first
            dxs.append(gradient_of_vectors(modulation[0], *parts))
        return dxs, [*inputs_grads, *finish_grads]
