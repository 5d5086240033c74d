"""Small models of ai-toolkit's own classes, one for each `arch`, with inputs: imported in ai-toolkit's environment.

Classes are imported where they are built, each with its own needs; `draw_weights` is up to the caller.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]
WIDTH, HEADS, IMAGE, TEXT, TEXT_WIDTH, SIDE = 256, 4, 256, 64, 64, 16
AXES = [16, 24, 24]
BLOCKS = {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": HEADS}
HIDDEN = {"hidden_size": WIDTH, "num_heads": HEADS, "depth": 2, "context_in_dim": TEXT_WIDTH}
REFINED = {"hidden_size": WIDTH, "num_refiner_layers": 1, "num_attention_heads": HEADS, "num_kv_heads": 2}
Z_IMAGE = {"dim": WIDTH, "n_layers": 2, "n_refiner_layers": 1, "n_heads": HEADS, "n_kv_heads": HEADS}
Z_IMAGE |= {"cap_feat_dim": TEXT_WIDTH, "axes_dims": AXES, "axes_lens": [512, 64, 64]}
KREA2 = {"features": WIDTH, "tdim": 64, "heads": HEADS, "kvheads": 2, "multiplier": 2, "layers": 2}
KREA2 |= {"txtdim": 128, "txtlayers": 12, "txtheads": 2, "txtkvheads": 2}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def draw_weights(model: nn.Module) -> nn.Module:
    """In bf16; what is linear has kaiming's spread, which keeps the size of activations, and norms are near theirs."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            noise *= parameter[0].numel() ** -0.5
        else:
            noise = noise * 0.1 + parameter.data.nan_to_num().clamp(0, 1)
        parameter.data = noise
    return nn.Module.to(model, torch.bfloat16)


def quantize_as_host(model: nn.Module, qtype: str) -> None:
    from optimum.quanto import freeze
    from toolkit.util.quantize import get_qtype, quantize

    quantize(model, weights=get_qtype(qtype))
    freeze(model)


def in_bf16(value: Any) -> Any:
    """Cast floating tensors, but for positions and rotary tables."""
    if isinstance(value, dict):
        exact = ("ids", "pos", "freqs")
        return {key: x if any(word in key for word in exact) else in_bf16(x) for key, x in value.items()}
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    return [in_bf16(x) for x in value] if isinstance(value, list) else value


def grid(axes: int = 3) -> Tensor:
    """Positions [256, axes] of image tokens: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = torch.zeros(IMAGE, axes)
    places[:, 1], places[:, 2] = rows.flatten(), columns.flatten()
    return places


def joint_grid() -> Tensor:
    """Positions of text tokens, then image tokens, of one sequence."""
    return torch.cat([torch.zeros(TEXT, 3), grid()])[None]


TIME, LATE = torch.tensor([0.5]), torch.tensor([500.0])
TOKENS, LATENTS, STATES = draw(1, IMAGE, 16), draw(1, 4, 2 * SIDE, 2 * SIDE), draw(1, TEXT, TEXT_WIDTH)
ALL_TEXT = torch.ones(1, TEXT, dtype=torch.bool)
SOME_TEXT = (torch.arange(TEXT) < TEXT - 16)[None]


def of_diffusers(name: str, inputs: dict[str, Any], **options: Any) -> Made:
    model = getattr(importlib.import_module("diffusers"), name)(**options)
    return model, {"encoder_hidden_states": STATES, "timestep": TIME, **inputs, "return_dict": False}


def module(path: str) -> Any:
    return importlib.import_module(f"extensions_built_in.diffusion_models.{path}")


# -- near FLUX -------------------------------------------------------------------------------------------------------
def flux(references: int = 0) -> Made:
    """FLUX.1; Kontext has the tokens of reference images behind those of the image."""
    inputs = {
        "hidden_states": draw(1, (1 + references) * IMAGE, 16),
        "pooled_projections": draw(1, 32),
        "img_ids": torch.cat([grid() + i for i in range(1 + references)]),
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.ones(1),
    }
    widths = {"joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": 32, "axes_dims_rope": AXES}
    counts = {"patch_size": 1, "in_channels": 16, "num_single_layers": 2, "guidance_embeds": True}
    return of_diffusers("FluxTransformer2DModel", inputs, **BLOCKS, **widths, **counts)


def flux2_params(guidance: bool, **sizes: int) -> Any:
    own = {"in_channels": 16, "depth_single_blocks": 2, "axes_dim": [16] * 4, "use_guidance_embed": guidance}
    return module("flux2.src.model").Flux2Params(**(HIDDEN | own | sizes))


def flux2(guidance: bool = True) -> Made:
    """FLUX.2 in BFL's layout; klein has no guidance."""
    return module("flux2.src.model").Flux2(flux2_params(guidance)), {
        "x": TOKENS, "x_ids": grid(axes=4)[None], "timesteps": TIME, "ctx": STATES,
        "ctx_ids": torch.zeros(1, TEXT, 4), "guidance": torch.tensor([4.0]) if guidance else None,
    }  # fmt: skip


