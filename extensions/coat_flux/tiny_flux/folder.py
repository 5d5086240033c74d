"""Writes the tiny FLUX folder once, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

logger = logging.getLogger(__name__)

MARKER_NAME = "coat_tiny_flux.json"
EMBEDDED_MODEL = "models/coat_tiny_flux"  # how configs name it, below the working directory
TINY_FLUX_VERSION = 1  # raise it whenever a written byte changes: older folders are then made again

_MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.30.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def make_tiny_flux(out_dir: Path | str, seed: int = 0) -> Path:
    """Makes the embedded tiny FLUX.1 in diffusers layout, or finds that it is already there.

    The folder is written beside `out_dir` and renamed, its marker file lists every file with its size: what an
    interrupted run, an older version, another seed or a deleted file left behind is made again.

    Args:
        out_dir: the folder to make, e.g. `models/tiny-flux`.
        seed: of the random weights; the same seed gives the same bytes.

    Returns:
        `out_dir` as an absolute path.

    Raises:
        FileExistsError: `out_dir` exists and was not made by this function; it is left untouched.
    """
    out_dir = Path(out_dir).resolve()
    if _is_complete(out_dir, seed):
        return out_dir
    _refuse_foreign(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        made = Path(scratch) / out_dir.name
        _write(made, seed)
        _put_in_place(made, out_dir, Path(scratch) / "replaced", seed)
    logger.info("made the tiny FLUX model (seed %d) in %s", seed, out_dir)
    return out_dir


def provide_embedded(name_or_path: str) -> None:
    """Make the embedded model if a config's `model.name_or_path` means it and it is not there yet.

    Args:
        name_or_path: a path that ends in `coat_tiny_flux` means it; everything else is left to the loader.
    """
    if Path(name_or_path).name == Path(EMBEDDED_MODEL).name and not Path(name_or_path).exists():
        make_tiny_flux(name_or_path)


def _write(folder: Path, seed: int) -> None:
    """Writes all parts into the new `folder`, the marker last."""
    from . import models
    from .vae import VAE_CONFIG, build_vae
    from .vocabulary import write_clip_tokenizer, write_json, write_t5_tokenizer

    folder.mkdir()
    _write_diffusers(folder / "transformer", models.build_transformer(seed), models.TINY_TRANSFORMER_CONFIG)
    _write_diffusers(folder / "vae", build_vae(), VAE_CONFIG)
    _write_transformers(folder / "text_encoder", models.build_clip(seed), "clip_text_model", models.clip_config())
    _write_transformers(folder / "text_encoder_2", models.build_t5(seed), "t5", models.t5_config())
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **models.FLUX_DEV_SCHEDULER_CONFIG}
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_clip_tokenizer(folder / "tokenizer")
    write_t5_tokenizer(folder / "tokenizer_2")
    write_json(folder / "model_index.json", _MODEL_INDEX)
    write_json(folder / MARKER_NAME, {"version": TINY_FLUX_VERSION, "seed": seed, "files": _file_sizes(folder)})


def _write_diffusers(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    from .vocabulary import write_json

    _write_weights(folder / "diffusion_pytorch_model.safetensors", model.state_dict())
    write_json(folder / "config.json", {"_class_name": type(model).__name__, **config})


def _write_transformers(folder: Path, model: nn.Module, model_type: str, config: dict[str, Any]) -> None:
    """Writes a text encoder with the tensor names of the published FLUX.1 files.

    transformers' own `save_pretrained` writes the names of the running version, and CLIP's have changed: what 5.23
    saves (without `text_model.`) 5.5 loads as missing and fills with random weights, with a warning only.
    """
    from .vocabulary import write_json

    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("embed_tokens.weight")}
    if model_type == "clip_text_model":
        state = {"text_model." + name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    _write_weights(folder / "model.safetensors", state)
    entries = {"architectures": [type(model).__name__], "model_type": model_type, "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", {**entries, **config})


def _write_weights(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Writes floating tensors in bf16, as FLUX.1's are, into a new folder."""
    path.parent.mkdir()
    save_file(
        {name: tensor.bfloat16() for name, tensor in state.items() if tensor.is_floating_point()},
        path,
        metadata={"format": "pt"},
    )


def _file_sizes(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of every file below `folder`, by path relative to it."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*.*"))}


def _is_complete(folder: Path, seed: int) -> bool:
    """Whether `folder` holds every file this version wrote for `seed`, at its full size."""
    marker = folder / MARKER_NAME
    if not marker.is_file():
        return False
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return False
    if (content.get("version"), content.get("seed")) != (TINY_FLUX_VERSION, seed):
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in content["files"].items()
    )


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not (folder / MARKER_NAME).is_file() and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(
            f"out_dir={folder}: must be new, empty or a folder made by make_tiny_flux (has no {MARKER_NAME}); "
            "choose another folder or delete this one"
        )


def _put_in_place(made: Path, out_dir: Path, replaced: Path, seed: int) -> None:
    """Renames `made` to `out_dir`, unless another process has been faster with the same content."""
    if _is_complete(out_dir, seed):
        return
    if out_dir.exists():
        os.replace(out_dir, replaced)
    try:
        os.replace(made, out_dir)
    except OSError:
        if not _is_complete(out_dir, seed):
            raise
