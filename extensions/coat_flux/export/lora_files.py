"""LoRA files of FLUX: the key layouts of other programs, the check after every save, and the exact conversion.

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight             (PEFT's; what ai-toolkit saves)
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .alpha      (sd-scripts')
    comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight, .alpha  (the checkpoint's own names)

An adapter adds (alpha / rank) · up · down to its linear's weight; up [N, r], down [r, K]; alpha defaults to the rank.
Its delta norm is the Frobenius norm of that: ‖up · down‖² = trace((upᵀ up) (down downᵀ)) has two r x r matrices instead
of one [N, K].

A linear of the transformer has two names: diffusers', and the original one of Black Forest Labs' checkpoint, whose
fused linears diffusers splits into parts. FLUX.1 and FLUX.2 share original names of linears whose shapes differ.

A fused linear's weight is its parts' weights stacked. The adapters of its parts become one adapter, whose rank is the
sum of theirs and whose up matrix is block-diagonal:

    | up_q              |   | down_q |
    |      up_k         | · | down_k |        a part without an adapter is a block of zeros
    |           up_v    |   | down_v |

diffusers recognizes this form (sd-scripts' networks/convert_flux_lora.py). Parts that share one down matrix (split from
a fused adapter) keep it: their ups are stacked. Nothing is rounded, and a conversion is proved by converting back.
"""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..base.errors import UserError
from ..base.files import replacing
from ..blocks.models import FAMILIES, FLUX, Family
from ..blocks.models.family import Linear

PREFIXES = {"diffusers": "transformer.", "kohya": "lora_unet_", "comfyui": "diffusion_model."}
LAYOUTS = tuple(PREFIXES)
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
SUFFIXES = {  # end of a key → what its tensor is
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}
Place = tuple[Family, Linear, int | None]  # a linear with its full names, and the index of a part or None: all of it
_NUMBER = re.compile(r"(?<=blocks[._])(?:0|[1-9]\d*)(?=[._])")  # of a block, in a name


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


# layout → name with # for a block's number → places of that name, FLUX.1's first
_NAMES: dict[str, dict[str, list[Place]]] = {layout: {} for layout in LAYOUTS}
for _family in FAMILIES.values():
    _linears = list(_family.outside)
    for _blocks in _family.lists:
        for _linear in _blocks.linears:
            _members = tuple(f"{_blocks.pattern}.#.{name}" for name in _linear.members)
            _linears.append(replace(_linear, name=f"{_blocks.original}.#.{_linear.name}", members=_members))
    for _linear in _linears:
        for _part, _member in enumerate(_linear.members):
            _NAMES["diffusers"].setdefault(_member, []).append((_family, _linear, _part))
        _NAMES["comfyui"].setdefault(_linear.name, []).append((_family, _linear, None))
        _NAMES["kohya"].setdefault(_linear.name.replace(".", "_"), []).append((_family, _linear, None))


def place_of(name: str, layout: str = "diffusers", family: Family | None = None) -> tuple[Linear, int | None]:
    """The linear, of `family` if several have one, and its part that a layout calls `name`; raises KeyError."""
    number = _NUMBER.search(name)
    places = _NAMES[layout][_NUMBER.sub("#", name, count=1)]
    _, linear, part = next((place for place in places if place[0] is family), places[0])
    if number is None:
        return linear, part
    members = tuple(member.replace("#", number[0]) for member in linear.members)
    return replace(linear, name=linear.name.replace("#", number[0]), members=members), part


def height_of(linear: Linear, part: int | None) -> int:
    """Output features in units of the hidden size; 0: another size."""
    return sum(linear.heights) if part is None else linear.heights[part]


