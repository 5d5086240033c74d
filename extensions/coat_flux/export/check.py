"""Is a saved LoRA complete, effective and loadable? And its exact conversion between key layouts.

Every save is checked on the file itself; a conversion is proved by converting back.

The size of an adapter is the Frobenius norm of scale · up · down: ‖up · down‖² = trace((upᵀ up) (down downᵀ)), two r x
r matrices instead of one [N, K].
"""

from __future__ import annotations

import importlib
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..base.files import replacing
from ..blocks.models import Family
from .layouts import (
    DTYPES,
    LAYOUTS,
    PREFIXES,
    ExportError,
    Pair,
    family_of,
    fuse_all,
    height_of,
    layout_of,
    naming,
    place_of,
    read_file,
    read_pairs,
    split_all,
    write_pairs,
)

TEXT_ENCODERS = ("lora_te", "text_encoder")  # prefixes of other models' adapters
STALE_HASHES = ("sshs_model_hash", "sshs_legacy_hash")  # metadata: of the tensors before a conversion


class ExportReport:
    """Contents of a LoRA file's tensors, which are checked; error messages name no file.

    Attributes:
        programs: that load it.
        refusals: program → why it does not load it.
        largest: the adapter of largest norm, `largest_norm`.
        idle: adapters that change nothing.
        others: tensors of text encoders, which are not checked.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.others = sum(key.startswith(TEXT_ENCODERS) for key in tensors)
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
        self.idle = [module for module, norm in norms.items() if norm == 0]
        self.layers = len(pairs)
        self.ranks = sorted({pair.rank for pair in pairs.values()})
        self.dtypes = sorted({DTYPES[pair.down.dtype] for pair in pairs.values()})
        self.refusals: dict[str, str] = {}
        why = _diffusers_refusal(tensors, pairs if layout == "diffusers" else split_all(pairs), family)
        if why is not None:
            self.refusals["diffusers"] = why
            if layout == "diffusers" and not why.startswith("not checked"):
                raise ExportError(f"diffusers does not load it: {why}; install the diffusers this was tested with")
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
        return text + "".join(f"; not in {program}: {why}" for program, why in self.refusals.items())


def check_export(path: str | Path, *, expected: Mapping[str, Sequence[int]] | None = None) -> ExportReport:
    """Read a LoRA file back; `expected` has the shape of every tensor by key.

    Raises ExportError if it is unreadable, not FLUX's, not `expected`, not finite or without effect.
    """
    path = Path(path)
    tensors, _ = read_file(path)
    with naming(path):
        odd = [] if expected is None else sorted(tensors.keys() ^ expected.keys())
        if odd:
            state = "missing" if odd[0] in expected else "unexpected"
            raise ExportError(f"{odd[0]} is {state} ({len(odd)} such keys); the save is not what was trained")
        for key, shape in (expected or {}).items():
            if tuple(tensors[key].shape) != tuple(shape):
                shapes = f"{tuple(tensors[key].shape)}, trained was {tuple(shape)}"
                raise ExportError(f"{key} has shape {shapes}; the save is not what was trained")
        return ExportReport(tensors)


def _check_sizes(pairs: Mapping[str, Pair], layout: str, family: Family) -> None:
    sizes: dict[str, set[float]] = {}
    for module, pair in pairs.items():
        linear, part = place_of(module, "diffusers" if layout == "diffusers" else "comfyui", family)
        features = ((pair.up.shape[0], height_of(linear, part)), (pair.down.shape[1], linear.width))
        sizes[module] = {count / units for count, units in features if units}
    counts = Counter(size for hidden in sizes.values() for size in hidden)
    common = counts.most_common(1)[0][0] if counts else 0
    for module, hidden in sizes.items():
        if hidden - {common}:
            pair = pairs[module]
            raise ExportError(
                f"{module}: down {tuple(pair.down.shape)}, up {tuple(pair.up.shape)} do not fit hidden size {common:g} "
                "of most layers; save the LoRA again"
            )


def _delta_norm(module: str, pair: Pair) -> float:
    product, norm = torch.ones(pair.rank, pair.rank, dtype=torch.float64), abs(pair.scale)
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
        product *= (values.t() @ values).double()  # trace(P Q) = sum(P * Q), both symmetric
        norm *= amax
    return norm * math.sqrt(max(float(product.sum()), 0.0))


def _diffusers_refusal(tensors: Mapping[str, Tensor], wanted: Mapping[str, Pair], family: Family) -> str | None:
    """Why the pipeline's `load_lora_weights` would not load the whole file, or None."""
    try:
        mixin = getattr(importlib.import_module("diffusers.loaders"), family.lora_loader)
    except (AttributeError, ImportError) as error:
        return f"not checked, it cannot be imported ({error})"
    try:
        theirs: dict[str, Tensor] = mixin.lora_state_dict(dict(tensors))
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if not text:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = last.line or ""
        return f"it refuses the file ({type(error).__name__}: {text[:200]})"
    for module, pair in wanted.items():
        for name, matrix, dim in (("lora_A", pair.down, 1), ("lora_B", pair.up, 0)):
            tensor = theirs.get(f"{PREFIXES['diffusers']}{module}.{name}.weight")
            if tensor is None:
                return f"it drops {module} without a word"
            if tensor.shape[dim] != matrix.shape[dim]:
                return f"it reads {module}.{name} as {tuple(tensor.shape)}, not {tuple(matrix.shape)}"
    return None


