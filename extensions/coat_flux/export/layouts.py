"""The key layouts of a FLUX LoRA file.

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight             (PEFT's; what ai-toolkit saves)
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .alpha      (sd-scripts')
    comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight, .alpha  (the checkpoint's own names)

An adapter adds (alpha / rank) · up · down to its linear's weight; up [N, r], down [r, K]; alpha defaults to the rank.

A linear of the transformer has two names: diffusers', and that of Black Forest Labs' checkpoint, whose fused linears
diffusers splits. FLUX.1 and FLUX.2 share original names of linears whose shapes differ.

A fused linear's weight is its parts' weights stacked. Parts with separate adapters become one with a block-diagonal up
matrix, of the sum of the ranks:

    | up_q              |   | down_q |
    |      up_k         | · | down_k |        a part without an adapter is a block of zeros
    |           up_v    |   | down_v |

diffusers recognizes this form (sd-scripts' networks/convert_flux_lora.py). Parts that share one down matrix (split from
a fused adapter) keep it: their ups are stacked. Nothing is rounded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..base.errors import UserError
from ..blocks.models import FAMILIES, FLUX, Family
from ..blocks.models.family import Linear

PREFIXES = {"diffusers": "transformer.", "kohya": "lora_unet_", "comfyui": "diffusion_model."}
LAYOUTS = tuple(PREFIXES)
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}
Place = tuple[Family, Linear, int | None]  # a linear by its full names, and the index of its part; None: all of it
_NUMBER = re.compile(r"(?<=blocks[._])(?:0|[1-9]\d*)(?=[._])")


class ExportError(UserError, ValueError):
    """A LoRA file that others cannot load, or that cannot be converted."""


@dataclass(frozen=True)
class Pair:
    """One adapter: down [r, K], up [N, r], and scale = alpha / r."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]


# --- the linears under both names ---


# layout → name with # for a block's number → the linears of that name, FLUX.1's first
_NAMES: dict[str, dict[str, list[Place]]] = {layout: {} for layout in LAYOUTS}
for _family in FAMILIES.values():
    _linears = list(_family.outside)
    for _blocks in _family.lists:
        _linears += [each.within(f"{_blocks.pattern}.#", f"{_blocks.original}.#") for each in _blocks.linears]
    for _linear in _linears:
        for _part, _member in enumerate(_linear.members):
            _NAMES["diffusers"].setdefault(_member, []).append((_family, _linear, _part))
        _NAMES["comfyui"].setdefault(_linear.name, []).append((_family, _linear, None))
        _NAMES["kohya"].setdefault(_linear.name.replace(".", "_"), []).append((_family, _linear, None))


def place_of(name: str, layout: str = "diffusers", family: Family | None = None) -> tuple[Linear, int | None]:
    """The linear that a layout calls `name`, and which part of it (None: all); raises KeyError.

    Of `family`, if several have one.
    """
    number = _NUMBER.search(name)
    places = _NAMES[layout][_NUMBER.sub("#", name, count=1)]
    _, linear, part = next((place for place in places if place[0] is family), places[0])
    return linear if number is None else linear.numbered(number[0]), part


def height_of(linear: Linear, part: int | None) -> int:
    """Output features in units of the hidden size; 0: another size."""
    return sum(linear.heights) if part is None else linear.heights[part]


def family_of(pairs: Mapping[str, Pair], layout: str) -> Family:
    """The model that most of a file's adapters fit; FLUX.1 if undecided."""
    counts = Counter({FLUX.transformer: 0})
    for name, pair in pairs.items():
        for family, linear, part in _NAMES[layout][_NUMBER.sub("#", name, count=1)]:
            height, width = height_of(linear, part), linear.width
            of_any_size = layout == "diffusers" or not (height and width)
            fits = of_any_size or pair.up.shape[0] * width == pair.down.shape[1] * height
            counts[family.transformer] += fits
    return FAMILIES[max(counts, key=counts.__getitem__)]


