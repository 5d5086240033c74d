"""From counted launches to modelled milliseconds of a whole step: a table for the console, and count.json.

Launches come from `counted_step`, costs from `limits.CostModel`. COAT is compared with bf16 and torch.compile at the
same costs: unchanged matrix products and attention, everything between fused as far as dependencies allow.
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
FIGURES = ("launches", "modelled_ms", "bytes", "flops")


def count(config: COATConfig, geometry: Geometry, resolutions: Sequence[int]) -> dict[str, Any]:
    """Count COAT and bf16 + torch.compile, and cost them on each card.

    Returns:
        Card ("h200") → resolution in pixels a side ("1024") → "coat" or "bf16_compile" → `launches`, `modelled_ms`,
            `host_ops` (calls of torch's dispatcher, including those within our operators), `host_reads` (tensors that
            the host reads from the device), `bytes`, `flops`; the same sums in `by_category`, `blocks` and `by_region`
            (one block, or the once-per-step parts); and `operators`: region → lines of (count, category, operator,
            part), the most frequent first.
    """
    counts: dict[str, Any] = {card: {} for card in cost_models()}
    for resolution in resolutions:
        coat = count_step(config, geometry, resolution)
        plain = count_step(COATConfig(enabled=False), geometry, resolution)
        plain.launches = as_compiled(plain.launches)
        for card, model in cost_models().items():
            both = zip(NAMES, (coat, plain), strict=True)
            counts[card][str(resolution)] = {name: _costed(recorder, model) for name, recorder in both}
    return counts


def _costed(recorder: Recorder, model: CostModel) -> dict[str, Any]:
    whole, blocks = dict.fromkeys(FIGURES, 0), dict.fromkeys(FIGURES, 0)
    categories: dict[str, dict[str, float]] = {}
    regions: dict[str, dict[str, float]] = {}
    operators: dict[str, Counter[tuple[str, str, str]]] = {}
    for launch in recorder.launches:
        ms = model.milliseconds(launch.bytes, launch.flops, launch.kind, launch.shape, launch.count)
        figures = dict(zip(FIGURES, (launch.count, ms, launch.bytes, launch.flops), strict=True))
        times = recorder.times.get(launch.region, 1)
        sums = [(categories.setdefault(launch.category, dict.fromkeys(FIGURES, 0)), times), (whole, times)]
        sums.append((regions.setdefault(launch.region, dict.fromkeys(FIGURES, 0)), 1))
        if launch.category not in (OUTSIDE, UPDATE):
            sums.append((blocks, times))
        for total, number in sums:
            for name, value in figures.items():
                total[name] += number * value
        operators.setdefault(launch.region, Counter())[launch.category, launch.operator, launch.part] += launch.count
    return {
        **whole,
        "host_ops": sum(calls * recorder.times.get(region, 1) for region, calls in recorder.host.items()),
        "host_reads": sum(recorder.reads.values()),
        "blocks": blocks,
        "by_category": {name: categories[name] for name in (*CATEGORIES, POINTWISE) if name in categories},
        "by_region": {region: {**total, "host_ops": recorder.host[region]} for region, total in regions.items()},
        "operators": {region: [[n, *key] for key, n in lines.most_common()] for region, lines in operators.items()},
    }


def as_compiled(launches: Sequence[Launch]) -> list[Launch]:
    """Fuse launches between products and attention that share a tensor: the best torch.compile could do."""
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


def report(counts: dict[str, Any], verbose: bool) -> str:
    """A step on one card by category, the host's calls, its time on every card; verbose: every operator of a block."""
    sizes = counts[SHOWN]
    columns = [(f"{name} {size} px: launches | ms", names[name]) for name in NAMES for size, names in sizes.items()]
    lines = [["ms a step", *(title for title, _ in columns)], ["---"] * (1 + 2 * len(columns))]
    rows = [(name, [row["by_category"].get(name) for _, row in columns]) for name in (*CATEGORIES, POINTWISE)]
    rows += [("blocks", [row["blocks"] for _, row in columns]), ("whole step", [row for _, row in columns])]
    for label, cells in rows:
        if any(cells):
            shown = [f"{cell['launches']:,} | {cell['modelled_ms']:.1f}" if cell else " | " for cell in cells]
            lines.append([label, *shown])
    host = [
        f"{size} px: {names['coat']['host_ops']:,} calls of torch's dispatcher, "
        f"{names['coat']['host_reads']} reads from the device"
        for size, names in sizes.items()
    ]
    cards = [["card", "px", "coat ms", "bf16 + compile ms", "ratio"], ["---"] * 5]
    for card, by_size in counts.items():
        for size, names in by_size.items():
            ours, theirs = (names[name]["modelled_ms"] for name in NAMES)
            cards.append([card, size, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"])
    tables = ["\n".join(f"| {' | '.join(line)} |" for line in table) for table in (lines, cards)]
    parts = [f"modelled for {SHOWN}, not measured:", tables[0], f"host, {'; '.join(host)}", tables[1]]
    return "\n\n".join([*parts, _operators(sizes)] if verbose else parts)


def _operators(sizes: dict[str, Any]) -> str:
    first = next(iter(sizes.values()))["coat"]["operators"]
    lines = []
    for region, rows in first.items():
        if region.removeprefix("first ").removeprefix("last ") in first.keys() - {region}:
            continue  # a block between them is much the same
        lines.append(f"\n{region}: {sum(row[0] for row in rows)} launches")
        lines += [f"{n:6}  {category:26} {operator} {part}".rstrip() for n, category, operator, part in rows]
    return "\n".join(lines)


def write(folder: Path, counts: dict[str, Any]) -> Path:
    """Write count.json."""
    path = folder / "count.json"
    write_file(path, json.dumps(counts, indent=1) + "\n")
    return path
