"""Attention through torch's own kernels, forward and backward apart.

The forward pass also returns what torch's backward kernel needs besides q, k, v and out (log-sum-exp, random state), so
that the caller may save the four large tensors in FP8, or recompute them. The kernel is the one that
`torch.nn.functional.scaled_dot_product_attention` would choose, or the one `use_kernel` names. A kernel without a
backward of its own (the plain matrix products) saves nothing, and backward runs the forward pass again.

    cudnn       cuDNN                    flash       FlashAttention 2, built into torch
    efficient   from xFormers            fa3, fa4    FlashAttention 3 and 4, packages that replace it in torch

Shapes: q, k, v, out [B, H, S, d]; log-sum-exp fp32 [B, H, S] (cuDNN: [B, H, S, 1]).
Source: torch's aten operators `_scaled_dot_product_*_attention` and their `_backward`; `torch.nn.attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

LIBRARIES = {"fa3": "FA3", "fa4": "FA4"}  # as torch's registry names them
GPU_KERNELS = ("cudnn", "flash", "efficient", *LIBRARIES)
TAKES_MASK = ("cudnn", "efficient", "flash_cpu", "plain")
MASK_ALIGNMENT = 16  # elements

# of out, dq, dk, dv, relative, in norms; rounding to bf16 makes less than a fifth of it
LARGEST_ERROR = 0.02
CHECKED_QUERIES = 256

_in_use: tuple[str, str, torch.dtype, int] | None = None  # kernel; type of device, dtype and head size it is used for


class AttentionContext(NamedTuple):
    """What backward needs besides q, k, v and out."""

    kernel: str  # of `GPU_KERNELS`, "flash_cpu", or "plain" for the one that runs forward again
    tensors: tuple[Tensor, ...]  # log-sum-exp first, then small tensors; empty for "plain"
    sizes: tuple[int, ...] = ()  # not tensors: the longest query and key length of the flash kernels


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str:
    """Name the kernel in use for these tensors, else the one torch chooses."""
    takes = _in_use is not None and (mask is None or _in_use[0] in TAKES_MASK)
    if _in_use is not None and takes and _in_use[1:] == (q.device.type, q.dtype, q.shape[-1]):
        return _in_use[0]
    if q.device.type == "meta":  # where a GPU's memory is counted
        return "flash" if mask is None else "efficient"
    choice = torch._fused_sdp_choice(q, k, v, mask)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        on_gpu = "flash" if q.shape[-1] % 8 == 0 else "plain"  # torch pads other head sizes around the kernel
        return "flash_cpu" if q.device.type == "cpu" else on_gpu
    if q.device.type == "cuda":
        named = {SDPBackend.EFFICIENT_ATTENTION.value: "efficient", SDPBackend.CUDNN_ATTENTION.value: "cudnn"}
        return named.get(choice, "plain")
    return "plain"


def use_kernel(kernel: str | None, like: Tensor | None = None) -> None:
    """Use this kernel for tensors like `like` in the whole process; any Exception if it is unavailable.

    FlashAttention 3 or 4 then replaces FlashAttention 2 everywhere in torch's attention: its registry holds one.
    """
    global _in_use
    exchanges = hasattr(registry, "restore_flash_attention_impl")
    library = LIBRARIES.get(kernel or "")
    if library is not None and not exchanges:
        raise RuntimeError(f"torch {torch.__version__} cannot exchange its FlashAttention 2")
    if exchanges and library != registry.current_flash_attention_impl():
        if library is None:
            registry.restore_flash_attention_impl()
        else:
            registry.activate_flash_attention_impl(library)
    _in_use = None if kernel is None or like is None else (kernel, like.device.type, like.dtype, like.shape[-1])


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask for `attention_forward`: -inf where a query does not see a key, rows aligned for GPU kernels."""
    width = mask.shape[-1]
    rows = mask.new_zeros((*mask.shape[:-1], -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT), dtype=dtype)[..., :width]
    return rows.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else rows.copy_(mask)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, AttentionContext]:
    """Return out = softmax(q kᵀ / sqrt(d) + mask) v [B, H, S, d] and the context `attention_backward` needs.

    mask is from `additive_mask`, [B, H, S, S] or with 1 in place of the first three. out is 0 for a query without keys.
    """
    kernel = chosen_kernel(q, k, v, mask)
    whole = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    if kernel == "flash_cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        return out, AttentionContext(kernel, (lse,))
    if kernel == "efficient":
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, whole, True)
        return out, AttentionContext(kernel, (lse, seed, offset))
    if kernel == "plain":
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), AttentionContext(kernel, ())
    if kernel == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(q, k, v, whole, True)
    else:
        results = aten._scaled_dot_product_flash_attention(q, k, v)
    out, lse, _, _, max_q, max_k, seed, offset, _ = results
    return out, AttentionContext(kernel, (lse, seed, offset), (int(max_q), int(max_k)))


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    context: AttentionContext,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv [B, H, S, d] from the gradient of out; q, k, v and out may be FP8 round trips.

    Numerics: bit-equal to torch's own backward for the forward pass's tensors; 24 dB and more for E4M3 round trips.
    """
    whole = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    inputs = (grad, q, k, v)
    lse = context.tensors[:1]
    random = context.tensors[1:]
    if context.kernel == "plain":
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], mask)
        gradients: Any = torch.autograd.grad(again, leaves, grad)
    elif context.kernel == "flash_cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(*inputs, out, *lse, 0.0, False, attn_mask=mask)
    elif context.kernel == "efficient":
        backward = aten._scaled_dot_product_efficient_attention_backward
        *gradients, _ = backward(*inputs, whole, out, *lse, *random, 0.0, [True, True, True, False])
    elif context.kernel == "flash" or context.kernel in LIBRARIES:
        backward = aten._scaled_dot_product_flash_attention_backward
        gradients = backward(*inputs, out, *lse, None, None, *context.sizes, 0.0, False, *random)
    else:
        backward = aten._scaled_dot_product_cudnn_attention_backward
        gradients = backward(*inputs, out, *lse, *random, whole, None, None, *context.sizes, 0.0, False)
    dq, dk, dv = gradients
    return dq, dk, dv


class AttentionTrial:
    """A trial of an attention kernel at a run's shape, forward and backward, compared in fp64.

    The comparison is for one head and at most `CHECKED_QUERIES` queries; g is zero elsewhere, so memory does not grow
    with the square of the resolution. q, k, v, g [B, H, S, d] are views of [B, S, H, d], as in the blocks.
    """

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
        try:
            use_kernel(kernel, self.qkv[0])
            worst = self._error(*self.run())
            reason = None if worst <= LARGEST_ERROR else f"differs from plain matrix products by {worst:.1%}"
        except ImportError as error:
            reason = f"not installed ({error})"
        except Exception as error:  # a library of others, or the driver, can raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if reason is not None:
            use_kernel(None)
        return reason

    def _error(self, out: Tensor, *gradients: Tensor) -> float:
        finite = torch.stack([x.isfinite().all() for x in (out, *gradients)]).all()
        leaves = [x[-1, -1].double().requires_grad_() for x in self.qkv]
        q, k, v = leaves
        with torch.enable_grad():
            exact = (q[:: self._step] @ k.t() * q.shape[-1] ** -0.5).softmax(-1) @ v
        expected = exact, *torch.autograd.grad(exact, leaves, self._grad[-1, -1, :: self._step].double())
        results = out[-1, -1, :: self._step], *(x[-1, -1] for x in gradients)
        errors = [(a - b).norm() / b.norm() for a, b in zip(results, expected, strict=True)]
        return float(torch.where(finite, torch.stack(errors).amax(), torch.inf))


def kernel_obstacles(like: Tensor) -> dict[str, str | None]:
    """Return, for each GPU kernel, why it cannot be used for such tensors, or None; afterwards torch chooses again."""
    trial = AttentionTrial(like)
    obstacles = {kernel: trial.obstacle(kernel) for kernel in GPU_KERNELS}
    use_kernel(None)
    return obstacles