# --- files ---


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; raises ExportError."""
    if path.is_dir():
        raise ExportError(f"{path}: is a folder; give the .safetensors file of a LoRA in it")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{path}: cannot be read as safetensors ({error}); give the .safetensors file of a LoRA, or an earlier save"
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix errors inside the block with the file's name."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from error


def layout_of(tensors: Mapping[str, Tensor]) -> str:
    """The layout whose prefix all keys have; raises ExportError."""
    if not tensors:
        raise ExportError("it holds nothing of a transformer; save it again")
    counts = {layout: sum(key.startswith(prefix) for key in tensors) for layout, prefix in PREFIXES.items()}
    layout = max(counts, key=lambda name: counts[name])
    odd = [key for key in tensors if not key.startswith(PREFIXES[layout])]
    if odd:
        known = ", ".join(f"{prefix}…" for prefix in PREFIXES.values())
        raise ExportError(
            f"{len(odd)} of {len(tensors)} keys are of no known layout ({known}), first {odd[0]!r}; give a LoRA of a "
            "FLUX transformer, all keys in one layout"
        )
    return layout


def read_pairs(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Pair]:
    """Adapters by diffusers' module name, or the original's in other layouts; raises ExportError."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in PARTS if key.endswith(f".{suffix}")), None)
        if suffix is None:
            raise ExportError(f"{key}: ends in none of {', '.join(PARTS)}; only plain LoRA is understood")
        name, part = key.removeprefix(PREFIXES[layout]).removesuffix(f".{suffix}"), PARTS[suffix]
        try:
            linear, _ = place_of(name, layout)
        except KeyError as error:
            raise ExportError(f"{key}: FLUX has no such linear; leave it out") from error
        name = name if layout == "diffusers" else linear.name
        if part in halves.setdefault(name, {}):
            raise ExportError(f"{key}: there are two {part} matrices of {name}; save the LoRA again")
        halves[name][part] = tensor
    pairs = {}
    for name, parts in halves.items():
        missing = [part for part in ("down", "up") if part not in parts]
        if missing:
            raise ExportError(f"{name}: its {missing[0]} matrix is missing; save the LoRA again")
        down, up = parts["down"], parts["up"]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or down.shape[0] == 0:
            shapes = f"down {tuple(down.shape)} and up {tuple(up.shape)}"
            raise ExportError(f"{name}: {shapes}: must be [r, K] and [N, r]; save the LoRA again")
        unknown = {down.dtype, up.dtype} - DTYPES.keys()
        if unknown:
            raise ExportError(f"{name}: {unknown.pop()}: must be float16, bfloat16 or float32; set save.dtype")
        alpha = parts.get("alpha", torch.tensor(float(down.shape[0])))
        if alpha.numel() != 1 or not 0 < float(alpha) < math.inf:
            raise ExportError(f"{name}: alpha={alpha.tolist()}: must be one number above 0")
        pairs[name] = Pair(down, up, float(alpha) / down.shape[0])
    return pairs


def write_pairs(pairs: Mapping[str, Pair], layout: str) -> dict[str, Tensor]:
    """Tensors of a file in a layout; diffusers' has no alpha: the scale must be 1."""
    tensors: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        name = PREFIXES[layout] + (module.replace(".", "_") if layout == "kohya" else module)
        if layout == "diffusers":
            tensors |= {f"{name}.lora_A.weight": pair.down, f"{name}.lora_B.weight": pair.up}
        else:
            tensors |= {f"{name}.lora_down.weight": pair.down, f"{name}.lora_up.weight": pair.up}
            # fp32: bf16 would round an alpha above 256
            tensors[f"{name}.alpha"] = torch.tensor(pair.scale * pair.rank, dtype=torch.float32)
    return tensors


# --- adapters of fused linears, and of their parts ---


