"""A trial of an attention kernel at a run's shape, forward and backward, compared in fp64.

    P = softmax(q kᵀ / √d)    out = P v    dv = Pᵀ g    dS = P (g vᵀ - rowsum(g out)) / √d    dq = dS k    dk = dSᵀ q

The comparison is for one head and at most `CHECKED_QUERIES` queries; g is zero elsewhere, so memory does not grow with
the square of the resolution. Shapes: q, k, v, g [B, H, S, d], views of [B, S, H, d] as in the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import GPU_KERNELS, attention_backward, attention_forward, use_kernel

# of out, dq, dk, dv, relative, in norms; rounding to bf16 makes less than a fifth of it
LARGEST_ERROR = 0.02
CHECKED_QUERIES = 256


class AttentionTrial:
    """Tensors of a run's shape."""

    def __init__(self, like: Tensor) -> None:
        batch, heads, tokens, head_dim = like.shape
        draw = torch.Generator().manual_seed(0)  # no random state of the run is touched
        values = torch.randn(4, 1, tokens, 1, head_dim, generator=draw).to(like.device)
        values = values * torch.linspace(0.5, 1.0, heads, device=like.device)[:, None]  # no head is like another
        self._step = -(-tokens // CHECKED_QUERIES)
        rows = torch.arange(tokens, device=like.device)[:, None] % self._step == 0
        q, k, v, grad = (x.to(like.dtype).repeat(batch, 1, 1, 1).transpose(1, 2) for x in values)
        self.qkv, self._grad = (q, k, v), grad * rows

    @torch.no_grad()
    def run(self) -> tuple[Tensor, ...]:
        """Return out, dq, dk and dv by the kernel in use."""
        out, context = attention_forward(*self.qkv)
        return out, *attention_backward(self._grad, *self.qkv, out, context)

    @torch.no_grad()
    def obstacle(self, kernel: str) -> str | None:
        """Select a kernel and run it; return why it cannot be used, or None, and then it stays selected."""
        reason = self._tried(kernel)
        if reason is not None:
            use_kernel(None)
        return reason

    def _tried(self, kernel: str) -> str | None:
        try:
            use_kernel(kernel, self.qkv[0])
            found = self.run()
            finite = torch.stack([x.isfinite().all() for x in found]).all()
            pairs = zip(self._checked(found), self._wanted(), strict=True)
            errors = torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs])
            worst = float(torch.where(finite, errors.amax(), torch.inf))
        except ImportError as error:
            return f"not installed ({error})"
        except Exception as error:  # a library of others, or the driver, can raise anything
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None if worst <= LARGEST_ERROR else f"differs from plain matrix products by {worst:.1%}"

    def _checked(self, found: tuple[Tensor, ...]) -> list[Tensor]:
        out, dq, dk, dv = (x[-1, -1] for x in found)
        return [out[:: self._step], dq[:: self._step], dk, dv]

    def _wanted(self) -> list[Tensor]:
        q, k, v, grad = (x[-1, -1].double() for x in (*self.qkv, self._grad))
        q, grad, scale = q[:: self._step], grad[:: self._step], q.shape[-1] ** -0.5
        p = (q @ k.t() * scale).softmax(-1)
        out = p @ v
        ds = p * (grad @ v.t() - (grad * out).sum(-1, keepdim=True)) * scale
        return [out, ds @ k, ds.t() @ q, p.t() @ grad]


def kernel_obstacles(like: Tensor) -> dict[str, str | None]:
    """Return, for each GPU kernel, why it cannot be used for such tensors, or None; afterwards torch chooses again."""
    trial = AttentionTrial(like)
    found = {kernel: trial.obstacle(kernel) for kernel in GPU_KERNELS}
    use_kernel(None)
    return found
