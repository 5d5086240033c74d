"""FLUX.2: dev and klein, as diffusers and as ai-toolkit (in the original's layout) have them.

The model makes one set of modulation vectors for all blocks of a kind and hands it in. Its linears have no bias, its
MLPs are SwiGLU, and a single block's q, k, v and MLP come from one linear.
Sources: diffusers models/transformers/transformer_flux2.py; https://github.com/black-forest-labs/flux2, whose model
ai-toolkit has; names of the original: diffusers scripts/convert_flux2_to_diffusers.py; published configs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...data.cache import input_device, model_identity
from ..fused.forms import DoubleBlock, Reader, SingleBlock, shared_of
from ..fused.linears import NotFusable
from ..fused.parts import Attention, Call
from ..fused.reading import (
    Outside,
    ToolkitDouble,
    ToolkitSingle,
    qk_norm,
    read_activation,
    read_double,
    read_joined_single,
    toolkit_rotary,
)
from .family import DF, BlockList, D, F, Family, Linear, outside_linears, own_entries, published

logger = logging.getLogger(__name__)


def _vectors(given: Any, image: Tensor) -> Tensor:
    """The vectors of one stream as a block takes them [B, n·D]; the model may hand in parts, or one row for all."""
    modulation = given if isinstance(given, Tensor) else torch.cat(tree_leaves(given), dim=-1)
    flat = modulation.flatten(1) if modulation.ndim == 2 or modulation.shape[1] == 1 else None
    if flat is None or len(flat) not in (1, len(image)):
        raise NotFusable(f"modulation of shape {tuple(modulation.shape)}")
    return flat.expand(len(image), -1)


# --- diffusers ---


_ATTENDS = ("image_rotary_emb", "joint_attention_kwargs")


class _Double(Reader):
    processor = "Flux2AttnProcessor"
    arguments = ("hidden_states", "encoder_hidden_states", "temb_mod_img", "temb_mod_txt", *_ATTENDS)

    def call(self, image: Any, text: Any, of_image: Any, of_text: Any, rotary: Any = None, kwargs: Any = None) -> Call:
        vectors = _vectors(of_text, image), _vectors(of_image, image)
        return Call(image, text, shared_of(rotary, kwargs), None, vectors)

    def read(self, block: Any, join: bool) -> DoubleBlock:
        of_text, of_image = block.ff_context, block.ff
        mlp = of_text.linear_in, of_text.linear_out, read_activation(of_text.act_fn)
        text = Outside(None, block.norm1_context, block.norm2_context, mlp)
        mlp = of_image.linear_in, of_image.linear_out, read_activation(of_image.act_fn)
        image = Outside(None, block.norm1, block.norm2, mlp)
        return read_double(block.attn, text, image, join)


class _DoubleOf36(_Double):
    """Of diffusers 0.36, which hands in shift, scale and gate apart."""

    arguments = ("hidden_states", "encoder_hidden_states", "temb_mod_params_img", "temb_mod_params_txt", *_ATTENDS)


class _Single(Reader):
    processor = "Flux2ParallelSelfAttnProcessor"
    arguments = (
        "hidden_states", "encoder_hidden_states", "temb_mod", *_ATTENDS, "split_hidden_states", "text_seq_len",
    )  # fmt: skip

    def call(self, x: Tensor, text: Any, vectors: Tensor, rotary: Any = None, kwargs: Any = None, *apart: Any) -> Call:
        if text is not None or any(apart):
            raise NotFusable("streams that are handed in apart, or come apart")
        return Call(x, None, shared_of(rotary, kwargs), None, (_vectors(vectors, x),))

    def read(self, block: Any, join: bool) -> SingleBlock:
        attn = block.attn
        attention = Attention(attn.head_dim, *qk_norm(attn.norm_q, attn.norm_k))
        linears = (attn.to_qkv_mlp_proj, attn.to_out)
        width = attn.heads * attn.head_dim
        return read_joined_single(block.norm, linears, width, attention, read_activation(attn.mlp_act_fn))


class _SingleOf36(_Single):
    arguments = (*_Single.arguments[:2], "temb_mod_params", *_Single.arguments[3:])


# --- ai-toolkit, in BFL's layout ---


class _ToolkitDouble(ToolkitDouble):
    arguments = ("img", "txt", "pe", "pe_ctx", "mod_img", "mod_txt")

    def call(self, image: Tensor, text: Tensor, pe: Tensor, text_pe: Tensor, of_image: Any, of_text: Any) -> Call:
        vectors = _vectors(of_text, image), _vectors(of_image, image)
        return Call(image, text, shared_of(toolkit_rotary(text_pe, pe)), None, vectors)


class _ToolkitSingle(ToolkitSingle):
    arguments = ("x", "pe", "mod")

    def call(self, x: Tensor, pe: Tensor, modulation: Any) -> Call:
        return Call(x, None, shared_of(toolkit_rotary(pe)), None, (_vectors(modulation, x),))


# --- the family ---

_linear = functools.partial(Linear, mlp_ratio=3)
DOUBLE_LINEARS = tuple(
    linear
    for stream, ff, qkv, out in (
        ("txt", "ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
        ("img", "ff", ("to_q", "to_k", "to_v"), "to_out.0"),
    )
    for linear in (
        _linear(f"{stream}_attn.qkv", tuple(f"attn.{part}" for part in qkv), (D, D, D), D),
        _linear(f"{stream}_attn.proj", (f"attn.{out}",), (D,), D),
        _linear(f"{stream}_mlp.0", (f"{ff}.linear_in",), ((0, 2),), D),
        _linear(f"{stream}_mlp.2", (f"{ff}.linear_out",), (D,), F),
    )
)
SINGLE_LINEARS = (
    _linear("linear1", ("attn.to_qkv_mlp_proj",), ((3, 2),), D),
    _linear("linear2", ("attn.to_out",), (D,), DF),
)
MODULATION = {"double_stream_modulation_img": 6, "double_stream_modulation_txt": 6, "single_stream_modulation": 3}
EMBEDDERS = {"time_in": "timestep", "guidance_in": "guidance"}


KLEIN_4B, KLEIN_9B = published("flux2_klein_4b"), published("flux2_klein_9b")


def _parts(configs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Klein's text encoder is a Qwen 3; dev's the language model in a Mistral 3, whose eyes are not counted."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import AutoConfig, AutoModelForCausalLM

    text = configs["text_encoder"].get("text_config", configs["text_encoder"])
    config = AutoConfig.for_model(text.get("model_type", "qwen3"), **own_entries(text))
    return {
        "transformer": Flux2Transformer2DModel.from_config(own_entries(configs["transformer"])),
        "vae": AutoencoderKLFlux2.from_config(own_entries(configs["vae"])).eval(),
        "text_encoder": AutoModelForCausalLM.from_config(config).eval(),
    }


class Flux2Text:
    """FLUX.2's frozen text side: some layers' states of one language model; captions are cut at `max_length` tokens."""

    def __init__(self, pipeline: Any, max_length: int = 512) -> None:
        self.pipeline = pipeline
        self.max_length = max_length
        self.models = [pipeline.text_encoder]

    @property
    def identity(self) -> str:
        """Changes whenever the embeddings of a prompt would."""
        return f"{type(self.pipeline).__name__}-{self.max_length}-{model_identity(self.pipeline.text_encoder)}"

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings [B, T, D] in bf16, as the pipeline makes them of each prompt; and [B, 0]: nothing is pooled."""
        device = input_device(self.pipeline.text_encoder)
        tokenizer = getattr(self.pipeline.tokenizer, "tokenizer", self.pipeline.tokenizer)
        embeds = []
        for prompt in prompts:
            length = len(tokenizer(prompt).input_ids)
            if length >= self.max_length:
                logger.warning(
                    "caption of %d tokens: its end is cut (limit %d): %.60s...", length, self.max_length, prompt
                )
            made, _ = self.pipeline.encode_prompt(prompt=[prompt], device=device, max_sequence_length=self.max_length)
            embeds.append(made)
        together = torch.cat(embeds).to(torch.bfloat16)
        return together, together.new_zeros(len(together), 0)


