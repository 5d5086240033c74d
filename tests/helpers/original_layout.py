"""A FLUX transformer as one file in Black Forest Labs' layout, as `flux1-dev.safetensors` is; written out by hand."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
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


# kinds of `write_original`: ComfyUI's, without and with a note on each layer's format, and GGUF
GGUF = {"Q8_0": slice(0, 2), "Q6_K": slice(208, 210), "Q5_K": slice(0, 4), "Q4_K": slice(0, 4)}  # a block's fp16 scales
KINDS = ("cast", "scaled", "fp8 noted", "int8", "convrot", "nvfp4", "mixed", *GGUF)
GROUP = 16  # rotated neighbours


def write_original(model: nn.Module, path: Path, *, prefix: str = "", kind: str = "") -> dict[str, Tensor]:
    """Write diffusers' transformer as one file; returns the weights that it stands for, under the original's names.

    `kind`: how matrices are stored, of `KINDS`; "": in the model's dtype.
    """
    file: dict[str, Tensor] = {}
    meant = original_state(model)
    if kind in GGUF:
        return _write_gguf(meant, path, kind)
    for i, (name, value) in enumerate(list(meant.items())):
        if kind and value.ndim == 2:
            stem = name.removesuffix(".weight")
            each = ("fp8 noted", "nvfp4", "convrot", "bf16")[i % 4] if kind == "mixed" else kind
            parts, values = encoded(value.float(), each)
            meant[name] = values.to(value.dtype)
            value = parts.pop(".weight", value)
            file |= {f"{prefix}{stem}{end}": part for end, part in parts.items()}
        file[f"{prefix}{name}"] = value.contiguous()
    if kind == "scaled":
        file[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    if prefix:  # an all-in-one file
        file |= {"vae.encoder.conv_in.weight": torch.zeros(4, 3, 3, 3), "text_encoders.t5xxl.x": torch.zeros(2)}
    save_file(file, path)
    return meant


def encoded(value: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors that stand for a matrix in a file, by the ends of their names; and the values that they stand for."""
    amax, note = value.abs().max(), {}
    if kind == "bf16":
        return {}, value
    if kind in ("cast", "scaled", "fp8 noted"):
        scale = torch.tensor(1.0) if kind == "cast" else amax / 448
        codes = (value / scale).to(torch.float8_e4m3fn)
        parts = {".scale_weight": scale, ".scale_input": torch.tensor(1.0)} if kind == "scaled" else {}
        if kind == "fp8 noted":
            parts, note = {".weight_scale": scale}, {"format": "float8_e4m3fn"}
        values = codes.float() * scale
    elif kind == "nvfp4":
        codes, parts, values = _nvfp4(value)
        note = {"format": "nvfp4"}
    else:
        note, turned, turn = {"format": "int8_tensorwise"}, value, torch.eye(1)
        if kind == "convrot":
            small = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
            turn = torch.kron(small, small) / GROUP**0.5
            note |= {"convrot": True, "convrot_groupsize": GROUP}
        turned = (value.unflatten(-1, (-1, len(turn))) @ turn).flatten(-2)
        scale = turned.abs().amax(1, keepdim=True) / 127 if kind == "convrot" else amax / 127
        codes = (turned / scale).round().to(torch.int8)
        parts = {".weight_scale": scale}
        values = ((codes * scale).unflatten(-1, (-1, len(turn))) @ turn.t()).flatten(-2)
    if note:
        parts[".comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    return {".weight": codes, **parts}, values


def _nvfp4(value: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    rows, blocks = value.shape[0], value.shape[1] // 16
    parts = value.unflatten(-1, (blocks, 16))
    scale = value.abs().max() / (448 * 6)
    block_scales = (parts.abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
    unit = (block_scales.float() * scale).unsqueeze(-1)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (parts / unit).nan_to_num().abs().unsqueeze(-1).sub(numbers).abs().argmin(-1)
    codes = (nearest + 8 * (parts < 0)).to(torch.uint8).flatten(1)
    padded = torch.zeros(-(-rows // 128) * 128, -(-blocks // 4) * 4).to(torch.float8_e4m3fn)
    padded[:rows, :blocks] = block_scales
    tiled = torch.zeros_like(padded).flatten()
    for row in range(padded.shape[0]):  # as cuBLAS describes it
        for block in range(padded.shape[1]):
            tile = row // 128 * (padded.shape[1] // 4) + block // 4
            tiled[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = padded[row, block]
    values = (numbers[nearest] * torch.where(parts < 0, -1, 1) * unit).flatten(1)
    scales = {".weight_scale": tiled.view_as(padded), ".weight_scale_2": scale}
    return codes[:, ::2] << 4 | codes[:, 1::2], scales, values


def _write_gguf(state: dict[str, Tensor], path: Path, kind: str) -> dict[str, Tensor]:
    """Random blocks of a type where rows are whole ones; other tensors in the types that people's files have."""
    gguf = pytest.importorskip("gguf")
    writer, bits = gguf.GGUFWriter(path, "flux"), np.random.default_rng(0)
    for name, value in state.items():
        stored = gguf.GGMLQuantizationType[kind]
        values, bytes_of = gguf.GGML_QUANT_SIZES[stored]
        if value.ndim == 2 and value.shape[1] % values == 0:
            blocks = bits.integers(0, 256, (value.numel() // values, bytes_of), np.uint8)
            place = GGUF[kind]
            scales = bits.uniform(1e-4, 2e-4, (len(blocks), (place.stop - place.start) // 2))
            blocks[:, place] = scales.astype(np.float16).view(np.uint8)
            data = blocks.reshape(len(value), -1)
        else:
            end = {".weight": "F16", ".bias": "BF16", ".scale": "F32"}[Path(name).suffix]
            stored = gguf.GGMLQuantizationType[end]
            data = gguf.quants.quantize(value.float().numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        state[name] = torch.from_numpy(gguf.quants.dequantize(data, stored).copy()).to(value.dtype)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return state
