"""Makes the folder of an embedded model once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from ..base.files import replace_folder

logger = logging.getLogger(__name__)

MARKER_NAME = "coat_tiny_flux.json"
EMBEDDED_MODEL = "models/coat_mini_flux"  # how configs name it, below the working directory
MINI_FLUX = Path(__file__).parent / "files"  # made by scripts/pretrain_mini_flux.py
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


class FluxParts(NamedTuple):
    """The parts of a FLUX.1 model whose weights or sizes differ from model to model.

    Attributes:
        transformer, vae, clip, t5: the models, of any floating dtype; written in bf16.
        transformer_config, vae_config, clip_config, t5_config: what goes into the config.json of each.
        t5_tokens: the longest prompt the T5 tokenizer declares, in tokens.
    """

    transformer: nn.Module
    transformer_config: dict[str, Any]
    vae: nn.Module
    vae_config: dict[str, Any]
    clip: nn.Module
    clip_config: dict[str, Any]
    t5: nn.Module
    t5_config: dict[str, Any]
    t5_tokens: int = 512


def make_tiny_flux(out_dir: Path | str, seed: int = 0) -> Path:
    """Makes the tiny FLUX.1 with random weights in diffusers layout, or finds that it is already there.

    The folder is written next to `out_dir` and renamed, its marker file lists every file with its size: what an
    interrupted run, an older version, another seed or a deleted file left behind is written again.

    Args:
        out_dir: the folder to make, e.g. `models/tiny-flux`.
        seed: of the random weights; the same seed gives the same bytes.

    Returns:
        `out_dir` as an absolute path.

    Raises:
        FileExistsError: `out_dir` exists and was not made by this module; it is left untouched.
    """
    return _make(Path(out_dir).resolve(), {"version": TINY_FLUX_VERSION, "seed": seed}, partial(_write, seed=seed))


def make_mini_flux(out_dir: Path | str) -> Path:
    """Copies the mini-FLUX, which draws clothes of 64 pixels, to where a config names it; as `make_tiny_flux`.

    Args:
        out_dir: the folder to make, e.g. `models/coat_mini_flux`.

    Returns:
        `out_dir` as an absolute path.

    Raises:
        FileExistsError: `out_dir` exists and was not made by this module; it is left untouched.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in MINI_FLUX.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    identity = {"mini_flux": digest.hexdigest()}
    return _make(Path(out_dir).resolve(), identity, partial(shutil.copytree, MINI_FLUX))


def provide_embedded(name_or_path: str) -> None:
    """Make the embedded model if a config's `model.name_or_path` means it and it is not there yet.

    Args:
        name_or_path: a path that ends in `coat_mini_flux` means it; everything else is left to the loader.
    """
    if Path(name_or_path).name == Path(EMBEDDED_MODEL).name and not Path(name_or_path).exists():
        make_mini_flux(name_or_path)


def _make(out_dir: Path, identity: dict[str, Any], write: Callable[[Path], object]) -> Path:
    """Let `write` make a folder, unless `out_dir` holds the one with this `identity`, whole."""
    from .vocabulary import write_json

    if _is_complete(out_dir, identity):
        return out_dir
    if out_dir.exists() and not (out_dir / MARKER_NAME).is_file() and (out_dir.is_file() or any(out_dir.iterdir())):
        raise FileExistsError(
            f"out_dir={out_dir}: must be new, empty or a folder made by coat_flux.mini_flux (has no {MARKER_NAME}); "
            "choose another folder or delete this one"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        made = Path(scratch) / out_dir.name
        write(made)
        write_json(made / MARKER_NAME, {**identity, "files": _file_sizes(made)})
        try:
            if not _is_complete(out_dir, identity):
                replace_folder(made, out_dir, Path(scratch) / "replaced")
        except OSError:
            if not _is_complete(out_dir, identity):  # another process has been faster with the same content
                raise
    logger.info("made the embedded FLUX model %s in %s", identity, out_dir)
    return out_dir


def _write(folder: Path, seed: int) -> None:
    """Writes all parts into the new `folder`."""
    from . import models
    from .vae import VAE_CONFIG, build_vae

    parts = FluxParts(
        models.build_transformer(seed),
        models.TINY_TRANSFORMER_CONFIG,
        build_vae(),
        VAE_CONFIG,
        models.build_clip(seed),
        models.clip_config(),
        models.build_t5(seed),
        models.t5_config(),
    )
    write_parts(folder, parts)


def write_parts(folder: Path, parts: FluxParts) -> None:
    """Writes a FLUX.1 folder in diffusers layout: weights in bf16, configs, both tokenizers, FLUX.1-dev's scheduler.

    Args:
        folder: new; made here.
        parts: what it holds.
    """
    from .models import FLUX_DEV_SCHEDULER_CONFIG
    from .vocabulary import write_clip_tokenizer, write_json, write_t5_tokenizer

    folder.mkdir(parents=True)
    _write_diffusers(folder / "transformer", parts.transformer, parts.transformer_config)
    _write_diffusers(folder / "vae", parts.vae, parts.vae_config)
    _write_transformers(folder / "text_encoder", parts.clip, "clip_text_model", parts.clip_config)
    _write_transformers(folder / "text_encoder_2", parts.t5, "t5", parts.t5_config)
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **FLUX_DEV_SCHEDULER_CONFIG}
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_clip_tokenizer(folder / "tokenizer")
    write_t5_tokenizer(folder / "tokenizer_2", parts.t5_tokens)
    write_json(folder / "model_index.json", _MODEL_INDEX)


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


def _is_complete(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether `folder` holds every file of the model with this `identity`, at its full size."""
    marker = folder / MARKER_NAME
    if not marker.is_file():
        return False
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return False
    if {key: value for key, value in content.items() if key != "files"} != identity:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in content["files"].items()
    )
