"""Small models of classes that ai-toolkit has of its own, and Wan."""

from __future__ import annotations

from typing import Any

import torch
from aitk_inputs import HEADS, IMAGE, SIDE, TEXT, TEXT_WIDTH, WIDTH, Made, draw, grid, host_module, noise_level
from torch import nn


def wan(image: bool = False) -> Made:
    """Wan's video transformer; with an image it attends to its embedding, too."""
    from diffusers import WanTransformer3DModel

    options: dict[str, Any] = {"image_dim": 32, "added_kv_proj_dim": WIDTH} if image else {}
    model = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=768,
        num_layers=2,
        **options,
    )
    inputs = {
        "hidden_states": draw(1, 4, 1, 2 * SIDE, 2 * SIDE),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "return_dict": False,
    }
    return model, inputs | ({"encoder_hidden_states_image": draw(1, 257, 32)} if image else {})


def wan22_14b() -> Made:
    """Wan 2.2's two transformers, of which the noise level chooses one."""
    (first, inputs), (second, _) = wan(), wan()
    dual = host_module("wan22.wan22_14b_model").DualWanTransformer3DModel
    return dual(first, second, torch_dtype=torch.bfloat16, device=torch.device("cpu")), inputs


def minimax_h3() -> Made:
    """MiniMax H3: video, audio and text rows in one sequence."""
    host = host_module("minimax_h3.src.transformer")
    params = host.MiniMaxH3TransformerParams(
        hidden_size=WIDTH,
        num_layers=2,
        token_refiner_num_layers=1,
        num_attention_heads=HEADS,
        attention_head_dim=64,
        ffn_hidden_size=768,
        latents_dim=4,
        audio_latents_dim=16,
        text_dim=TEXT_WIDTH,
        timestep_input_dim=64,
        time_embed_hidden_size=64,
        time_embed_dim=64,
        rope_inv_freq_len=8,
    )
    audio, total = 32, TEXT + IMAGE + 32
    tags = torch.ones(1, total, dtype=torch.int64)
    tags[:, TEXT : TEXT + IMAGE], tags[:, TEXT + IMAGE :] = 0, 2
    places = torch.arange(total)
    return host.MiniMaxH3Transformer(params), {
        "hidden_states": draw(1, IMAGE, 16),
        "audio_hidden_states": draw(1, audio, 16),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "row_timesteps": torch.full((1, total), 0.5),
        "token_tags": tags,
        "position_ids": torch.cat([torch.zeros(TEXT, 3), grid(), torch.zeros(audio, 3)])[None],
        "video_indices": places[TEXT : TEXT + IMAGE],
        "audio_indices": places[TEXT + IMAGE :],
        "text_indices": places[:TEXT],
    }


def mageflow() -> Made:
    """Mage-Flow: samples packed one after the other."""
    host = host_module("mageflow.src.transformer")
    params = host.MageFlowParams(
        in_channels=16,
        out_channels=16,
        context_in_dim=TEXT_WIDTH,
        hidden_size=WIDTH,
        num_heads=HEADS,
        depth=2,
        axes_dim=[16, 24, 24],
        checkpoint=False,
    )
    return host.MageFlow(params), {
        "img": draw(1, IMAGE, 16),
        "txt": draw(1, TEXT, TEXT_WIDTH),
        "timesteps": noise_level(),
        "img_shapes": [[(1, SIDE, SIDE)]],
        "img_cu_seqlens": torch.tensor([0, IMAGE], dtype=torch.int32),
        "txt_cu_seqlens": torch.tensor([0, TEXT], dtype=torch.int32),
    }


def anima() -> Made:
    """Anima: Cosmos' transformer inside a module with a text conditioner."""
    from diffusers import CosmosTransformer3DModel

    model = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=64,
        num_layers=2,
        text_embed_dim=TEXT_WIDTH,
        adaln_lora_dim=64,
        max_size=(8, 64, 64),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )
    return host_module("anima.anima").AnimaTrainableModel(model, nn.Identity()), {
        "hidden_states": draw(1, 4, 1, 2 * SIDE, 2 * SIDE),
        "timestep": noise_level(),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "padding_mask": torch.zeros(1, 1, 2 * SIDE, 2 * SIDE),
        "return_dict": False,
    }


def omnigen2() -> Made:
    """OmniGen2, with a reference image."""
    host = host_module("omnigen2.src.models.transformers.transformer_omnigen2")
    axes = ((16, 24, 24), (256, 64, 64))
    model = host.OmniGen2Transformer2DModel(
        in_channels=4,
        hidden_size=WIDTH,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=2,
        axes_dim_rope=axes[0],
        axes_lens=axes[1],
        text_feat_dim=TEXT_WIDTH,
    )
    rotary = host_module("omnigen2.src.models.transformers.repo").OmniGen2RotaryPosEmbed
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "timestep": noise_level(),
        "text_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "freqs_cis": rotary.get_freqs_cis(*axes, theta=10000),
        "text_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "ref_image_hidden_states": [[draw(4, 2 * SIDE, SIDE)]],
    }


def boogu_image() -> Made:
    """Boogu-Image, with a reference image."""
    host = host_module("boogu_image.src.transformer")
    axes = ((16, 24, 24), (256, 64, 64))
    model = host.BooguImageTransformer2DModel(
        in_channels=4,
        hidden_size=WIDTH,
        num_layers=4,
        num_double_stream_layers=2,
        num_refiner_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=2,
        axes_dim_rope=axes[0],
        axes_lens=axes[1],
        instruction_feature_configs={
            "instruction_feat_dim": TEXT_WIDTH,
            "reduce_type": "mean",
            "num_instruction_feat_layers": 1,
        },
    )
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "timestep": noise_level(),
        "instruction_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "freqs_cis": host_module("boogu_image.src.rope").get_freqs_cis(*axes, theta=10000),
        "instruction_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "ref_image_hidden_states": [[draw(4, 2 * SIDE, SIDE)]],
    }


def ernie_image() -> Made:
    """ERNIE-Image."""
    host = host_module("ernie_image.transformer")
    model = host.ErnieImageTransformer2DModel(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_layers=2,
        ffn_hidden_size=768,
        in_channels=16,
        out_channels=16,
        text_in_dim=TEXT_WIDTH,
        rope_axes_dim=(16, 24, 24),
    )
    return model, {
        "hidden_states": draw(1, 16, SIDE, SIDE),
        "timestep": noise_level(),
        "text_bth": draw(1, TEXT, TEXT_WIDTH),
        "text_lens": torch.tensor([TEXT]),
        "return_dict": False,
    }


def prx_pixel() -> Made:
    """PRX on pixels."""
    host = host_module("prx_pixel_t2i.src.transformer_prx")
    model = host.PRXTransformer2DModel(
        in_channels=3,
        patch_size=4,
        context_in_dim=TEXT_WIDTH,
        hidden_size=WIDTH,
        num_heads=HEADS,
        depth=2,
        axes_dim=[32, 32],
    )
    return model, {
        "hidden_states": draw(1, 3, 4 * SIDE, 4 * SIDE),
        "timestep": noise_level(),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "return_dict": False,
    }


def f_lite() -> Made:
    """F-Lite."""
    model = host_module("f_light.src.model").DiT(
        in_channels=4, hidden_size=WIDTH, depth=2, num_heads=HEADS, cross_attn_input_size=TEXT_WIDTH, residual_v=True
    )
    inputs = {"x": draw(1, 4, 2 * SIDE, 2 * SIDE), "context": draw(1, TEXT, TEXT_WIDTH), "timesteps": noise_level()}
    return model, inputs
