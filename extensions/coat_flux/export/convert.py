"""Exact conversion of a LoRA file between key layouts, proved by converting back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..base.files import replacing
from .check import ExportReport
from .layouts import (
    LAYOUTS,
    ExportError,
    Pair,
    fuse_all,
    naming,
    read_file,
    read_pairs,
    split_all,
    write_pairs,
)

STALE_HASHES = ("sshs_model_hash", "sshs_legacy_hash")  # metadata: of the tensors before a conversion


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
