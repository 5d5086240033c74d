"""A single block, whatever model it is in: one stream over the tokens of text and image together.

With n = LayerNorm(x)·(1 + scale) + shift and [q | k | v | mlp] = linears(n):

    y = x + gate·linear([attention(q, k, v) | act(mlp)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coat_core.ops.gelu import activated_width
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.ops.qkv import qkv_mlp_backward

from .attention import Attention, Projected, Shared
from .block import run_block
from .gated_linear import GatedLinear, activate
from .kept import Kept, Saving
from .modulation import Modulation, gradient_of_vectors
from .norm_linears import NormLinears
from .streams import join, split


@dataclass(frozen=True)
class SingleBlock:
    """A single block as it was read.

    Attributes:
        saving: how tensors are kept.
        modulation: makes shift, scale and gate; None where the model hands them in.
        inputs: to q, k, v and the MLP.
        attention: of its one stream.
        output: reads attention's out and the MLP.
        activation: of the MLP, as `coat_core.ops.gelu` names it.
        parameters: the adapters' matrices but those of the modulation.
    """

    saving: Saving
    modulation: Modulation | None
    inputs: NormLinears
    attention: Attention
    output: GatedLinear
    activation: str = "gelu_tanh"

    def __call__(
        self,
        image: Tensor,
        text: Tensor | None,
        shared: Shared,
        temb: Tensor | None = None,
        vectors: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor | None, Tensor]:
        """Return the text and the image stream; arguments as `Call`."""
        modulation = vectors[0] if self.modulation is None else self.modulation(temb)
        if text is None:
            return None, run_block(self, shared, image, modulation)[0]
        text, image = run_block(self, shared, text, image, modulation)
        return text, image

    @property
    def modulations(self) -> list[Modulation]:
        """Its own one, where it has one."""
        return [] if self.modulation is None else [self.modulation]

    def __post_init__(self) -> None:
        vars(self).update(parameters=[*self.inputs.linears.parameters, *self.output.linear.parameters])

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """As `WrittenOut.forward`; inputs: text and image [B, S_i, D], or both as one, and modulation [B, 3·D]."""
        *streams, modulation = inputs
        x, saving = streams[0] if len(streams) == 1 else join(streams[0], streams[1]), kept.saving(self.saving)
        shift, scale, gate = modulation.chunk(3, dim=1)
        y, h = self.inputs.forward(kept, "", x, scale, shift, saving)
        projected = Projected(self.inputs.linears, y, h)
        out = self.attention.forward(kept, [projected], shared, saving.of_attention)
        activated = activate(kept, projected, out, self.output.linear, self.activation, saving)
        del y, projected, out  # not needed any more, and large
        kept.add("modulation", modulation)
        y = self.output.forward(kept, "out_", x, gate, *activated, saving, needs[-1])
        return (y,) if len(streams) == 1 else split(y, streams[0].shape[1])

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        grad, (modulation,) = grads[0] if len(grads) == 1 else join(grads[0], grads[1]), kept["modulation"]
        shift, scale, gate = modulation.chunk(3, dim=1)
        dtype = kept.facts["qkv"]
        mlp, mlp_scale = self.saving.read(kept["mlp"], dtype)
        attended, scale_of_it = self.saving.of_attention.read(kept["out"], dtype)
        width, how = activated_width(mlp, self.activation), (self.saving.in_passing[1], dtype)

        def down_gradient(dh: Tensor) -> Tensor:
            given = (dh, attended, scale_of_it, mlp, mlp_scale, *how)
            return mlp_down_gradient(*given, self.output.linear.dtype, self.activation)

        found = self.output.backward(kept, "out_", grad, gate, down_gradient, self.saving)
        dout, dmlp, dh, down = found.dx[..., :-width], found.dx[..., -width:], found.dh, None
        if dh is not None:
            down = self.output.linear.copies(dh.dtype).down
            dout = torch.addmm(dout.flatten(0, -2), dh.flatten(0, -2), down[:, :-width]).view(dout.shape)
            down = down[:, -width:]
        out = self.saving.of_attention.unpack(kept["out"], dtype)
        joint, ys, y_scales = self.attention.backward(kept, dout, out, shared, self.saving.of_attention)
        del out, dout
        y_scale = y_scales[0] if y_scales else None
        norms, eps = list(self.attention.norms), self.attention.eps
        of_mlp = (dmlp, dh, down, mlp, mlp_scale, *how, self.activation)
        dy = qkv_mlp_backward(joint, ys[0], y_scale, norms, shared.cos, shared.sin, eps, *of_mlp)
        dgate, of_output = found.dgate, found.adapters
        del found, dmlp, of_mlp, joint
        dx, dmodulation, of_inputs = self.inputs.backward(kept, "", dy, grad, scale, shift, self.saving, any(needs))
        dxs: Sequence[Tensor | None] = [dx] * len(grads)
        if dx is not None and len(grads) == 2:
            dxs = split(dx, grads[0].shape[1])
        return [*dxs, gradient_of_vectors(modulation, dmodulation, dgate)], [*of_inputs, *of_output]
