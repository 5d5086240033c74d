"""A single block of any model: one stream over the tokens of text and image.

With n = LayerNorm(x)·(1 + scale) + shift and [q | k | v | mlp] = linears(n):

    y = x + gate·linear([attention(q, k, v) | act(mlp)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from coat_core.ops.gelu import activated_width
from coat_core.ops.mlp_gradient import mlp_down_gradient
from coat_core.ops.qkv import qkv_mlp_backward

from .block import Call, Kept, Saving, Shared, run_block
from .modulation import Modulation, gradient_of_vectors
from .parts import Attention, GatedLinear, NormLinears, activate


@dataclass(frozen=True)
class SingleBlock:
    """A single block as read."""

    saving: Saving  # how tensors are saved
    modulation: Modulation | None  # makes shift, scale and gate; None where the model hands them in
    inputs: NormLinears  # to q, k, v and the MLP
    attention: Attention  # of its one stream
    output: GatedLinear  # reads attention's out and the MLP
    activation: str = "gelu_tanh"  # of the MLP, as `coat_core.ops.gelu` names it

    def __call__(self, call: Call) -> tuple[Tensor | None, Tensor]:
        """Return the text and the image stream."""
        vectors = call.vectors[0] if self.modulation is None else self.modulation(call.temb)
        if call.text is None:
            return None, run_block(self, call.shared, call.image, vectors)[0]
        text, image = run_block(self, call.shared, call.text, call.image, vectors)
        return text, image

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The adapters' matrices but those of the modulation."""
        return [*self.inputs.linears.parameters, *self.output.linear.parameters]

    @property
    def modulations(self) -> list[Modulation]:
        """Its own one, if any."""
        return [] if self.modulation is None else [self.modulation]

    def forward(
        self, kept: Kept, shared: Shared, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """As `WrittenOut.forward`; inputs: text and image [B, S_i, D], or both as one, and modulation [B, 3·D]."""
        *streams, modulation = inputs
        x, saving = streams[0] if len(streams) == 1 else join(streams[0], streams[1]), kept.saving(self.saving)
        shift, scale, gate = modulation.chunk(3, dim=1)
        projected = self.inputs.forward(kept, "", x, scale, shift, saving)
        out = self.attention.forward(kept, [projected], shared, saving.of_attention)
        activated = activate(kept, projected, out, self.output.linear, self.activation, saving)
        del projected, out  # not needed any more, and large
        kept.add("modulation", modulation)
        y = self.output.forward(kept, "out_", x, gate, activated, saving, needs[-1])
        return (y,) if len(streams) == 1 else split(y, streams[0].shape[1])

    def backward(
        self, kept: Kept, shared: Shared, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """As `WrittenOut.backward`."""
        grad, (modulation,) = grads[0] if len(grads) == 1 else join(grads[0], grads[1]), kept["modulation"]
        shift, scale, gate = modulation.chunk(3, dim=1)
        dtype = kept.facts["qkv"]
        mlp, mlp_scale = self.saving.read(kept["mlp"], dtype)
        attended, attended_scale = self.saving.of_attention.read(kept["out"], dtype)
        width, size = activated_width(mlp, self.activation), self.saving.in_passing[1]

        def down_gradient(dh: Tensor) -> Tensor:
            reads = (attended, attended_scale, mlp, mlp_scale, size, dtype)
            return mlp_down_gradient(dh, *reads, self.output.linear.dtype, self.activation)

        dx, dh, dgate, of_output = self.output.backward(kept, "out_", grad, gate, down_gradient, self.saving)
        dout, dmlp, down = dx[..., :-width], dx[..., -width:], None
        if dh is not None:
            down = self.output.linear.copies(dh.dtype).down
            dout = torch.addmm(dout.flatten(0, -2), dh.flatten(0, -2), down[:, :-width]).view(dout.shape)
            down = down[:, -width:]
        out = self.saving.of_attention.unpack(kept["out"], dtype)
        joint, ys, y_scales = self.attention.backward(kept, dout, out, shared, self.saving.of_attention)
        del out, dout
        y_scale = y_scales[0] if y_scales else None
        norms, eps = list(self.attention.norms), self.attention.eps
        of_mlp = (dmlp, dh, down, mlp, mlp_scale, size, dtype, self.activation)
        dy = qkv_mlp_backward(joint, ys[0], y_scale, norms, shared.cos, shared.sin, eps, *of_mlp)
        del dx, dmlp, of_mlp, joint
        dx, dmodulation, of_inputs = self.inputs.backward(kept, "", dy, grad, scale, shift, self.saving, any(needs))
        dxs: Sequence[Tensor | None] = [dx] * len(grads)
        if dx is not None and len(grads) == 2:
            dxs = split(dx, grads[0].shape[1])
        return [*dxs, gradient_of_vectors(modulation, dmodulation, dgate)], [*of_inputs, *of_output]


def join(text: Tensor, image: Tensor) -> Tensor:
    """Return both streams [B, T, D] and [B, S, D] as one, text first, without a copy if they are views of one tensor.

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


def split(joined: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return text (the first `tokens`) and image, views of `joined`."""
    return joined[:, :tokens], joined[:, tokens:]