def family_of(pairs: Mapping[str, Pair], layout: str) -> Family:
    """The model that most of a file's adapters fit; FLUX.1 if undecided."""
    counts = Counter({FLUX.transformer: 0})  # the first of equal counts is taken
    for name, pair in pairs.items():
        for family, linear, part in _NAMES[layout][_NUMBER.sub("#", name, count=1)]:
            height, width = height_of(linear, part), linear.width
            any_size = layout == "diffusers" or not (height and width)
            if any_size or pair.up.shape[0] * width == pair.down.shape[1] * height:
                counts[family.transformer] += 1
    return FAMILIES[max(counts, key=counts.__getitem__)]


# --- files ---


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; raises ExportError."""
    if path.is_dir():
        raise ExportError(f"{path}: is a folder; give the .safetensors file of a LoRA in it")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, dict(file.metadata() or {})
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
    others = [key for key in tensors if not key.startswith(PREFIXES[layout])]
    if others:
        known = ", ".join(f"{prefix}…" for prefix in PREFIXES.values())
        raise ExportError(
            f"{len(others)} of {len(tensors)} keys are of no known layout ({known}), first {others[0]!r}; give a LoRA "
            "of a FLUX transformer, all keys in one layout"
        )
    return layout


def read_pairs(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Pair]:
    """Adapters by diffusers' module name, or the original's in other layouts; raises ExportError."""
    grouped: dict[str, dict[str, Tensor]] = {}  # name of a linear → its "down", "up" and "alpha"
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in SUFFIXES if key.endswith(f".{suffix}")), None)
        if suffix is None:
            raise ExportError(f"{key}: ends in none of {', '.join(SUFFIXES)}; only plain LoRA is understood")
        name = key.removeprefix(PREFIXES[layout]).removesuffix(f".{suffix}")
        try:
            linear, _ = place_of(name, layout)
        except KeyError as error:
            raise ExportError(f"{key}: FLUX has no such linear; leave it out") from error
        if layout != "diffusers":
            name = linear.name
        kind = SUFFIXES[suffix]
        if kind in grouped.setdefault(name, {}):
            raise ExportError(f"{key}: there are two {kind} matrices of {name}; save the LoRA again")
        grouped[name][kind] = tensor
    pairs = {}
    for name, adapter in grouped.items():
        missing = [kind for kind in ("down", "up") if kind not in adapter]
        if missing:
            raise ExportError(f"{name}: its {missing[0]} matrix is missing; save the LoRA again")
        down, up = adapter["down"], adapter["up"]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or down.shape[0] == 0:
            shapes = f"down {tuple(down.shape)} and up {tuple(up.shape)}"
            raise ExportError(f"{name}: {shapes}: must be [r, K] and [N, r]; save the LoRA again")
        unknown = {down.dtype, up.dtype} - DTYPES.keys()
        if unknown:
            raise ExportError(f"{name}: {unknown.pop()}: must be float16, bfloat16 or float32; set save.dtype")
        alpha = adapter.get("alpha", torch.tensor(float(down.shape[0])))
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
        linear, part = place_of(module)
        _, parts = grouped.setdefault(linear.name, (linear, [None] * len(linear.members)))
        parts[part] = pair
    return {name: _fuse(linear, parts) for name, (linear, parts) in grouped.items()}


def _fuse(linear: Linear, parts: Sequence[Pair | None]) -> Pair:
    present = [pair for pair in parts if pair is not None]
    first = present[0]
    if len(parts) == 1:
        return _reordered(linear, first)
    if {pair.scale for pair in present} != {first.scale} or {pair.rank for pair in present} != {first.rank}:
        raise ExportError(
            f"{linear.name}: its parts have ranks {[pair.rank for pair in present]} and alpha / rank "
            f"{[pair.scale for pair in present]}, which must be equal; train with one rank"
        )
    heights = _heights(linear, {i: pair.up.shape[0] for i, pair in enumerate(parts) if pair is not None})
    if len(present) == len(parts) and all(torch.equal(pair.down, first.down) for pair in present):
        up = torch.cat([pair.up for pair in present])
        if not _is_block_diagonal(up, heights):  # else `split_all` would take it for the other form
            return Pair(first.down, up, first.scale)
    rank = first.rank
    down = torch.cat([torch.zeros_like(first.down) if pair is None else pair.down for pair in parts])
    up = first.up.new_zeros(sum(heights), rank * len(parts))
    for i, (pair, rows) in enumerate(zip(parts, up.split(heights), strict=True)):
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
            split[members[0]] = _reordered(linear, pair)
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


def _reordered(linear: Linear, pair: Pair) -> Pair:
    """The adapter of a linear that is not fused, for its other name, where the output's halves may be swapped."""
    if not linear.swapped:
        return pair
    first, second = pair.up.chunk(2)
    return replace(pair, up=torch.cat([second, first]))


