"""A FLUX transformer as one file in Black Forest Labs' layout, as `flux1-dev.safetensors` is; written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "proj_out": "final_layer.linear",
}


def original_state(model: nn.Module) -> dict[str, Tensor]:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return dict(_renamed(state, len(model.transformer_blocks), len(model.single_transformer_blocks)))


def _renamed(state: dict[str, Tensor], doubles: int, singles: int) -> Iterator[tuple[str, Tensor]]:
    def fused(block: str, parts: tuple[str, ...], kind: str) -> Tensor:
        return torch.cat([state[f"{block}.{part}.{kind}"] for part in parts])

    for kind in ("weight", "bias"):
        for ours, theirs in _OUTSIDE.items():
            yield f"{theirs}.{kind}", state[f"{ours}.{kind}"]
        scale, shift = state[f"norm_out.linear.{kind}"].chunk(2)
        yield f"final_layer.adaLN_modulation.1.{kind}", torch.cat([shift, scale])
        for i in range(doubles):
            ours, theirs = f"transformer_blocks.{i}", f"double_blocks.{i}"
            for name, new in _DOUBLE.items():
                yield f"{theirs}.{new}.{kind}", state[f"{ours}.{name}.{kind}"]
            yield f"{theirs}.img_attn.qkv.{kind}", fused(ours, ("attn.to_q", "attn.to_k", "attn.to_v"), kind)
            added = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
            yield f"{theirs}.txt_attn.qkv.{kind}", fused(ours, added, kind)
        for i in range(singles):
            ours, theirs = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
            yield f"{theirs}.linear1.{kind}", fused(ours, ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), kind)
            yield f"{theirs}.linear2.{kind}", state[f"{ours}.proj_out.{kind}"]
            yield f"{theirs}.modulation.lin.{kind}", state[f"{ours}.norm.linear.{kind}"]
    for i in range(doubles):
        for name, new in _NORMS.items():
            yield f"double_blocks.{i}.{new}.scale", state[f"transformer_blocks.{i}.{name}.weight"]
    for i in range(singles):
        for name in ("query", "key"):
            weight = state[f"single_transformer_blocks.{i}.attn.norm_{name[0]}.weight"]
            yield f"single_blocks.{i}.norm.{name}_norm.scale", weight


def write_original(model: nn.Module, path: Path, *, prefix: str = "", fp8: str = "") -> dict[str, Tensor]:
    """Write diffusers' transformer as one file; returns the weights that it stands for, under the original's names.

    `fp8`: "cast" matrices as float8_e4m3fn, or "scaled" with `scale_weight`, as ComfyUI writes them.
    """
    file: dict[str, Tensor] = {}
    meant = original_state(model)
    for name, value in list(meant.items()):
        if fp8 and value.ndim == 2:
            scale = (value.float().abs().max() / 448) if fp8 == "scaled" else torch.tensor(1.0)
            codes = (value.float() / scale).to(torch.float8_e4m3fn)
            meant[name] = (codes.float() * scale).to(value.dtype)
            if fp8 == "scaled":
                stem = name.removesuffix(".weight")
                file |= {f"{prefix}{stem}.scale_weight": scale, f"{prefix}{stem}.scale_input": torch.tensor(1.0)}
            value = codes
        file[f"{prefix}{name}"] = value.contiguous()
    if fp8 == "scaled":
        file[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    if prefix:  # an all-in-one file
        file |= {"vae.encoder.conv_in.weight": torch.zeros(4, 3, 3, 3), "text_encoders.t5xxl.x": torch.zeros(2)}
    save_file(file, path)
    return meant
