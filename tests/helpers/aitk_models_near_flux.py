"""Small models whose blocks are like FLUX.1's, in diffusers' or BFL's layout."""

from __future__ import annotations

from typing import Any

import torch
from aitk_inputs import HEADS, IMAGE, SIDE, TEXT, TEXT_WIDTH, WIDTH, Made, draw, grid, host_module, noise_level
from torch import Tensor


def flux(**options: Any) -> Made:
    """FLUX.1."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
        **options,
    )
    return model, {
        "hidden_states": draw(1, IMAGE, 16),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "pooled_projections": draw(1, 32),
        "timestep": noise_level(),
        "img_ids": grid(),
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": noise_level(1.0),
        "return_dict": False,
    }


def kontext() -> Made:
    """FLUX.1 with the tokens of a reference image behind those of the image."""
    model, inputs = flux()
    inputs |= {"hidden_states": draw(1, 2 * IMAGE, 16), "img_ids": torch.cat([grid(), grid() + 1])}
    return model, inputs


def flux2(guidance: bool = True) -> Made:
    """FLUX.2 in BFL's layout; klein has no guidance."""
    host = host_module("flux2.src.model")
    params = host.Flux2Params(
        in_channels=16,
        context_in_dim=TEXT_WIDTH,
        hidden_size=WIDTH,
        num_heads=HEADS,
        depth=2,
        depth_single_blocks=2,
        axes_dim=[16, 16, 16, 16],
        use_guidance_embed=guidance,
    )
    return host.Flux2(params), {
        "x": draw(1, IMAGE, 16),
        "x_ids": grid(axes=4)[None],
        "timesteps": noise_level(),
        "ctx": draw(1, TEXT, TEXT_WIDTH),
        "ctx_ids": torch.zeros(1, TEXT, 4),
        "guidance": noise_level(4.0) if guidance else None,
    }


def _chroma_params(**options: Any) -> dict[str, Any]:
    return {
        "context_in_dim": TEXT_WIDTH,
        "hidden_size": WIDTH,
        "mlp_ratio": 4.0,
        "num_heads": HEADS,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [16, 24, 24],
        "theta": 10_000,
        "qkv_bias": True,
        "guidance_embed": True,
        "approximator_in_dim": 64,
        "approximator_depth": 2,
        "approximator_hidden_size": 128,
        "_use_compiled": False,
        **options,
    }


def _chroma_inputs(image: Tensor) -> dict[str, Any]:
    mask = torch.ones(1, TEXT)
    mask[:, -16:] = 0
    return {
        "img": image,
        "img_ids": grid()[None],
        "txt": draw(1, TEXT, TEXT_WIDTH),
        "txt_ids": torch.zeros(1, TEXT, 3),
        "txt_mask": mask,
        "timesteps": noise_level(),
        "guidance": noise_level(0.0),
    }


def chroma() -> Made:
    """Chroma in BFL's layout, with a mask."""
    host = host_module("chroma.src.model")
    return host.Chroma(host.ChromaParams(**_chroma_params(in_channels=16))), _chroma_inputs(draw(1, IMAGE, 16))


