"""FLUX.1: dev, schnell, Krea, Kontext, Fill, Flex.

Sources: diffusers models/transformers/transformer_flux.py, whose arithmetic the fused blocks follow to the rounding;
scripts/convert_flux_to_diffusers.py (the original's names); the models' published config.json files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..fused.forms import shared_of
from ..fused.parts import Call
from ..fused.reading import DiffusersDouble, DiffusersSingle
from .family import DF, BlockList, D, F, Family, Linear, outside_linears, own_entries, published

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel


class _Double(DiffusersDouble):
    processor = "FluxAttnProcessor"
    arguments = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")

    def call(self, image: Tensor, text: Tensor, temb: Tensor, rotary: Any = None, kwargs: Any = None) -> Call:
        return Call(image, text, shared_of(rotary, kwargs), temb)


class _Single(DiffusersSingle):
    processor, arguments, call = _Double.processor, _Double.arguments, _Double.call


DOUBLE_LINEARS = (
    Linear("txt_mod.lin", ("norm1_context.linear",), ((6, 0),), D),
    Linear("img_mod.lin", ("norm1.linear",), ((6, 0),), D),
    Linear("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), (D, D, D), D),
    Linear("txt_attn.proj", ("attn.to_add_out",), (D,), D),
    Linear("txt_mlp.0", ("ff_context.net.0.proj",), (F,), D),
    Linear("txt_mlp.2", ("ff_context.net.2",), (D,), F),
    Linear("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v"), (D, D, D), D),
    Linear("img_attn.proj", ("attn.to_out.0",), (D,), D),
    Linear("img_mlp.0", ("ff.net.0.proj",), (F,), D),
    Linear("img_mlp.2", ("ff.net.2",), (D,), F),
)
SINGLE_LINEARS = (
    Linear("modulation.lin", ("norm.linear",), ((3, 0),), D),
    Linear("linear1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), (D, D, D, F), D),
    Linear("linear2", ("proj_out",), (D,), DF),
)
EMBEDDERS = {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}

FLUX_DEV = published("flux1_dev")
FLUX_DEV_TRANSFORMER_CONFIG = FLUX_DEV["transformer"]


def make_flux_dev_geometry(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, **overrides: Any
) -> FluxTransformer2DModel:
    """Build a FLUX.1-dev sized transformer with random weights directly on `device`, frozen and in eval mode.

    Parameters are made one by one, so nothing beyond the model's own bytes (23.8 GB in bf16; none on `meta`) is
    allocated. Weights are N(0, 1/fan-in), biases 0, norms 1. `overrides` change entries of the config.
    """
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(**{**FLUX_DEV_TRANSFORMER_CONFIG, **overrides})
    device = torch.device(device)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tensor = torch.empty(parameter.shape, device=device, dtype=dtype)
            if parameter.ndim == 2:
                tensor.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]), generator=generator)
            else:
                tensor.fill_(0.0 if name == "bias" else 1.0)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def _parts(configs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    own = {part: own_entries(config) for part, config in configs.items()}
    return {
        "transformer": FluxTransformer2DModel.from_config(own["transformer"]),
        "vae": AutoencoderKL.from_config(own["vae"]).eval(),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**own["text_encoder"])),
        "text_encoder_2": T5EncoderModel(T5Config(**own["text_encoder_2"])).eval(),
    }


FLUX = Family(
    "FluxTransformer2DModel",
    (
        BlockList(
            "transformer_blocks",
            "FluxTransformerBlock",
            _Double(),
            kind="double",
            source="transformer_flux",
            count="num_layers",
            original="double_blocks",
            linears=DOUBLE_LINEARS,
            norms={
                "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
                "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
                "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
                "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
            },
        ),
        BlockList(
            "single_transformer_blocks",
            "FluxSingleTransformerBlock",
            _Single(),
            kind="single",
            source="transformer_flux",
            count="num_single_layers",
            original="single_blocks",
            linears=SINGLE_LINEARS,
            norms={
                "norm.query_norm.scale": "attn.norm_q.weight",
                "norm.key_norm.scale": "attn.norm_k.weight",
            },
        ),
    ),
    archs=("flux", "flex2", "flux_kontext"),
    one_row=("norm1.linear", "norm1_context.linear", "norm.linear"),
    pipelines={
        **dict.fromkeys(("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"), ("flux",)),
        "FluxKontextPipeline": ("flux_kontext",),
    },
    repositories={
        "FLUX.1-dev": "flux",
        "FLUX.1-schnell": "flux",
        "FLUX.1-Krea-dev": "flux",
        "FLUX.1-Kontext-dev": "flux_kontext",
        "FLUX.1-Fill-dev": "FLUX.1 Fill",
        "FLUX.1-Depth-dev": "FLUX.1 Depth",
        "FLUX.1-Canny-dev": "FLUX.1 Canny",
        "FLUX.1-Redux-dev": "FLUX.1 Redux",
    },
    ungated=("FLUX.1-schnell",),
    models={
        "black-forest-labs/FLUX.1-dev": FLUX_DEV,
        "black-forest-labs/FLUX.1-schnell": {
            **FLUX_DEV,
            "transformer": {**FLUX_DEV_TRANSFORMER_CONFIG, "guidance_embeds": False},
        },
    },
    inputs=("x_embedder", "context_embedder"),
    conditioning=("time_text_embed",),
    outside=outside_linears("time_text_embed", EMBEDDERS),
    folders=("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"),
    text_features={
        "text_encoder": ("hidden_size", "pooled_projection_dim", 1),
        "text_encoder_2": ("d_model", "joint_attention_dim", 1),
    },
    lora_loader="FluxLoraLoaderMixin",
    # ComfyUI: comfy/lora.py, model_lora_keys_unet: every weight as `diffusion_model.<name>` and
    #     `lora_unet_<name with _>`, and for Flux `transformer.<diffusers' name>` (comfy/utils.py, flux_to_diffusers).
    # ai-toolkit: toolkit/network_mixins.py, load_weights: peft_format, which FLUX sets, renames lora_A and lora_B only.
    # sd-scripts: networks/lora_flux.py looks modules up by LORA_PREFIX_FLUX = "lora_unet".
    programs={
        "diffusers": ("ComfyUI", "ai-toolkit"),
        "kohya": ("ComfyUI", "sd-scripts"),
        "comfyui": ("ComfyUI",),
    },
    parts=_parts,
)
