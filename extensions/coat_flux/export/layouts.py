"""The key layouts of a FLUX LoRA file.

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight             (PEFT's; what ai-toolkit saves)
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .alpha      (sd-scripts')
    comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight, .alpha  (the checkpoint's own names)

An adapter adds (alpha / rank) · up · down to its linear's weight; up [N, r], down [r, K]. Without an alpha it is the
rank, as both PEFT files without metadata and sd-scripts have it.

A linear of the transformer has two names: diffusers', and that of Black Forest Labs' checkpoint. diffusers splits what
the original fuses (q, k, v, and the MLP's first linear in FLUX.1's single blocks), so one original name stands for one
or more of diffusers'. FLUX.1 and FLUX.2 share original names of linears whose shapes differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import UserError
from ..blocks.models import FAMILIES, FLUX, Family
from ..blocks.models.family import Linear

__all__ = [
    "LAYOUTS",
    "ExportError",
    "Pair",
    "family_of",
    "layout_of",
    "naming",
    "original_linear",
    "place_of",
    "read_file",
    "read_pairs",
    "transformer_part",
    "underscored",
    "write_pairs",
]

PREFIXES = {"diffusers": "transformer.", "kohya": "lora_unet_", "comfyui": "diffusion_model."}
LAYOUTS = tuple(PREFIXES)
TEXT_ENCODERS = ("lora_te", "text_encoder")  # prefixes of adapters that are not the transformer's
NAMED = tuple(family for family in FAMILIES.values() if family.outside)  # whose linears are known under both names
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}
_IN_BLOCK = re.compile(r"(\w+)\.(0|[1-9]\d*)\.(.+)")
_IN_BLOCK_UNDERSCORED = re.compile(rf"({'|'.join(each.original for each in FLUX.lists)})_(0|[1-9]\d*)_.+")


class ExportError(UserError, ValueError):
    """A LoRA file is not what others can load, or cannot be converted; the message says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """One adapter: down [r, K], up [N, r], and the alpha it is scaled with."""

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """What the product of both is multiplied with."""
        return self.alpha / self.rank


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        ExportError: it is missing, torn, or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{path}: cannot be read as safetensors ({error}); give the .safetensors file of a LoRA, "
            "and if it is one, it is damaged: take an earlier save"
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before what goes wrong in the block."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from error


# -- the linears under both names ------------------------------------------------------------------------------------


def place_of(module: str) -> tuple[Linear, int]:
    """The linear, with full names, that diffusers' `module` is a part of, and which part.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for family in NAMED:
        for linear in _candidates(module, family, by_diffusers=True):
            if module in linear.members:
                return linear, linear.members.index(module)
    raise KeyError(module)


def original_linear(name: str, family: Family = FLUX) -> Linear:
    """The linear, with full names, that the original calls `name`; of `family` where several have one.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for each in (family, *NAMED):
        for linear in _candidates(name, each):
            if linear.name == name:
                return linear
    raise KeyError(name)


def underscored(name: str) -> str:
    """The original's name of a linear from its spelling with `_` for every dot.

    Raises:
        KeyError: FLUX has no such linear.
    """
    match = _IN_BLOCK_UNDERSCORED.fullmatch(name)
    for family in NAMED:
        for linear in _candidates(f"{match[1]}.{match[2]}.any" if match else name, family):
            if linear.name.replace(".", "_") == name:
                return linear.name
    raise KeyError(name)


def family_of(pairs: Mapping[str, Pair], layout: str) -> Family:
    """The model of a file's adapters: the one most of them fit; FLUX.1 where that does not tell."""

    def fitting(family: Family) -> int:
        return sum(_fits(name, pair, family, layout) for name, pair in pairs.items())

    return max(NAMED, key=fitting)


def _fits(name: str, pair: Pair, family: Family, layout: str) -> bool:
    for linear in _candidates(name, family, by_diffusers=layout == "diffusers"):
        if layout == "diffusers" and name in linear.members:
            return True
        if layout != "diffusers" and name == linear.name:
            height, width = sum(linear.heights), linear.width
            of_any_size = not (height and width)
            return of_any_size or pair.up.shape[0] * width == pair.down.shape[1] * height
    return False


