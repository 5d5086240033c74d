"""FLUX.1's reader: its double and single blocks, put together from the parts of this package.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic this follows to the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coat_core.activation import PackingConfig
from coat_core.kernels.gelu import mlp_activation_backward
from coat_core.kernels.mlp_gradient import mlp_down_gradient
from coat_core.kernels.qkv import qkv_mlp_backward, qkv_rope_backward
from coat_core.kernels.quantize import quantize, quantize_and_save
from coat_core.quantize import Quantized

from .attention import Attention, Projected, Rotary
from .block import run_block
from .frozen import NotFusable
from .gated_linear import GatedLinear, activate
from .kept import NOT_SAVED, Kept, Saving
from .linears import as_dtype, read_group, read_linear
from .modulation import Modulation
from .norm_linears import NormLinears
from .reading import (
    Reader,
    check_attention,
    check_dropout,
    check_gelu,
    check_norm,
    clipped,
    qk_norm,
    read_modulation,
)
from .streams import join, split

ARGUMENTS = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")
PROCESSOR = "FluxAttnProcessor"


def _check_arguments(args: tuple[Any, ...]) -> None:
    if len(args) > 4 and args[4]:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, args[4]))}")
    if len(args) < 4 or args[3] is None:
        raise NotFusable("no rotary embedding is given")


@dataclass(frozen=True)
class SingleBlock:
    """A FluxSingleTransformerBlock as it was read.

    Attributes:
        saving: how tensors are kept.
        modulation: makes shift, scale and gate.
        inputs: to_q, to_k, to_v, proj_mlp.
        attention: of its one stream.
        output: proj_out.
        parameters: the adapters' matrices but those of the modulation.
    """

    saving: Saving
    modulation: Modulation
    inputs: NormLinears
    attention: Attention
    output: GatedLinear

    def __call__(self, hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        text, hidden = run_block(self, rotary, text, hidden, self.modulation(temb))
        return clipped(text), clipped(hidden)

    def apart(self, hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """The same, in streams that share no memory, as compiled code returns them."""
        text, hidden = (x.clone(memory_format=torch.contiguous_format) for x in self(hidden, text, temb, rotary))
        return text, hidden

    @property
    def modulations(self) -> list[Modulation]:
        """Its own one."""
        return [self.modulation]

    def __post_init__(self) -> None:
        vars(self).update(parameters=[*self.inputs.linears.parameters, *self.output.linear.parameters])

    def forward(
        self, kept: Kept, rotary: Rotary, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """As `WrittenOut.forward`; inputs: text and image [B, S_i, D], and modulation [B, 3·D]."""
        text, image, modulation = inputs
        x, saving = join(text, image), kept.saving(self.saving)
        shift, scale, gate = modulation.chunk(3, dim=1)
        y, h = self.inputs.forward(kept, "", x, scale, shift, saving)
        projected = Projected(self.inputs.linears, y, h)
        out = self.attention.forward(kept, [projected], rotary, saving.of_attention)
        activated = activate(kept, projected, out, self.output.linear, saving)
        del y, projected, out  # not needed any more, and large
        kept.add("modulation", modulation)
        y = self.output.forward(kept, "out_", x, gate, *activated, saving, needs[2])
        return split(y, text.shape[1])

    def backward(
        self, kept: Kept, rotary: Rotary, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        grad, (modulation,) = join(grads[0], grads[1]), kept["modulation"]
        shift, scale, gate = modulation.chunk(3, dim=1)
        dtype, width = kept.facts["qkv"], self.inputs.linears.widths[3]
        mlp, mlp_scale = self.saving.read(kept["mlp"], dtype)
        attended, scale_of_it = self.saving.of_attention.read(kept["out"], dtype)
        size = self.saving.in_passing[1]

        def down_gradient(dh: Tensor) -> Tensor:
            return mlp_down_gradient(dh, attended, scale_of_it, mlp, mlp_scale, size, dtype, self.output.linear.dtype)

        found = self.output.backward(kept, "out_", grad, gate, down_gradient, self.saving)
        dout, dmlp, dh, down = found.dx[..., :-width], found.dx[..., -width:], found.dh, None
        if dh is not None:
            down = self.output.linear.copies(dh.dtype).down
            dout = torch.addmm(dout.flatten(0, -2), dh.flatten(0, -2), down[:, :-width]).view(dout.shape)
            down = down[:, -width:]
        out = self.saving.of_attention.unpack(kept["out"], dtype)
        joint, ys, y_scales = self.attention.backward(kept, dout, out, rotary, self.saving.of_attention)
        del out, dout
        y_scale = y_scales[0] if y_scales else None
        norms, eps = list(self.attention.norms), self.attention.eps
        dy = qkv_mlp_backward(joint, ys[0], y_scale, norms, *rotary, eps, dmlp, dh, down, mlp, mlp_scale, size, dtype)
        dgate, of_output = found.dgate, found.adapters
        del found, dmlp, joint
        dx, dmodulation, of_inputs = self.inputs.backward(kept, "", dy, grad, scale, shift, self.saving, any(needs))
        dtext, dimage = (None, None) if dx is None else split(dx, grads[0].shape[1])
        return [dtext, dimage, _of_modulation(modulation, dmodulation, dgate)], [*of_inputs, *of_output]


@dataclass(frozen=True)
class DoubleBlock:
    """A FluxTransformerBlock as it was read: two streams and their common attention.

    Attributes:
        saving: how tensors are kept.
        attention: of both streams.
        text: its stream.
        image: likewise.
        parameters: the adapters' matrices but those of the modulations.
    """

    saving: Saving
    attention: Attention
    text: Stream
    image: Stream

    def __post_init__(self) -> None:
        vars(self).update(parameters=[*self.text.parameters, *self.image.parameters])

    def __call__(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any, _: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        modulations = [modulation(temb) for modulation in self.modulations]
        text, image = run_block(self, rotary, encoder, hidden, *modulations)
        return clipped(text), image

    def apart(self, hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """The same, in streams that share no memory, as compiled code returns them."""
        return self(hidden, encoder, temb, rotary)

    @property
    def modulations(self) -> list[Modulation]:
        """Those of text and image."""
        return [self.text.modulation, self.image.modulation]

    def forward(
        self, kept: Kept, rotary: Rotary, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """As `WrittenOut.forward`; inputs: x [B, S_i, D] of text and image, then modulations [B, 6·D]."""
        streams, saving = (self.text, self.image), kept.saving(self.saving)
        xs, modulations = inputs[:2], [x.chunk(6, dim=1) for x in inputs[2:]]
        named = list(zip(("text_", "image_"), streams, xs, modulations, needs[2:], strict=True))
        projected = []
        for name, stream, x, (shift, scale, *_), _ in named:
            y, h = stream.inputs.forward(kept, f"{name}in_", x, scale, shift, saving)
            projected.append(Projected(stream.inputs.linears, y, h))
        attends = saving.of_attention
        out = self.attention.forward(kept, projected, rotary, attends)
        del y, projected
        spec = self.text.output.linear.input_spec
        by_row = spec is not None and spec[1].name == "per_row"
        how = (spec[0], "per_row", spec[1].group_size) if spec is not None and by_row else ("e4m3", *NOT_SAVED)
        codes, code_scale, *saved = quantize_and_save(out, *how, *attends.in_passing)
        kept.add("out", *attends.keep(out, saved[0], saved[1]))
        kept.add("modulation", *inputs[2:])
        results, start = [], 0
        for name, stream, x, modulation, trains in named:
            rows = slice(start, start + x.shape[1])
            part, start = out[:, rows], rows.stop
            quantized = None
            if spec is not None and by_row:
                quantized = Quantized(codes[:, rows], code_scale[:, rows], spec[1])
            elif spec is not None:  # one scale for both streams would be coarser than one for each
                quantized = quantize(part, *spec)
            results.append(stream.rest(kept, name, x, part, quantized, modulation, saving, trains))
        return results[0], results[1]

    def backward(
        self, kept: Kept, rotary: Rotary, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        dtype, attends = kept.facts["qkv"], self.saving.of_attention
        out = attends.unpack(kept["out"], dtype)
        modulations = [x.chunk(6, dim=1) for x in kept["modulation"]]
        outs = out.split([grad.shape[1] for grad in grads], dim=1)
        rest = [
            stream.rest_backward(kept, name, grad, part, modulation, self.saving)
            for name, stream, grad, part, modulation in zip(
                ("text_", "image_"), (self.text, self.image), grads, outs, modulations, strict=True
            )
        ]
        dout = torch.cat([found.dout for found in rest], dim=1)
        joint, ys, y_scales = self.attention.backward(kept, dout, out, rotary, attends)
        del dout, out, outs
        norms, eps, size = list(self.attention.norms), self.attention.eps, attends.in_passing[1]
        dys = qkv_rope_backward(joint, ys, y_scales, norms, *rotary, eps, size, dtype)
        del joint
        dxs: list[Tensor | None] = []
        of_modulations: list[Tensor | None] = []
        of_parameters: list[Tensor] = []
        for i, (name, stream) in enumerate((("text_", self.text), ("image_", self.image))):
            shift, scale = modulations[i][:2]
            dx, dmodulation, of_inputs = stream.inputs.backward(
                kept, f"{name}in_", dys[i], rest[i].dx, scale, shift, self.saving, needs[i] or needs[2 + i]
            )
            dxs.append(dx)
            of_modulations.append(_of_modulation(kept["modulation"][i], dmodulation, *rest[i].modulation))
            of_parameters += [*of_inputs, *rest[i].adapters]
        return [*dxs, *of_modulations], of_parameters


class RestGradients(NamedTuple):
    """What `Stream.rest_backward` returns.

    Attributes:
        dx: of the stream before attention's projection is added [B, S_i, D].
        dout: of attention's out, for this stream's tokens.
        modulation: of attention's gate, of the MLP's shift and scale [B, 2, D], and of its gate, in fp32; None where
            they are not trained.
        adapters: [dA, dB] of each, as `Stream.parameters`.
    """

    dx: Tensor
    dout: Tensor
    modulation: tuple[Tensor | None, Tensor | None, Tensor | None]
    adapters: list[Tensor]


@dataclass(frozen=True)
class Stream:
    """One of a double block's two streams.

    Attributes:
        modulation: makes shift, scale and gate of attention, then of the MLP.
        inputs: to q, k and v.
        output: attention's projection.
        up: the MLP's first linear.
        down: the MLP's second linear.
    """

    modulation: Modulation
    inputs: NormLinears
    output: GatedLinear
    up: NormLinears
    down: GatedLinear

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices but those of the modulation."""
        groups = (self.inputs.linears, self.output.linear, self.up.linears, self.down.linear)
        return [parameter for group in groups for parameter in group.parameters]

    def rest(
        self,
        kept: Kept,
        name: str,
        x: Tensor,
        out: Tensor,
        quantized: Quantized | None,
        modulation: Sequence[Tensor],
        saving: Saving,
        trains_gates: bool,
    ) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        _, _, gate, shift, scale, gate_mlp = modulation
        x = self.output.forward(kept, f"{name}out_", x, gate, out, quantized, None, saving, trains_gates)
        y, h = self.up.forward(kept, f"{name}up_", x, scale, shift, saving)
        activated = activate(kept, Projected(self.up.linears, y, h), None, self.down.linear, saving, name)
        del y
        return self.down.forward(kept, f"{name}down_", x, gate_mlp, *activated, saving, trains_gates)

    def rest_backward(
        self, kept: Kept, name: str, grad: Tensor, out: Tensor, modulation: Sequence[Tensor], saving: Saving
    ) -> RestGradients:
        """Gradients of `rest`."""
        _, _, gate, shift, scale, gate_mlp = modulation
        dtype, size = kept.facts[f"{name}mlp"], saving.in_passing[1]
        mlp, mlp_scale = saving.read(kept[f"{name}mlp"], dtype)

        def down_gradient(dh: Tensor) -> Tensor:
            return mlp_down_gradient(dh, None, None, mlp, mlp_scale, size, dtype, self.down.linear.dtype)

        dx, dh, dgate_mlp, of_down = self.down.backward(kept, f"{name}down_", grad, gate_mlp, down_gradient, saving)
        low_rank = (None, None) if dh is None else (dh, self.down.linear.copies(dh.dtype).down)
        dmlp = mlp_activation_backward(dx, *low_rank, mlp, mlp_scale, size, dtype)
        del dx
        dx, dnorm, of_up = self.up.backward(kept, f"{name}up_", dmlp, grad, scale, shift, saving, True)
        del dmlp
        assert dx is not None
        dout, dh, dgate, of_output = self.output.backward(
            kept, f"{name}out_", dx, gate, lambda dh: self.output.linear.down_gradient(dh, out), saving
        )
        dout = self.output.linear.complete_dx(dout, dh)
        return RestGradients(dx, dout, (dgate, dnorm, dgate_mlp), [*of_output, *of_up, *of_down])


