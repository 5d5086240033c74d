"""What a `.safetensors` file is, from its header alone: whether it is complete, and which model's checkpoint.

FLUX.1 in one file has Black Forest Labs' layout (`double_blocks.0.img_attn.qkv.weight`), possibly under
`model.diffusion_model.`, in FP8, or next to text encoders and a VAE, which are ignored.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...config.coat import AUTO
from ...config.job import JobConfig
from .encodings import E4M3_CODES, FP8, GGUF, NAMES, CheckpointError, Encoding, Header, keeps_codes, read_header

SUFFIXES = (".safetensors", ".sft", GGUF)
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
IN_CHANNELS = {128: "FLUX.1 Depth or Canny", 384: "FLUX.1 Fill"}  # of FLUX.1 models that need another image as input
DEV, SCHNELL = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"
_FIRST = "double_blocks.0.img_attn.qkv"
_SIGNS = (  # a key of it, and what it is; in this order
    (r"lora_(A|B|down|up)\b|hada_w|lokr_w", "a LoRA"),
    (r"distilled_guidance_layer\.", "Chroma"),
    (r"double_stream_modulation_img\.", "FLUX.2"),
    (rf"{re.escape(_FIRST)}\.(weight\.(absmax|quant_state|quant_map)|qweight)", "FLUX in a format for inference only"),
    (rf"{re.escape(_FIRST)}\.weight$", "FLUX.1"),
    (r"(^|\.)transformer_blocks\.0\.attn\.to_q\.weight$", "a transformer in diffusers layout"),
    (r"(^|\.)input_blocks\.0\.0\.weight$", "Stable Diffusion"),
    (r"(^|\.)joint_blocks\.0\.", "Stable Diffusion 3"),
    (r"encoder\.block\.0\.layer\.0\.SelfAttention", "the text encoder T5"),
    (r"text_model\.encoder\.layers\.0\.", "a CLIP text encoder"),
    (r"^(enc\.)?blk\.0\.", "a language model or text encoder"),
    (r"^(encoder|decoder)\.conv_in\.weight$", "a VAE"),
)
REQUANTIZED = "requantized"
Shapes = Mapping[str, list[int]]


def cached_folder(name: str) -> Path | None:
    """The folder of a model in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(name, "model_index.json")
    except HFValidationError:
        return None
    return Path(index).parent if isinstance(index, str) else None


def transformer_keys(shapes: Shapes) -> dict[str, str]:
    """Black Forest Labs' name of each tensor of the transformer → its key in the file."""
    prefix = next(prefix for prefix in PREFIXES if f"{prefix}{_FIRST}.weight" in shapes)
    return {key.removeprefix(prefix): key for key in shapes if key.startswith(prefix)}


def flux_config(shapes: Shapes) -> dict[str, Any]:
    """The transformer's config in diffusers' terms, from tensor shapes; CheckpointError if not FLUX.1 or damaged."""
    kinds = (kind for sign, kind in _SIGNS if any(re.search(sign, key) for key in shapes))
    kind = next(kinds, "an unknown model")
    if kind != "FLUX.1":
        raise CheckpointError(f"is {kind}; give a FLUX.1 checkpoint, such as flux1-dev.safetensors")
    keys = transformer_keys(shapes)

    def shape(name: str) -> list[int]:
        if name not in keys:
            raise CheckpointError(f"has no tensor {name}; download it again")
        return shapes[keys[name]]

    def count(blocks: str) -> int:
        return len({name.split(".")[1] for name in keys if name.startswith(f"{blocks}.")})

    hidden, channels = shape("img_in.weight")
    (head,) = shape("double_blocks.0.img_attn.norm.query_norm.scale")
    rows = (head * 7 // 16) // 2 * 2
    return {
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": shape("final_layer.linear.weight")[0],
        "num_layers": count("double_blocks"),
        "num_single_layers": count("single_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": shape("txt_in.weight")[1],
        "pooled_projection_dim": shape("vector_in.in_layer.weight")[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in keys,
        "axes_dims_rope": [head - 2 * rows, rows, rows],  # 16, 56, 56
    }


def describe_file(job: JobConfig) -> str:
    """How a job's FLUX.1 file stores the weights of its blocks, by the header, and what a run makes of them: one line.

    Empty if its model is not a file.
    """
    path, kinds = Path(job.model.name_or_path), Counter[str]()
    if not path.is_file():
        return ""
    header = read_header(path)
    encodings = header.encodings()
    for name, key in transformer_keys(header.shapes).items():
        if not re.fullmatch(r"(double|single)_blocks\..*\.weight", name):
            continue
        kind, encoding = header.dtypes[key], encodings.get(key)
        if encoding is not None:
            kind = NAMES.get(encoding.format, f"GGUF {encoding.format}")
            if encoding.format in FP8:
                kind += " unscaled" if encoding.scale is None else " scaled"
            kind += f", {_use_of(encoding, header, job)}"
        kinds[kind] += 1
    text = "; ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
    again = "; requantizing adds an error, which the run logs in dB" if REQUANTIZED in text else ""
    return f"transformer: {path.name}, one file; weights of its blocks: {text}{again}"


def _use_of(encoding: Encoding, header: Header, job: JobConfig) -> str:
    coat, is_auto = job.coat, job.coat.weight.format == AUTO
    if job.full or not (coat.enabled and coat.weight.use_fp8):
        return f"decoded to {job.train.dtype}"
    row_scales = encoding.scale is not None and prod(header.shapes[encoding.scale]) > 1
    if encoding.format == E4M3_CODES and keeps_codes(coat.linear_config(), row_scales):
        return "used unchanged" + (" where weight.format: auto is e4m3" if is_auto else "")
    return f"{REQUANTIZED} to {'e4m3 or int8' if is_auto else coat.weight.format} while loading"


def base_model(name_or_path: str, extras: str | None) -> str:
    """Source of VAE, text encoders, tokenizers and scheduler; for a lone transformer, its base model."""
    if extras is not None:
        return extras
    path = Path(name_or_path)
    if not (path.suffix.lower() in SUFFIXES and os.path.isfile(path)):
        return name_or_path
    shapes = read_header(path).shapes
    return DEV if any(key.endswith("guidance_in.in_layer.weight") for key in shapes) else SCHNELL