def chroma_radiance() -> Made:
    """Chroma on pixels."""
    host = host_module("chroma.src.radiance")
    nerf = {"patch_size": 4, "nerf_hidden_size": 32, "nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 4}
    return host.Chroma(host.ChromaParams(**_chroma_params(in_channels=3, **nerf))), _chroma_inputs(draw(1, 3, 64, 64))


def qwen_image(images: int = 1) -> Made:
    """Qwen-Image; with two images as its editing models."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(16, 24, 24),
    )
    mask = torch.ones(1, TEXT, dtype=torch.int64)
    mask[:, -16:] = 0
    return model, {
        "hidden_states": draw(1, images * IMAGE, 16),
        "encoder_hidden_states": draw(1, TEXT, TEXT_WIDTH),
        "encoder_hidden_states_mask": mask,
        "timestep": noise_level(),
        "img_shapes": [[(1, SIDE, SIDE)] * images],
        "return_dict": False,
    }


def _z_image(cls: Any, patch: int, channels: int, side: int) -> Made:
    model = cls(
        all_patch_size=(patch,),
        all_f_patch_size=(1,),
        in_channels=channels,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[16, 24, 24],
        axes_lens=[512, 64, 64],
    )
    inputs = {"x": [draw(channels, 1, side, side)], "t": noise_level(), "cap_feats": [draw(TEXT, TEXT_WIDTH)]}
    return model, {**inputs, "patch_size": patch, "return_dict": False}


def zimage() -> Made:
    """Z-Image."""
    from diffusers import ZImageTransformer2DModel

    return _z_image(ZImageTransformer2DModel, 2, 4, 2 * SIDE)


def zimage_l2p() -> Made:
    """Z-Image on pixels."""
    return _z_image(host_module("z_image.z_image_l2p_model").ZImageTransformer2DModel, 16, 3, 16 * SIDE)


def zeta_chroma() -> Made:
    """Z-Image's blocks with a decoder of DCT coefficients."""
    host = host_module("zeta_chroma.zeta_chroma_transformer")
    params = host.ZImageDCTParams(
        in_channels=3,
        patch_size=4,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[16, 24, 24],
        axes_lens=[512, 64, 64],
        decoder_hidden_size=64,
        decoder_num_res_blocks=1,
    )
    return host.ZImageDCT(params), {
        "img": draw(1, IMAGE, 48),
        "img_ids": grid()[None].long(),
        "img_mask": torch.ones(1, IMAGE, dtype=torch.bool),
        "txt": draw(1, TEXT, TEXT_WIDTH),
        "txt_ids": torch.zeros(1, TEXT, 3, dtype=torch.int64),
        "txt_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "timesteps": noise_level(),
    }


def krea2() -> Made:
    """Krea 2: text of several encoder layers, grouped heads; sequences are padded to 256 tokens."""
    host = host_module("krea2.src.mmdit")
    config = host.SingleMMDiTConfig(
        features=WIDTH,
        tdim=64,
        txtdim=128,
        heads=HEADS,
        multiplier=2,
        layers=2,
        patch=2,
        channels=4,
        kvheads=2,
        txtlayers=12,
        txtheads=2,
        txtkvheads=2,
    )
    places = torch.cat([torch.zeros(TEXT, 3), grid()])[None]
    return host.SingleStreamDiT(config), {
        "img": draw(1, IMAGE, 16),
        "context": draw(1, TEXT, 12, 128),
        "t": noise_level(),
        "pos": places,
        "mask": torch.ones(1, TEXT + IMAGE, dtype=torch.bool),
    }


def ideogram4() -> Made:
    """Ideogram 4: text and image in one sequence, told apart by an indicator."""
    host = host_module("ideogram4.src.transformer")
    config = host.Ideogram4Config(
        emb_dim=WIDTH,
        num_layers=2,
        num_heads=HEADS,
        intermediate_size=768,
        adanln_dim=64,
        in_channels=16,
        llm_features_dim=TEXT_WIDTH,
        mrope_section=(12, 10, 10),
    )
    indicator = torch.full((1, TEXT + IMAGE), host.OUTPUT_IMAGE_INDICATOR)
    indicator[:, :TEXT] = host.LLM_TOKEN_INDICATOR
    return host.Ideogram4Transformer2DModel(config), {
        "llm_features": draw(1, TEXT + IMAGE, TEXT_WIDTH),
        "x": draw(1, TEXT + IMAGE, 16),
        "t": noise_level(),
        "position_ids": torch.cat([torch.zeros(TEXT, 3), grid()])[None].long(),
        "segment_ids": torch.ones(1, TEXT + IMAGE, dtype=torch.int64),
        "indicator": indicator,
    }
