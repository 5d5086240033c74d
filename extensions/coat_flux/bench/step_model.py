"""From counted launches to modelled milliseconds of a whole step: a table for the console, and count.json.

What is counted: `counted_step`; what a launch costs: `limits.CostModel`. COAT is compared with bf16 and torch.compile
by the same costs: matrix products and attention as they are, everything between fused as far as dependencies allow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.files import write_file
from ..config.coat import COATConfig
from .count import CATEGORIES, MOVE, OUTSIDE, UPDATE, Launch, Recorder
from .counted_step import count_step
from .limits import CostModel, Geometry, cost_models

POINTWISE = "fused pointwise"
COMPILED = "torch.compile"  # the operator that fused launches are listed as
SHOWN = "h200"
NAMES = ("coat", "bf16_compile")


def count(config: COATConfig, geometry: Geometry, resolutions: Sequence[int]) -> dict[str, Any]:
    """Count COAT and bf16 + torch.compile, and cost them on each card.

    Args:
        config: the `coat:` block.
        geometry: of the transformer and its LoRA.
        resolutions: pixels along a side.

    Returns:
        Card ("h200") → resolution ("1024") → "coat" or "bf16_compile" → `launches`, `modelled_ms`, `host_ops` (calls of
        torch's dispatcher, within our operators too), `host_reads` (tensors that the host reads from the device),
        `bytes`, `flops`; the same of each category in `by_category`, of all blocks in `blocks`, of one block and of
        what a step does once in `by_region`; and `operators`: region → lines of (count, category, operator, part),
        the most frequent first.
    """
    found: dict[str, Any] = {card: {} for card in cost_models()}
    for resolution in resolutions:
        coat = count_step(config, geometry, resolution)
        plain = count_step(COATConfig(enabled=False), geometry, resolution)
        plain.launches = as_compiled(plain.launches)
        for card, model in cost_models().items():
            both = zip(NAMES, (coat, plain), strict=True)
            found[card][str(resolution)] = {name: _costed(recorder, model) for name, recorder in both}
    return found


def _costed(recorder: Recorder, model: CostModel) -> dict[str, Any]:
    per_category = {category: _Sum() for category in (*CATEGORIES, POINTWISE)}
    per_region: dict[str, _Sum] = {}
    operators: dict[str, Counter[tuple[str, str, str]]] = {}
    for launch in recorder.launches:
        ms = model.milliseconds(launch.bytes, launch.flops, launch.kind, launch.shape, launch.count)
        per_category[launch.category].add(launch, ms, recorder.times.get(launch.region, 1))
        per_region.setdefault(launch.region, _Sum()).add(launch, ms, 1)
        lines = operators.setdefault(launch.region, Counter())
        lines[launch.category, launch.operator, launch.part] += launch.count
    total, blocks = _Sum(), _Sum()
    for category, part in per_category.items():
        total.include(part)
        if category not in (OUTSIDE, UPDATE):
            blocks.include(part)
    return {
        **vars(total),
        "host_ops": sum(calls * recorder.times.get(region, 1) for region, calls in recorder.host.items()),
        "host_reads": sum(recorder.reads.values()),
        "blocks": vars(blocks),
        "by_category": {name: vars(part) for name, part in per_category.items() if part.launches},
        "by_region": {region: {**vars(part), "host_ops": recorder.host[region]} for region, part in per_region.items()},
        "operators": {region: [[n, *key] for key, n in lines.most_common()] for region, lines in operators.items()},
    }


class _Sum:
    """Launches, milliseconds, bytes and operations."""

    def __init__(self) -> None:
        self.launches, self.modelled_ms, self.bytes, self.flops = 0, 0.0, 0, 0.0

    def add(self, launch: Launch, ms: float, number: int) -> None:
        self.launches += number * launch.count
        self.modelled_ms += number * ms
        self.bytes += number * launch.bytes
        self.flops += number * launch.flops

    def include(self, other: _Sum) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def as_compiled(launches: Sequence[Launch]) -> list[Launch]:
    """Fuse what lies between matrix products and attention, as torch.compile of each block would at best.

    Launches of a region that depend on no product in between, and share a tensor, become one that reads what was made
    outside of it and writes what is read outside of it.
    """
    groups: list[list[Launch]] = []
    for region in dict.fromkeys(launch.region for launch in launches):
        inside = [launch for launch in launches if launch.region == region]
        groups += [[launch] for launch in inside] if region in (OUTSIDE, UPDATE) else _groups(inside)
    readers: dict[int, set[int]] = {}
    for i, group in enumerate(groups):
        for storage in {storage for launch in group for storage in launch.reads}:
            readers.setdefault(storage, set()).add(i)
    return [_fused(group, i, readers) for i, group in enumerate(groups)]


def _groups(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Sort the launches of a graph into kernels."""
    depth: dict[int, int] = {}  # storage → products between the graph's inputs and it
    members: dict[int, list[Launch]] = {}
    kernel_of: dict[tuple[int, int], int] = {}  # (depth, storage) → kernel that reads or writes it
    for i, launch in enumerate(launches):
        level = max((depth.get(storage, 0) for storage in launch.reads), default=0)
        members[i] = [launch]
        if launch.flops:
            depth.update(dict.fromkeys(launch.writes, level + 1))
            continue
        depth.update(dict.fromkeys(launch.writes, level))
        keys = [(level, storage) for storage in (*launch.reads, *launch.writes)]
        for joined in {kernel_of[key] for key in keys if key in kernel_of} - {i}:
            members[i] = members.pop(joined) + members[i]
            kernel_of.update({key: i for key, kernel in kernel_of.items() if kernel == joined})
        kernel_of.update(dict.fromkeys(keys, i))
    return list(members.values())


def _fused(group: Sequence[Launch], number: int, readers: dict[int, set[int]]) -> Launch:
    if len(group) == 1:
        return group[0]._replace(category=POINTWISE) if group[0].category == MOVE else group[0]
    written: dict[int, int] = {}
    reads: dict[int, int] = {}
    for launch in group:
        for storage, size in launch.reads.items():
            if storage not in written:
                reads[storage] = max(size, reads.get(storage, 0))
        written.update(launch.writes)
    writes = {storage: size for storage, size in written.items() if readers.get(storage, {number, -1}) != {number}}
    return Launch(group[0].region, POINTWISE, COMPILED, "", reads, writes)


def table(found: dict[str, Any], card: str) -> str:
    """What a step is on a card, by category, as Markdown."""
    sizes = found[card]
    columns = [(size, name) for name in NAMES for size in sizes]
    header = ["ms a step", *(f"{name} {size} px: launches | ms" for size, name in columns)]
    lines = [header, ["---"] * (1 + 2 * len(columns))]
    categories = [c for c in (*CATEGORIES, POINTWISE) if any(c in sizes[s][n]["by_category"] for s, n in columns)]
    for category in [*categories, "blocks", "whole step"]:
        cells = [category]
        for size, name in columns:
            row = sizes[size][name]
            if category in categories:
                row = row["by_category"].get(category)
            elif category == "blocks":
                row = row["blocks"]
            cells += ["", ""] if row is None else [f"{row['launches']:,}", f"{row['modelled_ms']:.1f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cards_table(found: dict[str, Any]) -> str:
    """The step's time on every card, as Markdown."""
    lines = ["| card | px | coat ms | bf16 + compile ms | ratio |", "| --- | --- | --- | --- | --- |"]
    for card, sizes in found.items():
        for size, names in sizes.items():
            ours, theirs = (names[name]["modelled_ms"] for name in NAMES)
            lines.append(f"| {card} | {size} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |")
    return "\n".join(lines)


def operators(found: dict[str, Any]) -> str:
    """Every operator of one block of each kind in COAT, with its number of launches."""
    first = next(iter(found[SHOWN].values()))["coat"]["operators"]
    lines = []
    for region, rows in first.items():
        if region.removeprefix("first ").removeprefix("last ") in first.keys() - {region}:
            continue  # a block between them is much the same
        lines.append(f"\n{region}: {sum(row[0] for row in rows)} launches")
        lines += [f"{n:6}  {category:26} {operator} {part}".rstrip() for n, category, operator, part in rows]
    return "\n".join(lines)


def report(found: dict[str, Any], verbose: bool) -> str:
    """What the console shows."""
    rows = [(size, names["coat"]) for size, names in found[SHOWN].items()]
    host = "; ".join(
        f"{size} px: {row['host_ops']:,} calls of torch's dispatcher, {row['host_reads']} reads from the device"
        for size, row in rows
    )
    parts = [f"modelled for {SHOWN}, not measured:", table(found, SHOWN), f"host, {host}", cards_table(found)]
    return "\n\n".join([*parts, operators(found)] if verbose else parts)


def write(folder: Path, found: dict[str, Any]) -> Path:
    """Write count.json."""
    path = folder / "count.json"
    write_file(path, json.dumps(found, indent=1) + "\n")
    return path