def chroma(path: str = "chroma.src.model", image: Tensor = TOKENS, **more: Any) -> Made:
    """Chroma in BFL's layout, with a mask; on tokens or on pixels."""
    host = module(path)
    approximator = {"approximator_in_dim": 64, "approximator_depth": 2, "approximator_hidden_size": 128}
    own = {"depth_single_blocks": 2, "mlp_ratio": 4.0, "axes_dim": AXES, "theta": 10_000, "qkv_bias": True}
    options = {**HIDDEN, **approximator, **own, "in_channels": 16, "guidance_embed": True, "_use_compiled": False}
    return host.Chroma(host.ChromaParams(**(options | more))), {
        "img": image, "img_ids": grid()[None], "txt": STATES, "txt_ids": torch.zeros(1, TEXT, 3),
        "txt_mask": SOME_TEXT.float(), "timesteps": TIME, "guidance": torch.zeros(1),
    }  # fmt: skip


def chroma_of_diffusers() -> Made:
    sizes = {"in_channels": 16, "joint_attention_dim": 64, "axes_dims_rope": AXES, "num_single_layers": 2}
    approximator = {"approximator_num_channels": 64, "approximator_hidden_dim": 128, "approximator_layers": 2}
    inputs = {"hidden_states": TOKENS, "img_ids": grid(), "txt_ids": torch.zeros(TEXT, 3)}
    return of_diffusers("ChromaTransformer2DModel", inputs, **BLOCKS, **sizes, **approximator)