# --- conversion ---


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
    new = {key: value.contiguous() for key, value in write_pairs(converted, layout).items()}
    metadata = {key: value for key, value in metadata.items() if key not in STALE_HASHES}
    try:
        with replacing(target) as temp:
            save_file(new, temp, metadata | {"format": "pt"})
            written, _ = read_file(temp)
            with naming(target):
                return ExportReport(written)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{target}: cannot be written ({error}); give another --out") from error


def convert_pairs(
    pairs: Mapping[str, Pair], source: str, layout: str, dtype: torch.dtype | None = None
) -> dict[str, Pair]:
    """Adapters in another layout and, if wider, `dtype`; raises ExportError if converting back is not exact."""
    dtypes = {matrix.dtype for pair in pairs.values() for matrix in (pair.down, pair.up)}
    holds_all = dtype is not None and all(torch.promote_types(dtype, own) == dtype for own in dtypes)
    work = _cast(pairs, dtype) if holds_all else pairs
    if source == "diffusers" and layout != "diffusers":
        converted = fuse_all(work)
        back = split_all(converted)
    elif source != "diffusers" and layout == "diffusers":
        converted = _without_scale(split_all(work))
        back = fuse_all(converted)
    else:
        back = converted = _without_scale(work) if layout == "diffusers" else work
    lost = sorted(pairs.keys() ^ back.keys())
    if lost:
        raise ExportError(f"{lost[0]} ({len(lost)} in all): its adapter is all zero and would be lost; leave it out")
    for name, pair in pairs.items():
        other = back[name]
        down = other.down if other.scale == pair.scale else other.down / pair.scale
        if not (torch.equal(pair.down, down.to(pair.down.dtype)) and torch.equal(pair.up, other.up.to(pair.up.dtype))):
            numbers = f"alpha / rank = {pair.scale:g}, {pair.down.dtype}"
            raise ExportError(f"{name}: converted back it is not the same to the bit ({numbers}); give --dtype float32")
    return converted


def _cast(pairs: Mapping[str, Pair], dtype: torch.dtype | None) -> dict[str, Pair]:
    return {name: Pair(pair.down.to(dtype), pair.up.to(dtype), pair.scale) for name, pair in pairs.items()}


def _without_scale(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    return {name: Pair(pair.down * pair.scale, pair.up, 1.0) for name, pair in pairs.items()}