def _heights(linear: Linear, known: Mapping[int | None, int]) -> list[int]:
    """Output features of all parts, from those of some (part → features, None: of all together)."""
    hidden_sizes = {features / height_of(linear, part) for part, features in known.items()}
    hidden = min(hidden_sizes)
    if len(hidden_sizes) > 1 or not hidden.is_integer():
        raise ExportError(
            f"{linear.name}: {sorted(known.values())} output features are not in the ratio {linear.heights}; give a "
            "LoRA of a FLUX transformer"
        )
    return [int(hidden) * height for height in linear.heights]


def _is_block_diagonal(up: Tensor, heights: list[int]) -> bool:
    if up.shape[1] % len(heights):
        return False
    rank = up.shape[1] // len(heights)
    for i, rows in enumerate(up.split(heights)):
        if rows[:, : i * rank].any() or rows[:, (i + 1) * rank :].any():
            return False
    return True


# --- the check ---

TEXT_ENCODERS = ("lora_te", "text_encoder")  # prefixes of other models' adapters


class ExportReport:
    """Checks the tensors of a LoRA file and describes them; ExportError without the file's name."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.others = sum(key.startswith(TEXT_ENCODERS) for key in tensors)  # not checked
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(TEXT_ENCODERS)}
        self.layout = layout = layout_of(tensors)
        pairs = read_pairs(tensors, layout)
        family = family_of(pairs, "diffusers" if layout == "diffusers" else "comfyui")
        _check_sizes(pairs, layout, family)
        norms = {module: _delta_norm(module, pair) for module, pair in pairs.items()}
        largest = max(norms, key=lambda module: norms[module])
        self.largest = PREFIXES["diffusers"] + largest if layout == "diffusers" else largest
        self.largest_norm = norms[largest]
        if self.largest_norm == 0:
            raise ExportError(
                f"all {len(pairs)} adapters are zero: this LoRA has no effect; was anything trained? check train.lr"
            )
        self.idle = [module for module, norm in norms.items() if norm == 0]  # without effect
        self.layers = len(pairs)
        self.ranks = sorted({pair.rank for pair in pairs.values()})
        self.dtypes = sorted({DTYPES[pair.down.dtype] for pair in pairs.values()})
        self.refusals: dict[str, str] = {}  # program → why it does not load the file
        reason = _diffusers_refusal(tensors, pairs if layout == "diffusers" else split_all(pairs), family)
        if reason is not None:
            self.refusals["diffusers"] = reason
            if layout == "diffusers" and not reason.startswith("not checked"):
                raise ExportError(f"diffusers does not load it: {reason}; install the diffusers this was tested with")
        programs = ["diffusers", *family.programs[layout]]
        if "ai-toolkit" in programs and any(pair.scale != 1 for pair in pairs.values()):
            self.refusals["ai-toolkit"] = "it ignores alpha; convert with --to diffusers"
        if "sd-scripts" in programs and any(module.startswith("final_layer.") for module in pairs):
            self.refusals["sd-scripts"] = "it has no adapters in the final layer"
        self.programs = [program for program in programs if program not in self.refusals]

    def line(self) -> str:
        """One line for the log."""
        rank = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        facts = f"{self.layers} layers, {rank}, {'/'.join(self.dtypes)}"
        largest = f"largest delta norm {self.largest_norm:.2g} in {self.largest}"
        text = f"loads in: {', '.join(self.programs)} ({facts}, {largest})"
        if self.idle:
            text += f"; {len(self.idle)} layers change nothing, first {self.idle[0]}"
        if self.others:
            text += f"; {self.others} tensors of text encoders are not checked"
        return text + "".join(f"; not in {program}: {reason}" for program, reason in self.refusals.items())


def check_export(path: str | Path, *, expected: Mapping[str, Sequence[int]] | None = None) -> ExportReport:
    """Read a LoRA file back; `expected` has the shape of every tensor by key.

    Raises ExportError if it is unreadable, not FLUX's, not `expected`, not finite or without effect.
    """
    path = Path(path)
    tensors, _ = read_file(path)
    with naming(path):
        differing = [] if expected is None else sorted(tensors.keys() ^ expected.keys())
        if differing:
            state = "missing" if differing[0] in expected else "unexpected"
            text = f"{differing[0]} is {state} ({len(differing)} such keys)"
            raise ExportError(f"{text}; the save is not what was trained")
        for key, shape in (expected or {}).items():
            if tuple(tensors[key].shape) != tuple(shape):
                shapes = f"{tuple(tensors[key].shape)}, trained was {tuple(shape)}"
                raise ExportError(f"{key} has shape {shapes}; the save is not what was trained")
        return ExportReport(tensors)


def _check_sizes(pairs: Mapping[str, Pair], layout: str, family: Family) -> None:
    hidden_sizes: dict[str, set[float]] = {}  # of each adapter, by its output and by its input features
    for module, pair in pairs.items():
        linear, part = place_of(module, "diffusers" if layout == "diffusers" else "comfyui", family)
        features = ((pair.up.shape[0], height_of(linear, part)), (pair.down.shape[1], linear.width))
        hidden_sizes[module] = {count / units for count, units in features if units}
    counts = Counter(size for sizes in hidden_sizes.values() for size in sizes)
    common = counts.most_common(1)[0][0] if counts else 0
    for module, sizes in hidden_sizes.items():
        if sizes - {common}:
            pair = pairs[module]
            raise ExportError(
                f"{module}: down {tuple(pair.down.shape)}, up {tuple(pair.up.shape)} do not fit hidden size {common:g} "
                "of most layers; save the LoRA again"
            )


def _delta_norm(module: str, pair: Pair) -> float:
    norm = abs(pair.scale)
    product = torch.ones(pair.rank, pair.rank, dtype=torch.float64)  # upᵀ up * down downᵀ
    for name, matrix in (("up", pair.up), ("down", pair.down.t())):
        values = matrix.float()
        amax = float(values.abs().max())
        if not math.isfinite(amax):
            raise ExportError(
                f"{module}: its {name} matrix holds NaN or infinity; take an earlier save, and lower train.lr, or set "
                "save.dtype to bf16 if fp16 overflowed"
            )
        if amax == 0:
            norm = 0.0
            continue
        values = values / amax  # so that no square underflows
        product *= (values.t() @ values).double()
        norm *= amax
    return norm * math.sqrt(max(float(product.sum()), 0.0))  # trace(P Q) = sum(P * Q), both symmetric


def _diffusers_refusal(tensors: Mapping[str, Tensor], pairs: Mapping[str, Pair], family: Family) -> str | None:
    """Why the pipeline's `load_lora_weights` would not load all of `pairs`, the file's adapters, or None."""
    try:
        mixin = getattr(importlib.import_module("diffusers.loaders"), family.lora_loader)
    except (AttributeError, ImportError) as error:
        return f"not checked, it cannot be imported ({error})"
    try:
        loaded: dict[str, Tensor] = mixin.lora_state_dict(dict(tensors))
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if not text:  # a bare assert: its line
            text = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return f"it refuses the file ({type(error).__name__}: {text[:200]})"
    for module, pair in pairs.items():
        for name, matrix, dim in (("lora_A", pair.down, 1), ("lora_B", pair.up, 0)):
            tensor = loaded.get(f"{PREFIXES['diffusers']}{module}.{name}.weight")
            if tensor is None:
                return f"it drops {module} without a word"
            if tensor.shape[dim] != matrix.shape[dim]:
                return f"it reads {module}.{name} as {tuple(tensor.shape)}, not {tuple(matrix.shape)}"
    return None


# --- conversion ---

STALE_HASHES = ("sshs_model_hash", "sshs_legacy_hash")  # in the metadata: hashes of the unconverted tensors


def convert_file(source: Path, target: Path, layout: str, dtype: torch.dtype | None = None) -> ExportReport:
    """Write a LoRA in another layout, dtype or both, and check it; only a smaller dtype rounds. Raises ExportError."""
    if layout not in LAYOUTS:
        raise ExportError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    if target.exists() and target.samefile(source):
        raise ExportError(f"{target}: is the file to convert; give another --out")
    tensors, metadata = read_file(source)
    with naming(source):
        report = ExportReport(tensors)
        if report.others:
            raise ExportError(f"it holds {report.others} tensors of text encoders, which cannot be converted")
        pairs = read_pairs(tensors, report.layout)
        if report.layout == layout and dtype in (None, *{pair.down.dtype for pair in pairs.values()}):
            raise ExportError(f"it is in the {layout} layout already; give another --to or --dtype")
        converted = convert_pairs(pairs, report.layout, layout, dtype)
    if dtype is not None:
        converted = _cast(converted, dtype)
    tensors = {key: value.contiguous() for key, value in write_pairs(converted, layout).items()}
    metadata = {key: value for key, value in metadata.items() if key not in STALE_HASHES}
    try:
        with replacing(target) as temp:
            save_file(tensors, temp, metadata | {"format": "pt"})
            written, _ = read_file(temp)
            with naming(target):
                return ExportReport(written)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{target}: cannot be written ({error}); give another --out") from error


def convert_pairs(
    pairs: Mapping[str, Pair], source: str, layout: str, dtype: torch.dtype | None = None
) -> dict[str, Pair]:
    """Adapters in another layout and, if wider, `dtype`; raises ExportError if converting back is not exact."""
    fuses = source == "diffusers" and layout != "diffusers"
    splits = source != "diffusers" and layout == "diffusers"
    converted = dict(pairs)
    dtypes = {matrix.dtype for pair in pairs.values() for matrix in (pair.down, pair.up)}
    if dtype is not None and all(torch.promote_types(dtype, narrow) == dtype for narrow in dtypes):
        converted = _cast(pairs, dtype)
    if fuses:
        converted = fuse_all(converted)
    elif splits:
        converted = split_all(converted)
    if layout == "diffusers":  # which has no alpha: down takes the scale
        converted = {name: Pair(pair.down * pair.scale, pair.up, 1.0) for name, pair in converted.items()}

    back = converted
    if fuses:
        back = split_all(converted)
    elif splits:
        back = fuse_all(converted)
    lost = sorted(pairs.keys() ^ back.keys())
    if lost:
        raise ExportError(f"{lost[0]} ({len(lost)} in all): its adapter is all zero and would be lost; leave it out")
    for name, pair in pairs.items():
        down, up = back[name].down, back[name].up
        if back[name].scale != pair.scale:
            down = down / pair.scale
        if not (torch.equal(pair.down, down.to(pair.down.dtype)) and torch.equal(pair.up, up.to(pair.up.dtype))):
            numbers = f"alpha / rank = {pair.scale:g}, {pair.down.dtype}"
            raise ExportError(f"{name}: converted back it is not the same to the bit ({numbers}); give --dtype float32")
    return converted


def _cast(pairs: Mapping[str, Pair], dtype: torch.dtype) -> dict[str, Pair]:
    return {name: Pair(pair.down.to(dtype), pair.up.to(dtype), pair.scale) for name, pair in pairs.items()}