KLEIN = ("flux2_klein_4b", "flux2_klein_9b")
FLUX2 = Family(
    "Flux2Transformer2DModel",
    (
        BlockList(
            "transformer_blocks",
            "Flux2TransformerBlock",
            _Double(),
            (_DoubleOf36(),),
            kind="flux2_double",
            source="transformer_flux2",
            vectors=(6, 6),
            count="num_layers",
            original="double_blocks",
            linears=DOUBLE_LINEARS,
        ),
        BlockList(
            "single_transformer_blocks",
            "Flux2SingleTransformerBlock",
            _Single(),
            (_SingleOf36(),),
            kind="flux2_single",
            source="transformer_flux2",
            vectors=(3,),
            count="num_single_layers",
            original="single_blocks",
            linears=SINGLE_LINEARS,
        ),
    ),
    pipelines={"Flux2Pipeline": ("flux2",), "Flux2KleinPipeline": KLEIN},
    repositories={
        "FLUX.2-dev": "flux2",
        "FLUX.2-klein-4B": "flux2_klein_4b",
        "FLUX.2-klein-base-4B": "flux2_klein_4b",
        "FLUX.2-klein-9B": "flux2_klein_9b",
        "FLUX.2-klein-base-9B": "flux2_klein_9b",
    },
    ungated=("FLUX.2-klein-4B", "FLUX.2-klein-base-4B"),
    models={
        "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
        "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
        "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B,
        "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
    },
    inputs=("x_embedder", "context_embedder"),
    conditioning=("time_guidance_embed", *MODULATION),
    outside=outside_linears(
        "time_guidance_embed",
        EMBEDDERS,
        *(Linear(f"{name}.lin", (f"{name}.linear",), ((height, 0),), D) for name, height in MODULATION.items()),
    ),
    folders=("transformer", "vae", "text_encoder", "tokenizer", "scheduler"),
    text_features={"text_encoder": ("hidden_size", "joint_attention_dim", 3)},
    lora_loader="Flux2LoraLoaderMixin",
    # ComfyUI and ai-toolkit have the original's names only
    programs={"diffusers": (), "kohya": ("ComfyUI",), "comfyui": ("ComfyUI",)},
    parts=_parts,
)
FLUX2_OF_TOOLKIT = Family(
    "Flux2",
    (
        BlockList("double_blocks", "DoubleStreamBlock", _ToolkitDouble(), fused_bytes=14.6),
        BlockList("single_blocks", "SingleStreamBlock", _ToolkitSingle(), fused_bytes=12.5),
    ),
    archs=("flux2", *KLEIN),
    files={
        "flux2": "flux2-dev.safetensors",
        "flux2_klein_4b": "flux-2-klein-base-4b.safetensors",
        "flux2_klein_9b": "flux-2-klein-base-9b.safetensors",
    },
)