def fuse_all(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Adapters by the original's names in place of diffusers'; raises ExportError if parts differ in rank or scale."""
    grouped: dict[str, tuple[Linear, list[Pair | None]]] = {}
    for module, pair in pairs.items():
        linear, index = place_of(module)
        _, members = grouped.setdefault(linear.name, (linear, [None] * len(linear.members)))
        members[index] = pair
    return {name: _fuse(linear, members) for name, (linear, members) in grouped.items()}


def _fuse(linear: Linear, members: Sequence[Pair | None]) -> Pair:
    present = [pair for pair in members if pair is not None]
    first = present[0]
    if len(members) == 1:
        return _renamed(linear, first)
    if {pair.scale for pair in present} != {first.scale} or {pair.rank for pair in present} != {first.rank}:
        raise ExportError(
            f"{linear.name}: its parts have ranks {[pair.rank for pair in present]} and alpha / rank "
            f"{[pair.scale for pair in present]}, which must be equal; train with one rank"
        )
    heights = _heights(linear, {i: pair.up.shape[0] for i, pair in enumerate(members) if pair is not None})
    if len(present) == len(members) and all(torch.equal(pair.down, first.down) for pair in present):
        up = torch.cat([pair.up for pair in present])
        if not _is_block_diagonal(up, heights):
            return Pair(first.down, up, first.scale)
    rank = first.rank
    down = torch.cat([torch.zeros_like(first.down) if pair is None else pair.down for pair in members])
    up = first.up.new_zeros(sum(heights), rank * len(members))
    for i, (pair, rows) in enumerate(zip(members, up.split(heights), strict=True)):
        if pair is not None:
            rows[:, i * rank : (i + 1) * rank] = pair.up
    return Pair(down, up, first.scale)


def split_all(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Adapters by diffusers' names in place of the original's; raises ExportError if a height fits no hidden size."""
    split: dict[str, Pair] = {}
    family = family_of(pairs, "comfyui")
    for name, pair in pairs.items():
        linear, _ = place_of(name, "comfyui", family)
        members = linear.members
        if len(members) == 1:
            split[members[0]] = _renamed(linear, pair)
            continue
        heights = _heights(linear, {None: pair.up.shape[0]})
        rows = pair.up.split(heights)
        if not _is_block_diagonal(pair.up, heights):
            for member, up in zip(members, rows, strict=True):
                split[member] = Pair(pair.down.clone(), up.clone(), pair.scale)
            continue
        rank = pair.rank // len(members)
        for i, (member, down, up) in enumerate(zip(members, pair.down.split(rank), rows, strict=True)):
            up = up[:, i * rank : (i + 1) * rank].contiguous()
            if down.any() or up.any():
                split[member] = Pair(down, up, pair.scale)
    return split


def _renamed(linear: Linear, pair: Pair) -> Pair:
    """The adapter of a linear that is not fused, under its other name."""
    if not linear.swapped:
        return pair
    first, second = pair.up.chunk(2)
    return replace(pair, up=torch.cat([second, first]))


def _heights(linear: Linear, known: Mapping[int | None, int]) -> list[int]:
    """Output features of all parts, from known ones (None: of all together)."""
    units = {i: sum(linear.heights) if i is None else linear.heights[i] for i in known}
    sizes = {rows / units[i] for i, rows in known.items()}
    size = min(sizes)
    if len(sizes) > 1 or not size.is_integer():
        raise ExportError(
            f"{linear.name}: {sorted(known.values())} output features are not in the ratio {linear.heights}; give a "
            "LoRA of a FLUX transformer"
        )
    return [int(size) * height for height in linear.heights]


def _is_block_diagonal(up: Tensor, heights: list[int]) -> bool:
    count = len(heights)
    if up.shape[1] % count:
        return False
    rank = up.shape[1] // count
    others = ((rows[:, : i * rank], rows[:, (i + 1) * rank :]) for i, rows in enumerate(up.split(heights)))
    return not any(block.any() for pair in others for block in pair)
