"""A block of one stream with norms before and after its linears, as in Z-Image and Lumina.

    x1 = x + gate·RMSNorm(linear(attention(q, k, v))),   q, k, v = linears(RMSNorm(x)·(1 + scale))
    y = x1 + gate·RMSNorm(linear(silu(a)·b)),            a, b = linears(RMSNorm(x1)·(1 + scale))

The norms after linears need the linears' results in backward; with those and x, x1 is recomputed rather than
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from coat_core.ops.gelu import mlp_activation_backward
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.ops.qkv import qkv_rope_backward
from coat_core.ops.quantize import quantize_and_save
from coat_core.quantize import Quantized

from .block import NOT_SAVED, Call, Kept, Recomputed, Saving, Shared, run_block
from .modulation import Modulation, gradient_of_vectors
from .parts import Activated, Attention, GatedLinear, NormLinears, activate

SWIGLU = "silu_and_mul"


@dataclass(frozen=True)
class StreamBlock:
    """A stream block as read; `modulation` gives scale and gate (before tanh) of attention and MLP, or is None."""

    saving: Saving  # how tensors are saved
    modulation: Modulation | None
    inputs: NormLinears  # to q, k and v
    attention: Attention  # of its one stream
    output: GatedLinear  # attention's projection
    up: NormLinears  # the MLP's first two linears
    down: GatedLinear  # the MLP's last linear

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices but those of the modulation."""
        groups = (self.inputs.linears, self.output.linear, self.up.linears, self.down.linear)
        return [parameter for group in groups for parameter in group.parameters]

    def __call__(self, call: Call) -> tuple[Tensor | None, Tensor]:
        """Return None and the stream, of a call without text."""
        vectors = [modulation(call.temb) for modulation in self.modulations]
        return None, run_block(self, call.shared, call.image, *vectors)[0]

    @property
    def modulations(self) -> list[Modulation]:
        """Its own one, if any."""
        return [] if self.modulation is None else [self.modulation]

    def _vectors(self, x: Tensor, modulation: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Scale and gate [B, D] of attention, then of the MLP; without modulation those that change nothing."""
        if not modulation:
            assert self.inputs.weight is not None
            ones = x.new_ones((len(x), x.shape[-1]), dtype=self.inputs.weight.dtype)
            return torch.zeros_like(ones), ones, torch.zeros_like(ones), ones
        scale, gate, scale_mlp, gate_mlp = modulation[0].chunk(4, dim=1)
        return scale, gate.tanh(), scale_mlp, gate_mlp.tanh()

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """As `WrittenOut.forward`; inputs: x [B, S, D], and modulation [B, 4·D] where there is one."""
        (x, *modulation), saving = inputs, kept.saving(self.saving)
        attends, spec = saving.of_attention, self.output.linear.input_spec
        scale, gate, scale_mlp, gate_mlp = self._vectors(x, modulation)
        projected = self.inputs.forward(kept, "in_", x, scale, None, saving)
        out = self.attention.forward(kept, [projected], shared, attends)
        cast = ("e4m3", *NOT_SAVED) if spec is None else (spec[0], spec[1].name, spec[1].group_size)
        codes, code_scale, *saved = quantize_and_save(out, *cast, *attends.in_passing)
        kept.add("out", *attends.keep(out, saved[0], saved[1]))
        kept.add("modulation", *modulation)
        quantized = None if spec is None else Quantized(codes, code_scale, spec[1])
        x = self.output.forward(kept, "out_", x, gate, Activated(out, quantized), saving, True)
        projected = self.up.forward(kept, "up_", x, scale_mlp, None, Recomputed())
        activated = activate(kept, projected, None, self.down.linear, SWIGLU, saving)
        del projected, out  # not needed any more, and large
        return (self.down.forward(kept, "down_", x, gate_mlp, activated, saving, True),)

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        saving, attends, modulation = self.saving, self.saving.of_attention, kept["modulation"]
        scale, gate, scale_mlp, gate_mlp = self._vectors(grads[0], modulation)
        dtype = kept.facts["mlp"]
        mlp, mlp_scale = saving.read(kept["mlp"], dtype)
        size, reader = saving.in_passing[1], self.down.linear

        def down_gradient(dh: Tensor) -> Tensor:
            return mlp_down_gradient(dh, None, None, mlp, mlp_scale, size, dtype, reader.dtype, SWIGLU)

        dy, dh, dgate_mlp, of_down = self.down.backward(kept, "down_", grads[0], gate_mlp, down_gradient, saving)
        low_rank = (None, None) if dh is None else (dh, reader.copies(dh.dtype).down)
        dmlp = mlp_activation_backward(dy, *low_rank, mlp, mlp_scale, size, dtype, SWIGLU)
        del dy
        x = self.output.again(kept, "out_", self.inputs.saved_x(kept, "in_", saving), gate, saving)
        dx, of_norm, of_up = self.up.backward(kept, "up_", dmlp, grads[0], scale_mlp, None, Recomputed(values=x), True)
        del dmlp, x
        assert dx is not None
        out = attends.unpack(kept["out"], kept.facts["qkv"])
        output = self.output.linear
        dout, dh, dgate, of_output = self.output.backward(
            kept, "out_", dx, gate, lambda dh, out=out: output.down_gradient(dh, out), saving
        )
        joint, ys, y_scales = self.attention.backward(kept, output.complete_dx(dout, dh), out, shared, attends)
        del dout, out
        norms, eps, size = list(self.attention.norms), self.attention.eps, attends.in_passing[1]
        rotary = (shared.cos, shared.sin)
        (dy,) = qkv_rope_backward(joint, ys, y_scales, norms, *rotary, eps, size, kept.facts["qkv"])
        del joint
        dx, of_first, of_inputs = self.inputs.backward(kept, "in_", dy, dx, scale, None, saving, any(needs))
        dxs = [dx]
        if modulation:
            gates = (_before_tanh(dgate, gate), _before_tanh(dgate_mlp, gate_mlp))
            scales = (None if gradient is None else gradient[:, 1] for gradient in (of_first, of_norm))
            parts = (part for pair in zip(scales, gates, strict=True) for part in pair)
            dxs.append(gradient_of_vectors(modulation[0], *parts))
        return dxs, [*of_inputs, *of_output, *of_up, *of_down]


def _before_tanh(grad: Tensor | None, gate: Tensor) -> Tensor | None:
    """The gradient of what a gate is the tanh of, in fp32."""
    return None if grad is None else grad * (1 - gate.to(torch.float32).square())
