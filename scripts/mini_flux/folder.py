"""Writes a FLUX.1 folder in diffusers layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import nn

from coat_flux.mini_flux import MINI_FLUX

Part: TypeAlias = tuple[nn.Module, dict[str, Any]]  # a model of any floating dtype, and what goes into its config.json


def write_flux(folder: Path, *, transformer: Part, vae: Part, clip: Part, t5: Part, t5_tokens: int = 512) -> None:
    """Write weights in bf16, configs, the mini-FLUX's tokenizers and FLUX.1-dev's scheduler into a new folder.

    The text encoders get the tensor names of the published FLUX.1 files. transformers' own `save_pretrained` writes the
    names of the running version, and CLIP's have changed: what 5.23 saves (without `text_model.`) 5.5 loads as missing
    and fills with random weights, with a warning only. `t5_tokens` is the longest prompt.
    """
    folder.mkdir(parents=True)
    for name, (model, config) in {"transformer": transformer, "vae": vae}.items():
        _write_weights(folder / name / "diffusion_pytorch_model.safetensors", model.state_dict())
        write_json(folder / name / "config.json", {"_class_name": type(model).__name__, **config})
    clip_state = {"text_model." + name.removeprefix("text_model."): t for name, t in clip[0].state_dict().items()}
    t5_state = {name: t for name, t in t5[0].state_dict().items() if not name.endswith("embed_tokens.weight")}
    _write_weights(folder / "text_encoder" / "model.safetensors", clip_state)
    _write_weights(folder / "text_encoder_2" / "model.safetensors", t5_state)
    for name, kind, (model, config) in (("text_encoder", "clip_text_model", clip), ("text_encoder_2", "t5", t5)):
        entries = {"architectures": [type(model).__name__], "model_type": kind, "torch_dtype": "bfloat16"}
        write_json(folder / name / "config.json", {**entries, **config})
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(MINI_FLUX / name, folder / name)
    limits = folder / "tokenizer_2" / "tokenizer_config.json"
    write_json(limits, {**json.loads(limits.read_text(encoding="utf-8")), "model_max_length": t5_tokens})
    (folder / "scheduler").mkdir()
    for name in ("model_index.json", "scheduler/scheduler_config.json"):  # as of FLUX.1-dev
        shutil.copyfile(MINI_FLUX / name, folder / name)


def write_json(path: Path, content: object) -> None:
    """Writes `content` as UTF-8 JSON with a final newline, the same bytes on every system."""
    path.write_bytes((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def _write_weights(path: Path, state: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir()
    state = {name: tensor.bfloat16() for name, tensor in state.items() if tensor.is_floating_point()}
    save_file(state, path, metadata={"format": "pt"})
