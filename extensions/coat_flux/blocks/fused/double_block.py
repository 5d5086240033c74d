"""A double block of any model: a text and an image stream with joint attention.

Each stream:

    x = x + gate·linear(out),   q, k, v = linears(LayerNorm(x)·(1 + scale) + shift)
    x = x + gate·linear(act(linear(LayerNorm(x)·(1 + scale) + shift)))

In a model's last block, unused text output stops at q, k and v (`LastStream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coat_core.ops.gelu import mlp_activation_backward
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.ops.qkv import qkv_rope_backward
from coat_core.ops.quantize import quantize, quantize_and_save
from coat_core.quantize import Quantized

from .block import NOT_SAVED, Call, Kept, Saving, Shared, run_block
from .linears import made_in_passing
from .modulation import Modulation, gradient_of_vectors
from .parts import Activated, Attention, GatedLinear, NormLinears, activate


@dataclass(frozen=True)
class DoubleBlock:
    """A double block as read: two streams and their joint attention."""

    saving: Saving  # how tensors are saved
    attention: Attention  # of both streams
    text: Stream | LastStream
    image: Stream

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices but those of the modulations."""
        return [*self.text.parameters, *self.image.parameters]

    def __call__(self, call: Call) -> tuple[Tensor | None, Tensor]:
        """Return the text and the image stream."""
        assert call.text is not None
        vectors = call.vectors or [modulation(call.temb) for modulation in self.modulations]
        text, image = run_block(self, call.shared, call.text, call.image, *vectors)
        return text, image

    @property
    def modulations(self) -> list[Modulation]:
        """Those of text and image, if they have their own."""
        return [each for each in (self.text.modulation, self.image.modulation) if each is not None]

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """As `WrittenOut.forward`; inputs: x [B, S_i, D] of text and image, then modulations [B, n·D]."""
        streams, saving = (self.text, self.image), kept.saving(self.saving)
        xs, modulations = inputs[:2], [x.split(inputs[1].shape[-1], dim=1) for x in inputs[2:]]
        named = list(zip(("text_", "image_"), streams, xs, modulations, needs[2:], strict=True))
        projected = []
        for name, stream, x, (shift, scale, *_), _ in named:
            projected.append(stream.inputs.forward(kept, f"{name}in_", x, scale, shift, saving))
        attends = saving.of_attention
        out = self.attention.forward(kept, projected, shared, attends)
        del projected
        spec = self.image.output.linear.input_spec
        by_row = spec is not None and spec[1].name == "per_row" and made_in_passing(spec)
        cast = (spec[0], "per_row", spec[1].group_size) if spec is not None and by_row else ("e4m3", *NOT_SAVED)
        codes, code_scale, *saved = quantize_and_save(out, *cast, *attends.in_passing)
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
            results.append(stream.rest(kept, name, x, Activated(part, quantized), modulation, saving, trains))
        return results[0], results[1]

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        dtype, attends = kept.facts["qkv"], self.saving.of_attention
        out = attends.unpack(kept["out"], dtype)
        modulations = [x.split(grads[1].shape[-1], dim=1) for x in kept["modulation"]]
        outs = out.tensor_split([-grads[1].shape[1]], dim=1)
        rest = [
            stream.rest_backward(kept, name, grad, part, modulation, self.saving)
            for name, stream, grad, part, modulation in zip(
                ("text_", "image_"), (self.text, self.image), grads, outs, modulations, strict=True
            )
        ]
        dout = torch.cat([gradients.dout for gradients in rest], dim=1)
        joint, ys, y_scales = self.attention.backward(kept, dout, out, shared, attends)
        del dout, out, outs
        norms, eps, size = list(self.attention.norms), self.attention.eps, attends.in_passing[1]
        dys = qkv_rope_backward(joint, ys, y_scales, norms, shared.cos, shared.sin, eps, size, dtype)
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
            of_modulations.append(gradient_of_vectors(kept["modulation"][i], dmodulation, *rest[i].modulation))
            of_parameters += [*of_inputs, *rest[i].adapters]
        return [*dxs, *of_modulations], of_parameters