def chroma_radiance() -> Made:
    nerf = {"patch_size": 4, "nerf_hidden_size": 32, "nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 4}
    return chroma("chroma.src.radiance", draw(1, 3, 64, 64), in_channels=3, **nerf)


def qwen_image(images: int = 1) -> Made:
    inputs = {
        "hidden_states": draw(1, images * IMAGE, 16),
        "encoder_hidden_states_mask": SOME_TEXT.long(),
        "img_shapes": [[(1, SIDE, SIDE)] * images],
    }
    own = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": AXES}
    return of_diffusers("QwenImageTransformer2DModel", inputs, **BLOCKS, **own)


def z_image(path: str = "", patch: int = 2, channels: int = 4, side: int = 2 * SIDE) -> Made:
    """Z-Image of diffusers, or on pixels."""
    host = module(path) if path else importlib.import_module("diffusers")
    sizes = {"all_patch_size": (patch,), "all_f_patch_size": (1,), "in_channels": channels}
    inputs = {"x": [draw(channels, 1, side, side)], "t": TIME, "cap_feats": [draw(TEXT, TEXT_WIDTH)]}
    model = host.ZImageTransformer2DModel(**sizes, **Z_IMAGE)
    return model, {**inputs, "patch_size": patch, "return_dict": False}


def zeta_chroma() -> Made:
    """Z-Image's blocks with a decoder of DCT coefficients."""
    host = module("zeta_chroma.zeta_chroma_transformer")
    own = {"in_channels": 3, "patch_size": 4, "decoder_hidden_size": 64, "decoder_num_res_blocks": 1}
    return host.ZImageDCT(host.ZImageDCTParams(**own, **Z_IMAGE)), {
        "img": draw(1, IMAGE, 48), "img_ids": grid()[None].long(), "img_mask": torch.ones(1, IMAGE, dtype=torch.bool),
        "txt": STATES, "txt_ids": torch.zeros(1, TEXT, 3, dtype=torch.int64), "txt_mask": ALL_TEXT, "timesteps": TIME,
    }  # fmt: skip


def krea2() -> Made:
    """Krea 2: text of several encoder layers, grouped heads; sequences are padded to 256 tokens."""
    host = module("krea2.src.mmdit")
    return host.SingleStreamDiT(host.SingleMMDiTConfig(**KREA2, patch=2, channels=4)), {
        "img": TOKENS, "context": draw(1, TEXT, 12, 128), "t": TIME, "pos": joint_grid(),
        "mask": torch.ones(1, TEXT + IMAGE, dtype=torch.bool),
    }  # fmt: skip


def ideogram4() -> Made:
    """Ideogram 4: text and image in one sequence, told apart by an indicator."""
    host = module("ideogram4.src.transformer")
    sizes = {"emb_dim": WIDTH, "num_layers": 2, "num_heads": HEADS, "intermediate_size": 768, "adanln_dim": 64}
    own = {"in_channels": 16, "llm_features_dim": TEXT_WIDTH, "mrope_section": (12, 10, 10)}
    indicator = torch.full((1, TEXT + IMAGE), host.OUTPUT_IMAGE_INDICATOR)
    indicator[:, :TEXT] = host.LLM_TOKEN_INDICATOR
    return host.Ideogram4Transformer2DModel(host.Ideogram4Config(**sizes, **own)), {
        "llm_features": draw(1, TEXT + IMAGE, TEXT_WIDTH), "x": draw(1, TEXT + IMAGE, 16), "t": TIME,
        "position_ids": joint_grid().long(), "segment_ids": torch.ones(1, TEXT + IMAGE, dtype=torch.int64),
        "indicator": indicator,
    }  # fmt: skip


# -- classes that ai-toolkit has of its own, and Wan -----------------------------------------------------------------
def wan(image: bool = False) -> Made:
    """Wan's video transformer; with an image it attends to its embedding, too."""
    own = {"in_channels": 4, "out_channels": 4, "text_dim": TEXT_WIDTH, "freq_dim": 32, "ffn_dim": 768}
    inputs = {"hidden_states": LATENTS[:, :, None], "timestep": torch.tensor([900])}
    if image:
        own |= {"image_dim": 32, "added_kv_proj_dim": WIDTH}
        inputs["encoder_hidden_states_image"] = draw(1, 257, 32)
    return of_diffusers("WanTransformer3DModel", inputs, **BLOCKS, **own)


def wan22_14b() -> Made:
    (first, inputs), (second, _) = wan(), wan()
    dual = module("wan22.wan22_14b_model").DualWanTransformer3DModel
    return dual(first, second, torch_dtype=torch.bfloat16, device=torch.device("cpu")), inputs


def minimax_h3() -> Made:
    """MiniMax H3: video, audio and text rows in one sequence."""
    host = module("minimax_h3.src.transformer")
    sizes = {"hidden_size": WIDTH, "token_refiner_num_layers": 1, "ffn_hidden_size": 768, "latents_dim": 4}
    times = {"timestep_input_dim": 64, "time_embed_hidden_size": 64, "time_embed_dim": 64, "rope_inv_freq_len": 8}
    params = {**BLOCKS, **sizes, **times, "audio_latents_dim": 16, "text_dim": TEXT_WIDTH}
    audio, total = 32, TEXT + IMAGE + 32
    tags = torch.ones(1, total, dtype=torch.int64)
    tags[:, TEXT : TEXT + IMAGE], tags[:, TEXT + IMAGE :] = 0, 2
    places = torch.arange(total)
    return host.MiniMaxH3Transformer(host.MiniMaxH3TransformerParams(**params)), {
        "hidden_states": TOKENS, "audio_hidden_states": draw(1, audio, 16), "encoder_hidden_states": STATES,
        "row_timesteps": torch.full((1, total), 0.5), "token_tags": tags,
        "position_ids": torch.cat([joint_grid(), torch.zeros(1, audio, 3)], dim=1),
        "video_indices": places[TEXT : TEXT + IMAGE], "audio_indices": places[TEXT + IMAGE :],
        "text_indices": places[:TEXT],
    }  # fmt: skip


def mageflow() -> Made:
    host = module("mageflow.src.transformer")
    params = host.MageFlowParams(in_channels=16, out_channels=16, axes_dim=AXES, checkpoint=False, **HIDDEN)
    return host.MageFlow(params), {
        "img": TOKENS, "txt": STATES, "timesteps": TIME, "img_shapes": [[(1, SIDE, SIDE)]],
        "img_cu_seqlens": torch.tensor([0, IMAGE], dtype=torch.int32),
        "txt_cu_seqlens": torch.tensor([0, TEXT], dtype=torch.int32),
    }  # fmt: skip


def anima() -> Made:
    """Anima: Cosmos' transformer inside a module with a text conditioner."""
    own = {"in_channels": 4, "out_channels": 4, "text_embed_dim": TEXT_WIDTH, "adaln_lora_dim": 64}
    more = {"max_size": (8, 64, 64), "concat_padding_mask": True, "extra_pos_embed_type": None}
    inputs = {"hidden_states": LATENTS[:, :, None], "padding_mask": torch.zeros(1, 1, 2 * SIDE, 2 * SIDE)}
    model, inputs = of_diffusers("CosmosTransformer3DModel", inputs, **BLOCKS, **own, **more)
    return module("anima.anima").AnimaTrainableModel(model, nn.Identity()), inputs


def with_reference(model: nn.Module, rotary: Any, text: str) -> Made:
    return model, {
        "hidden_states": LATENTS,
        "timestep": TIME,
        f"{text}_hidden_states": STATES,
        "freqs_cis": rotary.get_freqs_cis(tuple(AXES), (256, 64, 64), theta=10000),
        f"{text}_attention_mask": ALL_TEXT,
        "ref_image_hidden_states": [[draw(4, 2 * SIDE, SIDE)]],
    }


ROTARY = {"axes_dim_rope": tuple(AXES), "axes_lens": (256, 64, 64), "in_channels": 4}


def omnigen2() -> Made:
    models = "omnigen2.src.models.transformers"
    kind = module(f"{models}.transformer_omnigen2").OmniGen2Transformer2DModel
    model = kind(num_layers=2, text_feat_dim=TEXT_WIDTH, **REFINED, **ROTARY)
    return with_reference(model, module(f"{models}.repo").OmniGen2RotaryPosEmbed, "text")


def boogu_image() -> Made:
    text = {"instruction_feat_dim": TEXT_WIDTH, "reduce_type": "mean", "num_instruction_feat_layers": 1}
    own = {"num_layers": 4, "num_double_stream_layers": 2, "instruction_feature_configs": text}
    model = module("boogu_image.src.transformer").BooguImageTransformer2DModel(**own, **REFINED, **ROTARY)
    return with_reference(model, module("boogu_image.src.rope"), "instruction")


def ernie_image() -> Made:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_layers": 2, "ffn_hidden_size": 768}
    own = {"in_channels": 16, "out_channels": 16, "text_in_dim": TEXT_WIDTH, "rope_axes_dim": tuple(AXES)}
    return module("ernie_image.transformer").ErnieImageTransformer2DModel(**sizes, **own), {
        "hidden_states": draw(1, 16, SIDE, SIDE), "timestep": TIME, "text_bth": STATES,
        "text_lens": torch.tensor([TEXT]), "return_dict": False,
    }  # fmt: skip


def prx_pixel() -> Made:
    kind = module("prx_pixel_t2i.src.transformer_prx").PRXTransformer2DModel
    return kind(in_channels=3, patch_size=4, axes_dim=[32, 32], **HIDDEN), {
        "hidden_states": draw(1, 3, 4 * SIDE, 4 * SIDE), "timestep": TIME, "encoder_hidden_states": STATES,
        "attention_mask": ALL_TEXT, "return_dict": False,
    }  # fmt: skip


def f_lite() -> Made:
    own = {"in_channels": 4, "cross_attn_input_size": TEXT_WIDTH, "residual_v": True}
    model = module("f_light.src.model").DiT(hidden_size=WIDTH, depth=2, num_heads=HEADS, **own)
    return model, {"x": LATENTS, "context": STATES, "timesteps": TIME}


# -- classes of diffusers --------------------------------------------------------------------------------------------
def lumina2() -> Made:
    own = {"sample_size": 2 * SIDE, "num_layers": 2, "cap_feat_dim": TEXT_WIDTH}
    inputs = {"hidden_states": LATENTS, "encoder_attention_mask": ALL_TEXT}
    return of_diffusers("Lumina2Transformer2DModel", inputs, **own, **REFINED, **ROTARY)


def cogview4() -> Made:
    own = {"in_channels": 4, "out_channels": 4, "text_embed_dim": TEXT_WIDTH, "time_embed_dim": 64}
    size = torch.tensor([[512.0, 512.0]])
    places = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(1, 2)}
    inputs = {"hidden_states": LATENTS, "timestep": LATE, **places}
    more = {"condition_dim": 32, "sample_size": 2 * SIDE}
    return of_diffusers("CogView4Transformer2DModel", inputs, **BLOCKS, **own, **more)


