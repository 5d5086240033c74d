"""A norm, adaLN modulation and the linears that read the result; x alone is kept, and the adapters' h.

    n = norm(x)·(1 + scale) + shift,   y = n Wᵀ + b

n is quantized as it is made. Backward makes it again from the FP8 x for the adapters' dA and the norm's own gradient.
Source: arXiv 2410.19313, section 5, carried over to FLUX's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coat_core.ops.norm import norm_modulate, norm_modulate_backward, norm_modulate_quantize

from .frozen import in_passing, quantized_by
from .kept import Kept, Saving
from .linears import LinearGroup


@dataclass(frozen=True)
class NormLinears:
    """A norm with its eps, and all linears that read its modulated result: RMSNorm with a weight, else LayerNorm."""

    eps: float
    linears: LinearGroup
    weight: Tensor | None = None

    def forward(
        self, kept: Kept, name: str, x: Tensor, scale: Tensor, shift: Tensor | None, saving: Saving
    ) -> tuple[Tensor, Tensor | None]:
        """Run them.

        Args:
            kept: takes what backward needs.
            name: under which.
            x: [B, S, D].
            scale: [B, D].
            shift: [B, D]; None for zeros.
            saving: of x.

        Returns:
            As `LinearGroup.forward`.
        """
        spec = self.linears.input_spec
        n, codes, code_scale, *saved = norm_modulate_quantize(
            x, scale, shift, self.eps, *in_passing(spec), *saving.in_passing, self.weight
        )
        kept.facts[f"{name}x"] = x.dtype
        kept.add(f"{name}x", *saving.keep(x, saved[0], saved[1]))
        y, h = self.linears.forward(n, quantized_by(spec, n, codes, code_scale))
        kept.add(f"{name}h", h)
        return y, h

    def backward(
        self,
        kept: Kept,
        name: str,
        dy: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        saving: Saving,
        needs_dx: bool,
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Return gradients.

        Args:
            kept: from forward.
            name: likewise.
            dy: of y, with the adapters' part in it [B, S, ΣN].
            residual: another gradient of x, which is added [B, S, D].
            scale: as in forward.
            shift: likewise.
            saving: likewise.
            needs_dx: False where x and the modulation have no gradient.

        Returns:
            dx [B, S, D] in the dtype of x; of shift and scale, fp32 [B, 2, D]; [dA, dB] of each adapter.
        """
        dtype = kept.facts[f"{name}x"]
        x, x_scale = saving.read(kept[f"{name}x"], dtype)
        group_size, h = saving.in_passing[1], kept.first(f"{name}h")

        def down_gradient(dh: Tensor) -> Tensor:
            n = norm_modulate(x, x_scale, group_size, scale, shift, self.eps, dtype, self.weight)
            return self.linears.down_gradient(dh, n)

        dh, gradients = self.linears.adapter_gradients(dy, down_gradient, h)
        if not needs_dx:
            return None, None, gradients
        dn = self.linears.complete_dx(self.linears.dgrad(dy), dh)
        given = (dn, x, x_scale, group_size, scale, self.eps, residual, dtype, self.weight)
        dx, dmodulation = norm_modulate_backward(*given)
        return dx, dmodulation, gradients

    def kept_x(self, kept: Kept, name: str, saving: Saving) -> Tensor:
        """The x of `forward`, in backward."""
        return saving.unpack(kept[f"{name}x"], kept.facts[f"{name}x"])