def _candidates(name: str, family: Family, *, by_diffusers: bool = False) -> Iterator[Linear]:
    """Linears of a family that may have this name: those of the numbered block it is in, and those outside."""
    match = _IN_BLOCK.fullmatch(name)
    for blocks in family.lists:
        if match and match[1] == (blocks.pattern if by_diffusers else blocks.original):
            ours, theirs = f"{blocks.pattern}.{match[2]}", f"{blocks.original}.{match[2]}"
            for linear in blocks.linears:
                members = tuple(f"{ours}.{member}" for member in linear.members)
                yield replace(linear, name=f"{theirs}.{linear.name}", members=members)
    yield from family.outside


# -- adapters under the keys of a layout ------------------------------------------------------------------------------


def transformer_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those of text encoders' adapters."""
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(TEXT_ENCODERS)}


def layout_of(tensors: Mapping[str, Tensor]) -> str:
    """The layout whose prefix all keys have.

    Raises:
        ExportError: none, or there are no keys at all.
    """
    if not tensors:
        raise ExportError("it holds nothing of a transformer; train and save again")
    counts = {layout: sum(key.startswith(prefix) for key in tensors) for layout, prefix in PREFIXES.items()}
    layout = max(counts, key=lambda name: counts[name])
    odd = [key for key in tensors if not key.startswith(PREFIXES[layout])]
    if odd:
        known = ", ".join(f"{prefix}…" for prefix in PREFIXES.values())
        raise ExportError(
            f"{len(odd)} of {len(tensors)} keys are of no known layout ({known}), first {odd[0]!r}; only LoRAs of "
            "a FLUX transformer are understood, all keys in one layout"
        )
    return layout


def read_pairs(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Pair]:
    """Adapters by diffusers' module name (layout diffusers) or the original's (the others), in the file's order.

    Raises:
        ExportError: a key not of an adapter of a FLUX linear, one half missing, or shapes that do not fit together.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, part = _parse(key, layout)
        if part in halves.setdefault(module, {}):
            raise ExportError(f"{key}: there are two {part} matrices of {module}; save the LoRA again")
        halves[module][part] = tensor
    return {module: _pair(module, parts) for module, parts in halves.items()}


def write_pairs(pairs: Mapping[str, Pair], layout: str) -> dict[str, Tensor]:
    """Tensors of a file in a layout, which `read_pairs` reads; diffusers' has no alpha: the scale must be 1."""
    tensors: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        name = PREFIXES[layout] + (module.replace(".", "_") if layout == "kohya" else module)
        if layout == "diffusers":
            tensors |= {f"{name}.lora_A.weight": pair.down, f"{name}.lora_B.weight": pair.up}
        else:
            tensors |= {f"{name}.lora_down.weight": pair.down, f"{name}.lora_up.weight": pair.up}
            # fp32: in bf16 an alpha above 256 would be rounded, and with it the LoRA's strength
            tensors[f"{name}.alpha"] = torch.tensor(pair.alpha, dtype=torch.float32)
    return tensors


def _parse(key: str, layout: str) -> tuple[str, str]:
    """Module and part ("down", "up", "alpha") of a key."""
    suffix = next((suffix for suffix in _PARTS if key.endswith(f".{suffix}")), None)
    if suffix is None:
        raise ExportError(f"{key}: ends in none of {', '.join(_PARTS)}; only plain LoRA is understood")
    name = key.removeprefix(PREFIXES[layout]).removesuffix(f".{suffix}")
    try:
        if layout == "diffusers":
            place_of(name)
        else:
            name = original_linear(underscored(name) if layout == "kohya" else name).name
    except KeyError as error:
        raise ExportError(f"{key}: FLUX has no such linear; it would be ignored by what loads the file") from error
    return name, _PARTS[suffix]


def _pair(module: str, parts: Mapping[str, Tensor]) -> Pair:
    missing = [part for part in ("down", "up") if part not in parts]
    if missing:
        raise ExportError(f"{module}: its {missing[0]} matrix is missing; save the LoRA again")
    down, up = parts["down"], parts["up"]
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or down.shape[0] == 0:
        raise ExportError(
            f"{module}: down {tuple(down.shape)} and up {tuple(up.shape)}: must be [r, K] and [N, r]; "
            "save the LoRA again"
        )
    odd = {down.dtype, up.dtype} - DTYPES
    if odd:
        raise ExportError(f"{module}: {odd.pop()}: must be float16, bfloat16 or float32; set save.dtype and save again")
    if "alpha" not in parts:
        return Pair(down, up, float(down.shape[0]))
    alpha = float(parts["alpha"]) if parts["alpha"].numel() == 1 else math.nan
    if not math.isfinite(alpha) or alpha <= 0:
        raise ExportError(f"{module}: alpha={parts['alpha'].tolist()}: must be one number above 0")
    return Pair(down, up, alpha)