def ltx2() -> Made:
    inputs = {"hidden_states": TOKENS, "timestep": LATE, "num_frames": 1, "height": SIDE, "width": SIDE}
    inputs |= {"audio_hidden_states": draw(1, 64, 16), "audio_encoder_hidden_states": STATES, "audio_num_frames": 64}
    video = {"in_channels": 16, "out_channels": 16, "cross_attention_dim": WIDTH, "caption_channels": TEXT_WIDTH}
    audio = {"audio_in_channels": 16, "audio_out_channels": 16, "audio_cross_attention_dim": 128}
    heads = {"audio_num_attention_heads": HEADS, "audio_attention_head_dim": 32}
    return of_diffusers("LTX2VideoTransformer3DModel", inputs, **BLOCKS, **video, **audio, **heads)


def nucleus_image() -> Made:
    inputs = {"hidden_states": TOKENS, "img_shapes": [(1, SIDE, SIDE)], "encoder_hidden_states_mask": ALL_TEXT.long()}
    sizes = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": AXES}
    experts = {"num_experts": 4, "moe_intermediate_dim": 128, "capacity_factors": 2.0, "num_key_value_heads": 2}
    experts["dense_moe_strategy"] = "leave_first_block_dense"
    return of_diffusers("NucleusMoEImageTransformer2DModel", inputs, **BLOCKS, **sizes, **experts)


