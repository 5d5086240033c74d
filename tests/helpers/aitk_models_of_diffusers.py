"""Small models of diffusers' classes that ai-toolkit loads."""

from __future__ import annotations

from typing import Any

import torch
from aitk_inputs import HEADS, IMAGE, SIDE, TEXT, TEXT_WIDTH, WIDTH, Made, draw, noise_level


def lumina2() -> Made:
    """Lumina 2."""
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=2 * SIDE,
        in_channels=4,
        hidden_size=WIDTH,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=2,
        axes_dim_rope=(16, 24, 24),
        axes_lens=(256, 64, 64),
        cap_feat_dim=TEXT_WIDTH,
    )
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "timestep": noise_level(),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "return_dict": False,
    }


def cogview4() -> Made:
    """CogView 4."""
    from diffusers import CogView4Transformer2DModel

    model = CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        text_embed_dim=TEXT_WIDTH,
        time_embed_dim=64,
        condition_dim=32,
        sample_size=2 * SIDE,
    )
    size = torch.tensor([[512.0, 512.0]])
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "timestep": noise_level(500.0),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(1, 2),
        "return_dict": False,
    }


def ltx2() -> Made:
    """LTX-2: video and audio side by side."""
    from diffusers import LTX2VideoTransformer3DModel

    model = LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=HEADS,
        attention_head_dim=64,
        cross_attention_dim=WIDTH,
        audio_in_channels=16,
        audio_out_channels=16,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=32,
        audio_cross_attention_dim=128,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
    )
    return model, {
        "hidden_states": draw(1, IMAGE, 16),
        "audio_hidden_states": draw(1, 64, 16),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "audio_encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "timestep": noise_level(500.0),
        "num_frames": 1,
        "height": SIDE,
        "width": SIDE,
        "audio_num_frames": 64,
        "return_dict": False,
    }


def nucleus_image() -> Made:
    """Nucleus-Image: experts."""
    from diffusers import NucleusMoEImageTransformer2DModel

    model = NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(16, 24, 24),
        num_experts=4,
        moe_intermediate_dim=128,
        capacity_factors=2.0,
        dense_moe_strategy="leave_first_block_dense",
    )
    return model, {
        "hidden_states": draw(1, IMAGE, 16),
        "img_shapes": [(1, SIDE, SIDE)],
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.int64),
        "timestep": noise_level(),
        "return_dict": False,
    }


def auraflow() -> Made:
    """AuraFlow."""
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=2 * SIDE,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pos_embed_max_size=IMAGE,
    )
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "timestep": noise_level(),
        "return_dict": False,
    }


def pixart() -> Made:
    """PixArt."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=64,
        num_layers=2,
        cross_attention_dim=WIDTH,
        sample_size=2 * SIDE,
        caption_channels=TEXT_WIDTH,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "timestep": noise_level(500.0),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def sd3() -> Made:
    """SD 3.5 large; the medium one's first blocks, of dual attention, have no reader."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=64,
        pos_embed_max_size=64,
        in_channels=4,
        num_layers=3,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        caption_projection_dim=WIDTH,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=32,
        out_channels=4,
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": draw(1, 4, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "pooled_projections": draw(1, 32),
        "timestep": noise_level(500.0),
        "return_dict": False,
    }


def unet(extra: bool = False) -> Made:
    """A UNet of two levels; with the conditions of SDXL, or as Stable Diffusion 1 and 2."""
    from diffusers import UNet2DConditionModel

    options: dict[str, Any] = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
        "use_linear_projection": True,
    }
    model = UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(1, 2),
        cross_attention_dim=TEXT_WIDTH,
        **(options if extra else {}),
    )
    conditions = {"text_embeds": draw(1, 32), "time_ids": torch.tensor([[512.0, 512.0, 0.0, 0.0, 512.0, 512.0]])}
    return model, {
        "sample": draw(1, 4, 4 * SIDE, 4 * SIDE),
        "timestep": noise_level(500.0),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "added_cond_kwargs": conditions if extra else None,
        "return_dict": False,
    }
