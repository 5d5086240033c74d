"""Launches of our Triton kernels by their instructions, beside `limits.kernel_ms`, which is by bytes and operations.

`instructions.tsv`, written by `scripts/compile_kernels.py --instructions`, has a row for each launch of a counted step
with other machine code: a program's warps issue `once` instructions, and `each` in every one of `trips` (a quotient of
arguments) through its loops; `source` is `source_digest` of the kernel that was counted. Counted for sm_90, used for
every card; good to about 15 %.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .limits import LAUNCH_MS

if TYPE_CHECKING:
    from ..plan.speed import Card

Launched = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, options

ISSUED = 4  # warp instructions a clock and multiprocessor, at best
ISSUE_SHARE = 0.6  # of it, assumed
ENOUGH_WARPS = 16  # on a multiprocessor to hide latency; a kernel with fewer is slower than modelled

with Path(__file__).with_name("instructions.tsv").open(encoding="utf-8", newline="") as table:
    ROWS = {(row["kernel"], row["variant"]): row for row in csv.DictReader(table, delimiter="\t")}


def key_of(launched: Launched) -> tuple[str, str]:
    """The kernel's name, and a digest of the types and constants that decide its machine code."""
    kernel, _, args, options = launched
    types = ["1" if type(x) is int and x == 1 else str(getattr(x, "dtype", type(x).__name__)) for x in args]
    text = f"{types} {sorted((name, str(value)) for name, value in options.items())}"
    return kernel.__name__, hashlib.sha256(text.encode()).hexdigest()[:8]


def source_digest(kernel: Any) -> str:
    """Of a kernel's code without comments, and of the functions and constants that it names."""
    (function,) = ast.parse(inspect.getsource(kernel.fn)).body
    if ast.get_docstring(function) is not None:
        del function.body[0]
    parts = [re.sub(r"\w+=\[\]|, ", "", ast.dump(function))]  # Python 3.13 leaves empty fields out
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    for name in sorted(named & kernel.fn.__globals__.keys()):
        used = kernel.fn.__globals__[name]
        if hasattr(used, "fn"):
            parts.append(source_digest(used))
        elif hasattr(used, "value"):  # tl.constexpr
            parts.append(repr(used.value))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def resident_warps(launched: Launched) -> int:
    """Warps that a multiprocessor holds; 0 of a launch without a row."""
    return int(ROWS.get(key_of(launched), {}).get("resident", 0))


def issue_ms(card: Card, launched: Launched) -> float:
    """Time to issue the instructions, and the launch; without a row the launch's alone."""
    kernel, grid, args, options = launched
    row = ROWS.get(key_of(launched))
    if row is None:
        return LAUNCH_MS
    arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **options, "1": 1}
    length, block = row["trips"].split("/")
    trips = math.ceil(arguments[length] / arguments[block])
    instructions = (int(row["once"]) + int(row["each"]) * trips) * int(row["warps"]) * math.prod(grid)
    issued = ISSUE_SHARE * ISSUED * card.clock_ghz * card.multiprocessors
    return instructions / issued / 1e6 + LAUNCH_MS
