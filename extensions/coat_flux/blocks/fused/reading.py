"""What the readers of all models share (`forms.Reader`): checks of a block's parts, and how streams are read.

Anything beyond a reader's knowledge (IP adapters, dropout, other attention backends, a trained norm) raises
`NotFusable`, and the runner runs the model's own code with packed saved tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .forms import GELU, SWIGLU, DoubleBlock, Reader, SingleBlock, Stream
from .linears import LinearGroup, NotFusable, read_group, read_linear
from .parts import Attention, GatedLinear, Modulation, NormLinears, Rotary


def check_norm(norm: nn.Module) -> float:
    """The eps of a plain LayerNorm."""
    if type(norm) is not nn.LayerNorm or norm.elementwise_affine:
        raise NotFusable(f"its norm is a {type(norm).__name__} with more than LayerNorm's arithmetic")
    return norm.eps


def check_dropout(module: nn.Module) -> None:
    """Refuse a Dropout with an effect."""
    if not isinstance(module, nn.Dropout):
        raise NotFusable(f"a {type(module).__name__} where diffusers has Dropout")
    if module.training and module.p > 0:
        raise NotFusable("dropout")


def qk_norm(*norms: Any, name: str = "QK norm") -> tuple[float, tuple[Tensor, ...]]:
    """The common eps and the weights of RMSNorms of q and k, or of other norms with that name."""
    weights, all_eps = [], set()
    for norm in norms:
        kind = type(norm)
        known = kind is nn.RMSNorm or (kind.__name__, kind.__module__) == ("RMSNorm", "diffusers.models.normalization")
        if norm is None:
            raise NotFusable("q and k are not normed")
        if not known or norm.weight is None or norm.weight.requires_grad or getattr(norm, "bias", None) is not None:
            raise NotFusable(f"its {name} is a {kind.__name__} that is trained, has a bias or no weight")
        all_eps.add(torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps)
        weights.append(norm.weight)
    if len(all_eps) > 1:
        raise NotFusable("QK norms with different eps")
    return all_eps.pop(), tuple(weights)


def check_attention(attn: Any, expected: str) -> None:
    """Refuse all but diffusers' processor of that class name, with torch's own attention."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    processor = attn.processor
    if type(processor).__name__ != expected or attn.fused_projections:
        raise NotFusable(f"attention by {type(processor).__name__}, or with fused projections")
    if any(getattr(processor, name, None) is not None for name in ("_attention_backend", "_parallel_config")):
        raise NotFusable("an attention backend of its own")
    active = _AttentionBackendRegistry.get_active_backend()
    backend = active[0] if isinstance(active, tuple) else active
    name = getattr(backend, "value", backend)
    if name != "native":
        raise NotFusable(f"diffusers' attention backend {name}")


def read_modulation(norm: Any, kind: type[Modulation] = Modulation) -> Modulation | None:
    """The linear of an adaLN; None where the model hands in its vectors."""
    activation = type(getattr(norm, "silu", None))
    if getattr(norm, "emb", None) is not None or activation not in (nn.SiLU, type(None)):
        raise NotFusable("class embeddings or another activation in adaLN")
    return kind(read_linear(norm.linear)) if hasattr(norm, "linear") else None


class Outside(NamedTuple):
    """Parts of a double block's stream outside its attention."""

    modulation: Modulation | None  # see `Stream`
    norm1: nn.Module  # before attention
    norm2: nn.Module | None = None  # before the MLP; None where the stream ends with the block
    mlp: tuple[Any, Any, str] | None = None  # its two linears and activation


