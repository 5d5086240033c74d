"""The key layouts of a FLUX LoRA file, and the programs that read them.

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight             (PEFT's; what ai-toolkit saves)
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .alpha      (sd-scripts')
    comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight, .alpha  (the checkpoint's own names)

An adapter adds (alpha / rank) · up · down to its linear's weight; up [N, r], down [r, K]. Without an alpha it is the
rank, as both PEFT files without metadata and sd-scripts have it.

A linear of the transformer has two names: diffusers', and that of Black Forest Labs' checkpoint. diffusers splits what
the original fuses (q, k, v, and the MLP's first linear in FLUX.1's single blocks), so one original name stands for one
or more of diffusers'. FLUX.1 and FLUX.2 share original names of linears whose shapes differ. Heights and widths are in
units of the model's hidden size d; 0: another size.

Source: diffusers' scripts/convert_flux_to_diffusers.py and its transformer_flux.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import UserError
from ..blocks.architectures import FLUX, FLUX2, Architecture
from ..blocks.original_names import OriginalLinear

__all__ = [
    "LAYOUTS",
    "READERS",
    "ExportError",
    "Pair",
    "family_of",
    "is_flux2",
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

# Programs besides diffusers, whose own loader is asked (check.py), and the layouts they read.
# ComfyUI: comfy/lora.py, model_lora_keys_unet: every weight as `diffusion_model.<name>` and `lora_unet_<name with _>`,
#     and for Flux `transformer.<diffusers' name>` through comfy/utils.py, flux_to_diffusers (asked for in issue 4202).
# ai-toolkit: toolkit/network_mixins.py, load_weights: peft_format, which FLUX sets, renames lora_A and lora_B only.
# sd-scripts: networks/lora_flux.py, load_weights looks modules up by LORA_PREFIX_FLUX = "lora_unet"; its
#     networks/convert_flux_lora.py exists because it reads no other.
READERS = {
    "diffusers": ("ComfyUI", "ai-toolkit"),
    "kohya": ("ComfyUI", "sd-scripts"),
    "comfyui": ("ComfyUI",),
}
# of FLUX.2 ComfyUI and ai-toolkit have the original's names only
READERS_OF_FLUX2 = {**READERS, "diffusers": (), "kohya": ("ComfyUI",)}

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}


class ExportError(UserError, ValueError):
    """A LoRA file is not what others can load, or cannot be converted; the message says why and what to do."""


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


FAMILIES = (FLUX, FLUX2)
_IN_BLOCK = re.compile(r"(\w+)\.(0|[1-9]\d*)\.(.+)")
_IN_BLOCK_UNDERSCORED = re.compile(rf"({'|'.join(each.original for each in FLUX.lists)})_(0|[1-9]\d*)_(.+)")


def place_of(module: str) -> tuple[OriginalLinear, int]:
    """The linear that diffusers' `module` is a part of, and which part.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for family in FAMILIES:
        for linear in _candidates(module, family, ours=True):
            if module in linear.members:
                return linear, linear.members.index(module)
    raise KeyError(module)


def original_linear(name: str, family: Architecture = FLUX) -> OriginalLinear:
    """The linear of this original name.

    Args:
        name: in full.
        family: whose linear is meant where both have one of this name: FLUX or FLUX2.

    Raises:
        KeyError: FLUX has no such linear.
    """
    for found in (family, *FAMILIES):
        for linear in _candidates(name, found, ours=False):
            if linear.name == name:
                return linear
    raise KeyError(name)


def family_of(pairs: Mapping[str, Pair]) -> Architecture:
    """The model of adapters by original names: FLUX2 where one of them fits a linear of it and none of FLUX.1."""
    for name, pair in pairs.items():
        fits = [family for family in FAMILIES if any(_fits(linear, name, pair) for linear in _candidates(name, family))]
        if fits == [FLUX2]:
            return FLUX2
    return FLUX


def _fits(linear: OriginalLinear, name: str, pair: Pair) -> bool:
    height, width = sum(linear.heights), linear.width
    of_any_size = not (height and width)
    return linear.name == name and (of_any_size or pair.up.shape[0] * width == pair.down.shape[1] * height)


def is_flux2(modules: Iterable[str]) -> bool:
    """Whether these linears, by diffusers' names, are FLUX.2's and not FLUX.1's; False where both have them all."""
    return any(
        not any(module in linear.members for linear in _candidates(module, FLUX, ours=True)) for module in modules
    )


def underscored(name: str) -> str:
    """The original's name of a linear from its spelling with `_` for every dot.

    Raises:
        KeyError: FLUX has no such linear.
    """
    found = _IN_BLOCK_UNDERSCORED.fullmatch(name)
    block, rest = (f"{found[1]}.{found[2]}.", found[3]) if found else ("", name)
    for family in FAMILIES:
        table = next((each.linears for each in family.lists if found and found[1] == each.original), family.outside)
        for linear in table:
            if linear.name.replace(".", "_") == rest:
                return block + linear.name
    raise KeyError(name)


def _candidates(name: str, family: Architecture, *, ours: bool = False) -> Iterator[OriginalLinear]:
    found = _IN_BLOCK.fullmatch(name)
    for blocks in family.lists:
        if found and found[1] == (blocks.pattern if ours else blocks.original):
            places = f"{blocks.pattern}.{found[2]}", f"{blocks.original}.{found[2]}"
            yield from (linear.within(*places) for linear in blocks.linears)
    yield from family.outside


# -- adapters under the keys of a layout ------------------------------------------------------------------------------


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
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, part = _parse(key, layout)
        if part in found.setdefault(module, {}):
            raise ExportError(f"{key}: there are two {part} matrices of {module}; save the LoRA again")
        found[module][part] = tensor
    return {module: _pair(module, parts) for module, parts in found.items()}


def write_pairs(pairs: Mapping[str, Pair], layout: str) -> dict[str, Tensor]:
    """Tensors of a file in a layout, which `read_pairs` reads; diffusers' has no alpha: the scale must be 1."""
    tensors: dict[str, Tensor] = {}
    prefix = PREFIXES[layout]
    for module, pair in pairs.items():
        name = prefix + (module.replace(".", "_") if layout == "kohya" else module)
        if layout == "diffusers":
            tensors |= {f"{name}.lora_A.weight": pair.down, f"{name}.lora_B.weight": pair.up}
        else:
            # fp32: in bf16 an alpha above 256 would be rounded, and with it the LoRA's strength
            alpha = torch.tensor(pair.alpha, dtype=torch.float32)
            tensors |= {
                f"{name}.lora_down.weight": pair.down,
                f"{name}.lora_up.weight": pair.up,
                f"{name}.alpha": alpha,
            }
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
    alpha = float(parts["alpha"]) if "alpha" in parts and parts["alpha"].numel() == 1 else None
    if "alpha" in parts and (alpha is None or not math.isfinite(alpha) or alpha <= 0):
        raise ExportError(f"{module}: alpha={parts['alpha'].tolist()}: must be one number above 0")
    return Pair(down, up, float(down.shape[0]) if alpha is None else alpha)