def _of_modulation(modulation: Tensor, *parts: Tensor | None) -> Tensor | None:
    """Gradients of shift, scale and gate side by side, as the modulation [B, n·D]; None where one is not there."""
    found = [part.flatten(1) for part in parts if part is not None]
    return as_dtype(torch.cat(found, dim=1), modulation.dtype) if len(found) == len(parts) else None


def _read_single(block: Any, config: PackingConfig | None, join: bool) -> SingleBlock:
    attn, eps = block.attn, check_norm(block.norm.norm)
    check_attention(attn, PROCESSOR)
    check_gelu(block.act_mlp)
    return SingleBlock(
        Saving(config),
        read_modulation(block.norm),
        NormLinears(eps, read_group((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp), join)),
        Attention(attn.head_dim, *qk_norm(attn.norm_q, attn.norm_k)),
        GatedLinear(read_linear(block.proj_out)),
    )


def _read_double(block: Any, config: PackingConfig | None, join: bool) -> DoubleBlock:
    attn = block.attn
    check_attention(attn, PROCESSOR)
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    check_dropout(attn.to_out[1])
    text = _read_stream(
        block.norm1_context,
        block.norm2_context,
        block.ff_context,
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out),
        join,
    )
    image = _read_stream(
        block.norm1,
        block.norm2,
        block.ff,
        (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]),
        join,
    )
    if text.output.linear.input_spec != image.output.linear.input_spec:
        raise NotFusable("the outputs of attention want it in different formats")
    eps, norms = qk_norm(attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k)
    return DoubleBlock(Saving(config), Attention(attn.head_dim, eps, norms), text, image)


def _read_stream(norm1: Any, norm2: Any, ff: Any, linears: tuple[Any, ...], join: bool) -> Stream:
    if len(ff.net) != 3:
        raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
    check_gelu(ff.net[0])
    check_dropout(ff.net[1])
    output, up, down = (read_linear(module) for module in (linears[3], ff.net[0].proj, ff.net[2]))
    inputs = NormLinears(check_norm(norm1.norm), read_group(linears[:3], join))
    return Stream(
        read_modulation(norm1), inputs, GatedLinear(output), NormLinears(check_norm(norm2), up), GatedLinear(down)
    )


DOUBLE = Reader(ARGUMENTS, _check_arguments, _read_double)
SINGLE = Reader(ARGUMENTS, _check_arguments, _read_single)