def read_double(attn: Any, text: Outside, image: Outside, join: bool) -> DoubleBlock:
    """Read a double block around diffusers' attention."""
    if len(attn.to_out) != 2:
        raise NotFusable("an attention output of more than a linear and a dropout")
    check_dropout(attn.to_out[1])
    text_inputs = read_group((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), join)
    text_stream = read_stream(text, text_inputs, attn.to_add_out)
    image_stream = read_stream(image, read_group((attn.to_q, attn.to_k, attn.to_v), join), attn.to_out[0])
    norms = attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k
    attention = Attention(attn.inner_dim // attn.heads, *qk_norm(*norms))
    return DoubleBlock(attention, text_stream, image_stream)


def read_stream(outside: Outside, inputs: LinearGroup, output: Any) -> Stream:
    """Read a double block's stream; `output` is attention's."""
    normed = NormLinears(check_norm(outside.norm1), inputs)
    if outside.norm2 is None or outside.mlp is None:
        return Stream(outside.modulation, normed)
    first, second, activation = outside.mlp
    up = NormLinears(check_norm(outside.norm2), read_linear(first))
    down = GatedLinear(read_linear(second))
    return Stream(outside.modulation, normed, GatedLinear(read_linear(output)), up, down, activation)


def feed_forward(ff: Any) -> tuple[Any, Any, str]:
    """The two linears and the activation of diffusers' FeedForward with GELU."""
    if len(ff.net) != 3:
        raise NotFusable("a feed-forward of more than GELU, dropout and a linear")
    activation = read_activation(ff.net[0])
    check_dropout(ff.net[1])
    return ff.net[0].proj, ff.net[2], activation


def read_activation(module: Any) -> str:
    """Which one it is of GELU-tanh and SwiGLU, in diffusers' or ai-toolkit's class."""
    name = type(module).__name__
    if name == "GELU" and getattr(module, "approximate", None) == "tanh":
        return GELU
    if name in SWIGLU_CLASSES and type(module.gate_fn) is nn.SiLU:
        return SWIGLU
    raise NotFusable(f"its activation is a {name}, not GELU-tanh or SwiGLU")


def read_joined_single(
    norm: Any, linears: tuple[Any, Any], width: int, attention: Attention, activation: str
) -> SingleBlock:
    """Read a single block whose first linear makes q, k and v of this width, and what the MLP reads."""
    parts = (width, width, width, linears[0].out_features - 3 * width)
    inputs = NormLinears(check_norm(norm), read_group(linears[:1], False, parts))
    return SingleBlock(None, inputs, attention, GatedLinear(read_linear(linears[1])), activation)


class DiffusersDouble(Reader):
    """Reads diffusers' double blocks with an adaLN in each stream; a subclass knows their call."""

    def read(self, block: Any, join: bool) -> DoubleBlock:
        """See `Reader`."""
        norm, of_text = block.norm1, block.norm1_context
        text = Outside(read_modulation(of_text), of_text.norm, block.norm2_context, feed_forward(block.ff_context))
        image = Outside(read_modulation(norm), norm.norm, block.norm2, feed_forward(block.ff))
        return read_double(block.attn, text, image, join)


class DiffusersSingle(Reader):
    """Reads diffusers' single blocks; a subclass knows their call."""

    def read(self, block: Any, join: bool) -> SingleBlock:
        """See `Reader`."""
        attn, eps = block.attn, check_norm(block.norm.norm)
        return SingleBlock(
            read_modulation(block.norm),
            NormLinears(eps, read_group((attn.to_q, attn.to_k, attn.to_v, block.proj_mlp), join)),
            Attention(attn.head_dim, *qk_norm(attn.norm_q, attn.norm_k)),
            GatedLinear(read_linear(block.proj_out)),
            read_activation(block.act_mlp),
        )


SWIGLU_CLASSES = ("Flux2SwiGLU", "SiLUActivation")  # of diffusers and of ai-toolkit
TOOLKIT_EPS = 1e-6  # of the RMSNorm in ai-toolkit's blocks


def once_per_pass(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache make(tensor, ...) for a tensor that a model passes to all its blocks, for as long as the tensor lives.

    Of None it makes None. Not for use in a CUDA graph, whose replay would read the first values.
    """
    made = WeakTensorKeyDictionary()

    def cached(source: Tensor | None, *others: Any) -> Any:
        if source is None:
            return None
        key = source._version, *(id(x) if isinstance(x, Tensor) else x for x in others)
        entry = made.get(source)
        if entry is None or entry[0] != key:
            entry = made[source] = key, make(source, *others), others  # kept: their ids stay unique
        return entry[1]

    return cached


class ToolkitReader(Reader):
    """Reads ai-toolkit's blocks in BFL's layout."""

    heads = ("num_heads", "hidden_size")
    image_first = True

    def attention(self, block: Any, *norms: Any) -> Attention:
        """Attention with these QKNorms, of text first."""
        weights = [each.scale for norm in norms for each in (norm.query_norm, norm.key_norm)]
        if any(weight.requires_grad for weight in weights):
            raise NotFusable("a QK norm that is trained")
        return Attention(block.hidden_size // block.num_heads, TOOLKIT_EPS, tuple(weights))


class ToolkitDouble(ToolkitReader):
    """Reads double blocks; a subclass knows their call."""

    def read(self, block: Any, join: bool) -> DoubleBlock:
        """See `Reader`."""
        streams = []
        for attn, mlp, *norms in (
            (block.txt_attn, block.txt_mlp, block.txt_norm1, block.txt_norm2),
            (block.img_attn, block.img_mlp, block.img_norm1, block.img_norm2),
        ):
            if len(mlp) != 3:
                raise NotFusable("an MLP of more than two linears and an activation")
            inputs = read_group((attn.qkv,), join, (block.hidden_size,) * 3)
            outside = Outside(None, *norms, (mlp[0], mlp[2], read_activation(mlp[1])))
            streams.append(read_stream(outside, inputs, attn.proj))
        return DoubleBlock(self.attention(block, block.txt_attn.norm, block.img_attn.norm), *streams)


class ToolkitSingle(ToolkitReader):
    """Reads single blocks; a subclass knows their call."""

    def read(self, block: Any, join: bool) -> SingleBlock:
        """See `Reader`."""
        linears = (block.linear1, block.linear2)
        attention = self.attention(block, block.norm)
        activation = read_activation(block.mlp_act)
        return read_joined_single(block.pre_norm, linears, block.hidden_size, attention, activation)


@once_per_pass
def toolkit_rotary(*parts: Tensor) -> Rotary:
    """Cos and sin [S, d] of rotations [B, 1, S_i, d / 2, 2, 2], which are the same for all images, of text first."""
    table = torch.cat(parts, dim=2)
    if len(table) > 1 and not torch.equal(table[1:], table[:1].expand_as(table[1:])):
        raise NotFusable("images of one batch at different positions")
    cos, sin = (table[0, 0, ..., i, 0].repeat_interleave(2, dim=-1) for i in range(2))
    return cos, sin


@once_per_pass
def complex_rotary(*parts: Tensor) -> Rotary:
    """Cos and sin [S, d] of rotations, complex [S_i, d / 2] of text first, or [B, S, d] of [B, S, d / 2]."""
    table = parts[0] if len(parts) == 1 else torch.cat(parts)
    if table.ndim == 3 and len(table) == 1:  # the same for all images
        table = table[0]
    return table.real.repeat_interleave(2, dim=-1).contiguous(), table.imag.repeat_interleave(2, dim=-1).contiguous()
