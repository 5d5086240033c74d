"""FLUX's double and single blocks, put together from the fused functions; and the reading of a block's modules.

A block is read anew at each call: hosts switch adapters on and off, and merge them, between steps. Reading costs a few
attribute lookups. What a block does beyond what is written here (IP adapters, dropout, other attention backends, a
norm that is trained) makes it `NotFusable`, and the caller runs diffusers' own code with packed saved tensors instead.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic this follows to the rounding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.activation import PackingConfig

from .attention import HeadNorms, KeptOut, attention
from .gated_linear import gated_linear
from .linears import NotFusable, read_linear
from .norm_linears import norm_linears

BLOCK_ARGUMENTS = ["hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs"]
FP16_LIMIT = 65504

FUSABLE = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

FusedBlock = Callable[..., tuple[Tensor, Tensor]]


def fused_block(block: nn.Module, args: tuple[Any, ...], config: PackingConfig) -> FusedBlock:
    """Return a function with the block's arguments and results that keeps for backward what the fused flow lists.

    Args:
        block: a diffusers FluxTransformerBlock or FluxSingleTransformerBlock, with or without LoRA.
        args: what it is about to be called with.
        config: how kept tensors are stored.

    Raises:
        NotFusable: another class, or a block that does more than the fused functions; the message says what.
    """
    if type(block).__name__ not in FUSABLE:
        raise NotFusable(f"a {type(block).__name__} is no FLUX.1 block")
    _check_call(block, args)
    return (_read_double if type(block).__name__ == "FluxTransformerBlock" else _read_single)(block, config)


def _check_call(block: nn.Module, args: tuple[Any, ...]) -> None:
    if "forward" in vars(block):
        raise NotFusable("its forward was replaced")
    if any(map(_has_hooks, block.modules())):  # names are made only where they are told: this runs for every block
        hooked = next(name for name, module in block.named_modules() if _has_hooks(module))
        raise NotFusable(f"hooks on {hooked or 'the block'}")
    names = _argument_names(type(block))
    if names != BLOCK_ARGUMENTS:
        raise NotFusable(f"this diffusers' {type(block).__name__} takes {', '.join(names)}")
    if len(args) > 4 and args[4]:
        raise NotFusable(f"joint_attention_kwargs {', '.join(map(str, args[4]))}")
    if len(args) < 4 or args[3] is None:
        raise NotFusable("no rotary embedding is given")


@functools.cache
def _argument_names(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _check_norm(norm: nn.Module) -> float:
    if type(norm) is not nn.LayerNorm or norm.elementwise_affine:
        raise NotFusable(f"its norm is a {type(norm).__name__} with more than LayerNorm's arithmetic")
    return norm.eps


def _check_dropout(module: nn.Module) -> None:
    if not isinstance(module, nn.Dropout):
        raise NotFusable(f"a {type(module).__name__} where diffusers has Dropout")
    if module.training and module.p > 0:
        raise NotFusable("dropout")


def _qk_norm(norm_q: Any, norm_k: Any) -> HeadNorms:
    found: list[Any] = []
    for norm in (norm_q, norm_k):
        if type(norm) is not nn.RMSNorm or norm.weight is None or norm.weight.requires_grad:
            raise NotFusable(f"its QK norm is a {type(norm).__name__} that is trained or has no weight")
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        found += [norm.weight, eps]
    return tuple(found)  # type: ignore[return-value]


def _check_attention(attn: Any) -> None:
    processor = attn.processor
    if type(processor).__name__ != "FluxAttnProcessor" or attn.fused_projections:
        raise NotFusable(f"attention by {type(processor).__name__}, or with fused projections")
    if processor._attention_backend is not None or processor._parallel_config is not None:
        raise NotFusable("an attention backend of its own")
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active = _AttentionBackendRegistry.get_active_backend()
    name = active[0] if isinstance(active, tuple) else active
    if getattr(name, "value", name) != "native":
        raise NotFusable(f"diffusers' attention backend {getattr(name, 'value', name)}")


def _modulation(norm: Any, temb: Tensor, count: int) -> tuple[Tensor, ...]:
    """The adaLN vectors [B, D]; one row per image, so they take the ordinary way through autograd."""
    if getattr(norm, "emb", None) is not None:
        raise NotFusable("class embeddings in adaLN")
    return tuple(norm.linear(norm.silu(temb)).chunk(count, dim=1))


def _heads(attn: Any, qkv: list[Tensor]) -> int:
    return int(qkv[0].shape[-1] // attn.head_dim)


def _clipped(x: Tensor) -> Tensor:
    return x.clip(-FP16_LIMIT, FP16_LIMIT) if x.dtype == torch.float16 else x


def _read_single(block: Any, config: PackingConfig) -> FusedBlock:
    attn, eps = block.attn, _check_norm(block.norm.norm)
    _check_attention(attn)
    norm = _qk_norm(attn.norm_q, attn.norm_k)
    _check_gelu(block.act_mlp)
    inputs = [read_linear(m) for m in (attn.to_q, attn.to_k, attn.to_v, block.proj_mlp)]
    output = read_linear(block.proj_out)

    def run(hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        x = torch.cat([text, hidden], dim=1)
        shift, scale, gate = _modulation(block.norm, temb, 3)
        *qkv, mlp = norm_linears(x, scale, shift, eps, inputs, config)
        (out,) = attention(_heads(attn, qkv), [norm], rotary, qkv, config)
        y = _clipped(gated_linear(x, gate, output, config, out, mlp))
        return y[:, : text.shape[1]], y[:, text.shape[1] :]

    return run


def _read_double(block: Any, config: PackingConfig) -> FusedBlock:
    attn = block.attn
    _check_attention(attn)
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    _check_dropout(attn.to_out[1])
    text = _Stream(
        block.norm1_context, block.norm2_context, block.ff_context,
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), attn.to_add_out, config,
    )  # fmt: skip
    image = _Stream(block.norm1, block.norm2, block.ff, (attn.to_q, attn.to_k, attn.to_v), attn.to_out[0], config)
    norms = [_qk_norm(attn.norm_added_q, attn.norm_added_k), _qk_norm(attn.norm_q, attn.norm_k)]

    def run(hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        image_modulation, text_modulation = image.modulation(temb), text.modulation(temb)
        qkv = [*text.qkv(encoder, text_modulation), *image.qkv(hidden, image_modulation)]
        text_out, image_out = attention(_heads(attn, qkv), norms, rotary, qkv, config)
        hidden = image.rest(hidden, image_out, image_modulation)
        return _clipped(text.rest(encoder, text_out, text_modulation)), hidden

    return run


class _Stream:
    """One of a double block's two streams."""

    def __init__(self, norm1: Any, norm2: Any, ff: Any, qkv: tuple[Any, ...], out: Any, config: PackingConfig) -> None:
        self._norm1, self._config = norm1, config
        self._eps = (_check_norm(norm1.norm), _check_norm(norm2))
        if len(ff.net) != 3:
            raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
        _check_gelu(ff.net[0])
        _check_dropout(ff.net[1])
        self._qkv = [read_linear(module) for module in qkv]
        self._out, self._up, self._down = (read_linear(module) for module in (out, ff.net[0].proj, ff.net[2]))

    def modulation(self, temb: Tensor) -> tuple[Tensor, ...]:
        """shift, scale, gate of attention, then of the MLP."""
        return _modulation(self._norm1, temb, 6)

    def qkv(self, x: Tensor, modulation: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k and v before their norms."""
        return norm_linears(x, modulation[1], modulation[0], self._eps[0], self._qkv, self._config)

    def rest(self, x: Tensor, out: KeptOut, modulation: tuple[Tensor, ...]) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        x = gated_linear(x, gate, self._out, self._config, out=out)
        (mlp,) = norm_linears(x, scale_mlp, shift_mlp, self._eps[1], [self._up], self._config)
        return gated_linear(x, gate_mlp, self._down, self._config, mlp=mlp)


def _check_gelu(module: nn.Module) -> None:
    if type(module).__name__ != "GELU" or getattr(module, "approximate", None) != "tanh":
        raise NotFusable(f"its activation is a {type(module).__name__}, not GELU-tanh")