def auraflow() -> Made:
    counts = {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "attention_head_dim": 64, "num_attention_heads": HEADS}
    own = {"joint_attention_dim": TEXT_WIDTH, "caption_projection_dim": WIDTH, "pos_embed_max_size": IMAGE}
    inputs = {"hidden_states": LATENTS}
    return of_diffusers("AuraFlowTransformer2DModel", inputs, sample_size=2 * SIDE, **counts, **own)


def pixart() -> Made:
    own = {"cross_attention_dim": WIDTH, "caption_channels": TEXT_WIDTH, "use_additional_conditions": False}
    conditions = {"resolution": None, "aspect_ratio": None}
    inputs = {"hidden_states": LATENTS, "timestep": LATE, "added_cond_kwargs": conditions}
    return of_diffusers("PixArtTransformer2DModel", inputs, sample_size=2 * SIDE, **BLOCKS, **own)


def sd3() -> Made:
    """SD 3.5 large; the medium one's first blocks, of dual attention, have no reader."""
    inputs = {"hidden_states": LATENTS, "pooled_projections": draw(1, 32), "timestep": LATE}
    sizes = {"sample_size": 64, "pos_embed_max_size": 64, "in_channels": 4, "out_channels": 4, "num_layers": 3}
    widths = {"caption_projection_dim": WIDTH, "joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": 32}
    return of_diffusers("SD3Transformer2DModel", inputs, **(BLOCKS | sizes), **widths, qk_norm="rms_norm")


def unet(extra: bool = False) -> Made:
    sizes = {"block_out_channels": (64, 128), "layers_per_block": 1, "attention_head_dim": (1, 2)}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    kinds = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": TEXT_WIDTH}
    conditions = None
    if extra:
        kinds |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "use_linear_projection": True}
        kinds["projection_class_embeddings_input_dim"] = 80
        picture = torch.tensor([[512.0, 512.0, 0.0, 0.0, 512.0, 512.0]])
        conditions = {"text_embeds": draw(1, 32), "time_ids": picture}
    inputs = {"sample": draw(1, 4, 4 * SIDE, 4 * SIDE), "timestep": LATE, "added_cond_kwargs": conditions}
    return of_diffusers("UNet2DConditionModel", inputs, **sizes, **kinds)


OF_ITS_NAME = (
    *(flux2, chroma, chroma_radiance, qwen_image, zeta_chroma, krea2, ideogram4, anima, omnigen2),
    *(ernie_image, prx_pixel, lumina2, cogview4, nucleus_image, auraflow, sd3),
)
# `arch` names of the same model, and how it is made
KINDS: dict[str, Callable[[], Made]] = {
    **{make.__name__: make for make in OF_ITS_NAME},
    "flux flex2": flux,
    "flux_kontext": partial(flux, references=1),
    "flux2_klein_4b flux2_klein_9b": partial(flux2, guidance=False),
    "qwen_image_edit": partial(qwen_image, images=2),
    "qwen_image_edit_plus": partial(qwen_image, images=3),
    "zimage": z_image,
    "zimage_l2p": partial(z_image, "z_image.z_image_l2p_model", 16, 3, 16 * SIDE),
    "wan21 wan22_5b": wan,
    "wan21_i2v": partial(wan, image=True),
    "wan22_14b wan22_14b_i2v": wan22_14b,
    "minimax_h3 minimax_h3_ref2va": minimax_h3,
    "mageflow mageflow_edit": mageflow,
    "boogu_image boogu_image_edit": boogu_image,
    "f-lite": f_lite,
    "ltx2 ltx2.3 ltx2.5": ltx2,
    "pixart pixart_sigma": pixart,
    "sdxl ssd vega": partial(unet, extra=True),
    "sd1 sd2": unet,
}
MODELS = {arch: make for names, make in KINDS.items() for arch in names.split()}
