"""FLUX's double and single blocks, put together from the fused functions; and the reading of a block's modules.

A block is read at each call: trainers switch adapters on and off, and merge them, between steps. Reading costs a few
attribute lookups. What a block does beyond what is written here (IP adapters, dropout, other attention backends, a
norm that is trained) makes it `NotFusable`, and the caller runs diffusers' own code with packed saved tensors instead.

Source: diffusers models/transformers/transformer_flux.py, whose arithmetic this follows to the rounding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coat_core.activation import PackingConfig

from .attention import HeadNorms, KeptOut, attention
from .gated_linear import gated_linear
from .linears import AdaptedLinear, NotFusable, adapted_linear, read_group, read_linear
from .norm_linears import norm_linears

BLOCK_ARGUMENTS = ["hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs"]
FP16_LIMIT = 65504

FUSABLE = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

FusedBlock = Callable[..., tuple[Tensor, Tensor]]


def fused_block(block: nn.Module, args: tuple[Any, ...] | None, config: PackingConfig | None) -> FusedBlock:
    """Return a function with the block's arguments and results that keeps for backward what the fused flow lists.

    Args:
        block: a diffusers FluxTransformerBlock or FluxSingleTransformerBlock, with or without LoRA.
        args: what it is about to be called with; None before that is known.
        config: how kept tensors are stored; None keeps them as they are.

    Raises:
        NotFusable: another class, or a block that does more than the fused functions; the message says what.
    """
    if type(block).__name__ not in FUSABLE:
        raise NotFusable(f"a {type(block).__name__} is not a FLUX.1 block")
    _check_module(block)
    if args is not None:
        _check_arguments(args)
    return (_read_double if type(block).__name__ == "FluxTransformerBlock" else _read_single)(block, config)


def _check_module(block: nn.Module) -> None:
    if "forward" in vars(block):
        raise NotFusable("its forward was replaced")
    if any(map(_has_hooks, block.modules())):  # names are made only for the message: this runs for every block
        hooked = next(name for name, module in block.named_modules() if _has_hooks(module))
        raise NotFusable(f"hooks on {hooked or 'the block'}")
    names = _argument_names(type(block))
    if names != BLOCK_ARGUMENTS:
        raise NotFusable(f"this diffusers' {type(block).__name__} takes {', '.join(names)}")


def _check_arguments(args: tuple[Any, ...]) -> None:
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


def _read_modulation(norm: Any) -> AdaptedLinear:
    if getattr(norm, "emb", None) is not None or type(norm.silu) is not nn.SiLU:
        raise NotFusable("class embeddings or another activation in adaLN")
    return read_linear(norm.linear)


def _modulation(linear: AdaptedLinear, temb: Tensor, count: int) -> tuple[Tensor, ...]:
    """The adaLN vectors [B, D]."""
    return adapted_linear(torch.nn.functional.silu(temb), linear).chunk(count, dim=1)


def _clipped(x: Tensor) -> Tensor:
    return x.clip(-FP16_LIMIT, FP16_LIMIT) if x.dtype == torch.float16 else x


@dataclass(frozen=True)
class SingleBlock:
    """A FluxSingleTransformerBlock as it was read.

    Attributes:
        config: how kept tensors are stored; None keeps them as they are.
        modulation: makes shift, scale and gate.
        eps: LayerNorm's.
        head_dim: d of one head.
        qk_norm: RMSNorms of q and k.
        inputs: to_q, to_k, to_v, proj_mlp.
        output: proj_out.
    """

    config: PackingConfig | None
    modulation: AdaptedLinear
    eps: float
    head_dim: int
    qk_norm: HeadNorms
    inputs: tuple[AdaptedLinear, ...]
    output: AdaptedLinear

    def __call__(self, hidden: Tensor, text: Tensor, temb: Tensor, rotary: Any, _: Any = None) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        x = torch.cat([text, hidden], dim=1)
        shift, scale, gate = _modulation(self.modulation, temb, 3)
        *qkv, mlp = norm_linears(x, scale, shift, self.eps, self.inputs, self.config)
        (out,) = attention(qkv[0].shape[-1] // self.head_dim, [self.qk_norm], rotary, qkv, self.config)
        y = _clipped(gated_linear(x, gate, self.output, self.config, out, mlp))
        return y[:, : text.shape[1]], y[:, text.shape[1] :]


@dataclass(frozen=True)
class DoubleBlock:
    """A FluxTransformerBlock as it was read: two streams and their common attention."""

    config: PackingConfig | None
    head_dim: int
    text: Stream
    image: Stream

    def __call__(
        self, hidden: Tensor, encoder: Tensor, temb: Tensor, rotary: Any, _: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the text and the image stream; arguments as diffusers' block."""
        image_modulation, text_modulation = (_modulation(s.modulation, temb, 6) for s in (self.image, self.text))
        qkv = [
            *self.text.qkv(encoder, text_modulation, self.config),
            *self.image.qkv(hidden, image_modulation, self.config),
        ]
        norms = [self.text.qk_norm, self.image.qk_norm]
        text_out, image_out = attention(qkv[0].shape[-1] // self.head_dim, norms, rotary, qkv, self.config)
        hidden = self.image.rest(hidden, image_out, image_modulation, self.config)
        return _clipped(self.text.rest(encoder, text_out, text_modulation, self.config)), hidden


@dataclass(frozen=True)
class Stream:
    """One of a double block's two streams.

    Attributes:
        modulation: makes shift, scale and gate of attention, then of the MLP.
        eps: of the two LayerNorms.
        qk_norm: RMSNorms of q and k.
        inputs: to q, k and v.
        output: attention's projection.
        up: the MLP's first linear.
        down: the MLP's second linear.
    """

    modulation: AdaptedLinear
    eps: tuple[float, float]
    qk_norm: HeadNorms
    inputs: tuple[AdaptedLinear, ...]
    output: AdaptedLinear
    up: AdaptedLinear
    down: AdaptedLinear

    def qkv(self, x: Tensor, modulation: tuple[Tensor, ...], config: PackingConfig | None) -> tuple[Tensor, ...]:
        """q, k and v before their norms."""
        return norm_linears(x, modulation[1], modulation[0], self.eps[0], self.inputs, config)

    def rest(self, x: Tensor, out: KeptOut, modulation: tuple[Tensor, ...], config: PackingConfig | None) -> Tensor:
        """The stream after attention: projection, gate and residual, then the MLP with its own."""
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        x = gated_linear(x, gate, self.output, config, out=out)
        (mlp,) = norm_linears(x, scale_mlp, shift_mlp, self.eps[1], (self.up,), config)
        return gated_linear(x, gate_mlp, self.down, config, mlp=mlp)


def _read_single(block: Any, config: PackingConfig | None) -> SingleBlock:
    attn, eps = block.attn, _check_norm(block.norm.norm)
    _check_attention(attn)
    _check_gelu(block.act_mlp)
    return SingleBlock(
        config,
        _read_modulation(block.norm),
        eps,
        attn.head_dim,
        _qk_norm(attn.norm_q, attn.norm_k),
        read_group((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp)),
        read_linear(block.proj_out),
    )


def _read_double(block: Any, config: PackingConfig | None) -> DoubleBlock:
    attn = block.attn
    _check_attention(attn)
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    _check_dropout(attn.to_out[1])
    text = _read_stream(
        block.norm1_context,
        block.norm2_context,
        block.ff_context,
        _qk_norm(attn.norm_added_q, attn.norm_added_k),
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out),
    )
    image = _read_stream(
        block.norm1,
        block.norm2,
        block.ff,
        _qk_norm(attn.norm_q, attn.norm_k),
        (attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]),
    )
    return DoubleBlock(config, attn.head_dim, text, image)


def _read_stream(norm1: Any, norm2: Any, ff: Any, qk_norm: HeadNorms, linears: tuple[Any, ...]) -> Stream:
    eps = (_check_norm(norm1.norm), _check_norm(norm2))
    if len(ff.net) != 3:
        raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
    _check_gelu(ff.net[0])
    _check_dropout(ff.net[1])
    output, up, down = (read_linear(module) for module in (linears[3], ff.net[0].proj, ff.net[2]))
    return Stream(_read_modulation(norm1), eps, qk_norm, read_group(linears[:3]), output, up, down)


def _check_gelu(module: nn.Module) -> None:
    if type(module).__name__ != "GELU" or getattr(module, "approximate", None) != "tanh":
        raise NotFusable(f"its activation is a {type(module).__name__}, not GELU-tanh")