class RestGradients(NamedTuple):
    """Result of `Stream.rest_backward`; `modulation`: fp32, of attention's gate, MLP shift and scale, MLP gate."""

    dx: Tensor  # of the stream before attention's projection is added [B, S_i, D]
    dout: Tensor  # of attention's out, for this stream's tokens
    modulation: tuple[Tensor | None, ...]
    adapters: list[Tensor]  # [dA, dB] of each, as `Stream.parameters`


@dataclass(frozen=True)
class Stream:
    """One of a double block's two streams; `modulation` is None if the model passes in shift, scale and gate."""

    modulation: Modulation | None
    inputs: NormLinears  # to q, k and v
    output: GatedLinear  # attention's projection
    up: NormLinears  # the MLP's first linear
    down: GatedLinear  # the MLP's second linear
    activation: str = "gelu_tanh"  # of the MLP, as `coat_core.ops.gelu` names it

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices but those of the modulation."""
        groups = (self.inputs.linears, self.output.linear, self.up.linears, self.down.linear)
        return [parameter for group in groups for parameter in group.parameters]

    def rest(
        self,
        kept: Kept,
        name: str,
        x: Tensor,
        out: Activated,
        modulation: Sequence[Tensor],
        saving: Saving,
        trains_gates: bool,
    ) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        _, _, gate, shift, scale, gate_mlp = modulation
        x = self.output.forward(kept, f"{name}out_", x, gate, out, saving, trains_gates)
        projected = self.up.forward(kept, f"{name}up_", x, scale, shift, saving)
        activated = activate(kept, projected, None, self.down.linear, self.activation, saving, name)
        del projected
        return self.down.forward(kept, f"{name}down_", x, gate_mlp, activated, saving, trains_gates)

    def rest_backward(
        self, kept: Kept, name: str, grad: Tensor, out: Tensor, modulation: Sequence[Tensor], saving: Saving
    ) -> RestGradients:
        """Gradients of `rest`."""
        _, _, gate, shift, scale, gate_mlp = modulation
        dtype = kept.facts[f"{name}mlp"]
        size = saving.in_passing[1]
        mlp, mlp_scale = saving.read(kept[f"{name}mlp"], dtype)

        def down_gradient(dh: Tensor) -> Tensor:
            return mlp_down_gradient(
                dh, None, None, mlp, mlp_scale, size, dtype, self.down.linear.dtype, self.activation
            )

        dx, dh, dgate_mlp, of_down = self.down.backward(kept, f"{name}down_", grad, gate_mlp, down_gradient, saving)
        low_rank = (None, None) if dh is None else (dh, self.down.linear.copies(dh.dtype).down)
        dmlp = mlp_activation_backward(dx, *low_rank, mlp, mlp_scale, size, dtype, self.activation)
        del dx
        dx, dnorm, of_up = self.up.backward(kept, f"{name}up_", dmlp, grad, scale, shift, saving, True)
        del dmlp
        assert dx is not None
        dout, dh, dgate, of_output = self.output.backward(
            kept, f"{name}out_", dx, gate, lambda dh: self.output.linear.down_gradient(dh, out), saving
        )
        dout = self.output.linear.complete_dx(dout, dh)
        return RestGradients(dx, dout, (dgate, dnorm, dgate_mlp), [*of_output, *of_up, *of_down])


@dataclass(frozen=True)
class LastStream:
    """A stream that ends with the block: image tokens attend to it, and it has no output."""

    modulation: Modulation | None  # makes shift and scale; None where the model hands them in
    inputs: NormLinears  # to q, k and v

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As of `Stream`."""
        return self.inputs.linears.parameters

    def rest(self, kept: Kept, name: str, x: Tensor, *_: object) -> Tensor:
        """Nothing."""
        return x.new_empty(0)

    def rest_backward(self, kept: Kept, name: str, grad: Tensor, out: Tensor, *_: object) -> RestGradients:
        """Zeros: of attention's out for these tokens, and of the stream."""
        zeros = torch.zeros_like(out)
        return RestGradients(zeros, zeros, (), [])
