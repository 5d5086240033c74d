"""Compile every Triton kernel for GPUs that are not there: `python scripts/compile_kernels.py [--json FILE]`.

Runs the launchers on tensors without memory, at FLUX.1's width, takes what they would launch, and compiles it for
Ampere (sm_80, 86), Ada (89), Hopper (90) and Blackwell (100, 120). Prints for each registers, bytes of stack (spilled
registers), shared memory, and the warps that fit a multiprocessor. Exit code 1 where a kernel spills, needs more shared
memory than the card has, or converts FP8 by anything but the GPU's instruction where it has one.

Another triton than the installed one: `pip install --no-deps --target DIR triton==3.5.1`, then the same command after
`PYTHONPATH=DIR`, one `--sm` a process: triton 3.5 casts to e5m2 for all as the first one compiled for can.

`--instructions FILE` counts instead the warp instructions of the launches of a FLUX.1-dev step, compiled for sm_90, for
`coat-flux bench --level count`: those outside loops, and those of one trip through every loop. Guarded code counts as
run, calls of slow paths (denormal quotients) do not; of two ways that do not meet again each counts by the share of the
programs that take it.

For sm_80 ptxas makes room for more warps and spills a few bytes: listed alone. Needs triton alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before triton: interpreted kernels are not compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from coat_core.ops.launch import FIRST_E4M3_CAPABILITY
from coat_flux.bench.limits import key_of, source_digest
from tests.helpers.kernel_cases import CASES, launcher_modules

TARGETS = (80, 86, 89, 90, 100, 120)
# What a multiprocessor of each has: warps, and KB of shared memory, all but one of it for one program.
WARPS_AND_SHARED_KB = {80: (64, 164), 86: (48, 100), 89: (48, 100), 90: (64, 228), 100: (64, 228), 120: (48, 100)}
REGISTERS = 65_536
COUNTED_FOR = 90
MOST_SHARED = {capability: shared_kb * 1024 - 1024 for capability, (_, shared_kb) in WARPS_AND_SHARED_KB.items()}
LARGE_SHARED = 48 * 1024
TRIPS = {  # through a kernel's loops, a quotient of two of its arguments
    "_share_amax_fwd_kernel": "rounds/1",
    "_cast_by_amax_fwd_kernel": "parts/PARTS_BLOCK",
    "_quantize_rows_fwd_kernel": "K/BLOCK",
    "_quantize_int8_fwd_kernel": "K/BLOCK",
    "_int8_mm_fwd_kernel": "K/BLOCK_K",
    "_norm_modulate_bwd_kernel": "rounds/1",
    "_gated_sum_bwd_kernel": "rounds/1",
    "_qkv_rope_fwd_kernel": "HEADS/1",
    "_qkv_rope_bwd_kernel": "HEADS/1",
    "_cast_down_fwd_kernel": "LENGTH/BLOCK",
    "_mlp_down_gradient_kernel": "rounds/1",
    "_lora_up_gradients_kernel": "rounds/1",
    "_add_lora_parts_kernel": "shares/PARTS",  # of dup; dh has fewer
    "_weight_only_linear_fwd_kernel": "K/BLOCK_K",
}
# The share of a kernel's programs that take the smaller of two ways (D columns of attention, F of the MLP); of others
# all take the larger one.
SHARES: dict[str, Callable[[dict[str, Any]], float]] = {
    "_add_lora_parts_kernel": lambda _: 0.5,
    "_mlp_activation_fwd_kernel": lambda a: a["D"] / (a["D"] + a["F"]),
    "_mlp_down_gradient_kernel": lambda a: a["D"] / (a["D"] + a["F"]),
}
FP8_INSTRUCTION = re.compile(r"cvt\.\S*(e4m3x2|e5m2x2)")
POINTER_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
    torch.bool: "i1",
}


class Launch(NamedTuple):
    """A kernel as a launcher would start it: types of its arguments, constants, options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Distinguishes launches that compile to different code."""
        return repr((self.kernel.__name__, self.signature, sorted(self.constants.items()), self.aligned, self.options))


def describe(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    """Type a launch's arguments as Triton's own launcher does: integers 1 are constants, multiples of 16 are marked."""
    names = [parameter.name for parameter in kernel.params]
    given = {**dict(zip(names, args, strict=False)), **{k: v for k, v in keywords.items() if k in names}}
    options = {k: v for k, v in keywords.items() if k not in names}
    signature, constants, aligned = {}, {}, []
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = type_name(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned.append(index)
    return Launch(kernel, signature, constants, tuple(aligned), {**options, "enable_fp_fusion": False})


def type_name(value: Any) -> str:
    """Triton's name of a runtime argument's type."""
    if isinstance(value, torch.Tensor):
        return "*" + POINTER_NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def recorded(case: Callable[[], Any]) -> list[Launch]:
    """Return what a case would launch."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **keywords: Any) -> None:
        launches.append(describe(kernel, args, keywords))

    modules = [module for module in launcher_modules() if hasattr(module, "launch")]
    kept = [module.launch for module in modules]
    for module in modules:
        module.launch = record
    try:
        case()
    finally:
        for module, launch in zip(modules, kept, strict=True):
            module.launch = launch
    return launches


def in_bytes(kind: str) -> str:
    """Triton's name of a type where `runtime.launch` hands e4m3 over as bytes."""
    return kind.replace(POINTER_NAMES[torch.float8_e4m3fn], POINTER_NAMES[torch.uint8])


def resident_warps(capability: int, warps: int, registers: int, shared_bytes: int) -> int:
    """Warps that a multiprocessor holds, of programs with so many warps, registers a thread and bytes."""
    most_warps, shared_kb = WARPS_AND_SHARED_KB[capability]
    by_registers = REGISTERS // (math.ceil(registers / 8) * 8 * 32 * warps)
    by_shared = shared_kb * 1024 // (shared_bytes + 1024)
    return min(by_registers, by_shared, most_warps // warps) * warps


def compiled(launch: Launch, capability: int, folder: Path) -> dict[str, Any]:
    """Compile one launch and return its resources."""
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    has_e4m3 = divmod(capability, 10) >= FIRST_E4M3_CAPABILITY
    signature = launch.signature if has_e4m3 else {name: in_bytes(kind) for name, kind in launch.signature.items()}
    source = ASTSource(launch.kernel, signature, launch.constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    registers = int(found["REG"])
    reads_fp8 = has_e4m3 and any("fp8" in kind for kind in launch.signature.values())
    return {
        "kernel": launch.kernel.__name__,
        "types": ", ".join(kind for kind in launch.signature.values() if kind.startswith("*")),
        "sm": capability,
        "registers": registers,
        "warps": kernel.metadata.num_warps,
        "resident_warps": resident_warps(capability, kernel.metadata.num_warps, registers, kernel.metadata.shared),
        "stack_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": kernel.metadata.shared,
        "fp8_by_instruction": bool(FP8_INSTRUCTION.search(kernel.asm["ptx"])) if reads_fp8 else None,
    }


def blocks_of(cubin: Path) -> tuple[list[list[str]], list[list[int]]]:
    """The basic blocks of a kernel's machine code, and where each may go on."""
    dump = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    blocks: list[list[str]] = [[]]
    labels = {}
    for line in text.partition(".text.")[2].splitlines():
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if line.startswith("$__internal"):  # called from slow paths alone
            break
        if label:
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif instruction:
            blocks[-1].append(instruction[1])
            if re.search(r"\b(BRA|EXIT)\b", instruction[1]):
                blocks.append([])
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        target = re.search(r"\bBRA\b.*`\((\S+)\)", last)
        goes_on = last.startswith("@") or not re.search(r"\b(BRA|EXIT)\b", last)
        ways = [labels[target[1]]] if target else []
        successors.append(ways + [i + 1] * (goes_on and i + 1 < len(blocks)))
    return blocks, successors


def instructions(cubin: Path, share: float) -> tuple[float, float]:
    """Instructions of a mean program outside loops, and in one trip through every loop; `share` takes smaller ways."""
    blocks, successors = blocks_of(cubin)
    sizes = [sum(not line.startswith("NOP") for line in block) for block in blocks]
    slow = {i for i, block in enumerate(blocks) if any("CALL" in line for line in block)}
    onward = [sorted({x for x in ways if x > i and x not in slow}) for i, ways in enumerate(successors)]
    loops = [(x, i) for i, ways in enumerate(successors) for x in ways if x <= i and len(blocks[i]) > 1]
    reached: list[set[int]] = [set() for _ in blocks]
    for i in reversed(range(len(blocks))):
        for x in onward[i]:
            reached[i] |= {x} | reached[x]
    runs = [1.0] + [0.0] * (len(blocks) - 1)
    for i, ways in enumerate(onward):
        if len(ways) == 2 and ways[1] not in reached[ways[0]]:
            near, far = ({x} | reached[x] for x in ways)
            far_is_larger = sum(sizes[x] for x in far - near) > sum(sizes[x] for x in near - far)
            runs[ways[0]] += runs[i] * (share if far_is_larger else 1 - share)
            runs[ways[1]] += runs[i] * (1 - share if far_is_larger else share)
        elif ways:
            runs[ways[0]] += runs[i]
    is_inside = [any(first <= i <= last for first, last in loops) for i in range(len(blocks))]
    each = sum(size * run for size, run, inside in zip(sizes, runs, is_inside, strict=True) if inside)
    return sum(size * run for size, run in zip(sizes, runs, strict=True)) - each, each


def count_instructions(file: Path) -> None:
    """Write a row for each launch of the counted steps whose machine code differs."""
    from coat_flux.bench.count import count_step
    from coat_flux.bench.limits import Geometry
    from coat_flux.bench.runner import COUNT, named
    from coat_flux.config.coat import COATConfig

    rows: dict[tuple[str, str], tuple[Any, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for configuration, resolution in itertools.product(named(COUNT).values(), (1024, 512)):
            config = COATConfig.from_dict(dict(configuration.coat or {}))
            for step_launch in count_step(config, Geometry(), resolution).launches:
                launched = step_launch.launched
                if launched is None or key_of(launched) in rows:
                    continue
                kernel, _, args, options = launched
                found = compiled(describe(kernel, args, options), COUNTED_FOR, Path(folder))
                sizes = dict(zip(kernel.arg_names, args, strict=False))
                share = SHARES.get(kernel.__name__, lambda _: 0.0)(sizes)
                once, each = instructions(Path(folder) / "kernel.cubin", share)
                trips = TRIPS[kernel.__name__] if each else "1/1"
                counted = round(once), round(each), trips, found["warps"], found["resident_warps"]
                row = *key_of(launched), source_digest(kernel), *counted
                rows[key_of(launched)] = row
                print(*row, flush=True)
    with file.open("w", encoding="utf-8", newline="") as table:
        writer = csv.writer(table, delimiter="\t", lineterminator="\n")
        writer.writerow(("kernel", "variant", "source", "once", "each", "trips", "warps", "resident"))
        writer.writerows(sorted(rows.values()))


def compile_all(only: str, targets: tuple[int, ...], in_turn: bool) -> list[dict[str, Any]]:
    """Compile every distinct launch of the cases whose name contains `only`, for every target.

    `in_turn`: for one of them, the next launch for the next; for all where it needs much shared memory.
    """
    rows, seen = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            for launch in recorded(case) if only in name else ():
                if launch.key in seen:
                    continue
                turn = len(seen) % len(targets)
                seen.add(launch.key)
                for target in targets[turn:] + targets[:turn]:
                    rows.append({"case": name, **compiled(launch, target, Path(folder))})
                    if in_turn and target == targets[turn] and rows[-1]["shared_bytes"] <= LARGE_SHARED:
                        break
    return rows


def is_bad(row: dict[str, Any]) -> bool:
    """Whether the kernel spills on any but an A100, does not fit the card, or converts FP8 in software."""
    spills = row["stack_bytes"] > 0 and row["sm"] != 80
    return spills or row["shared_bytes"] > MOST_SHARED[row["sm"]] or row["fp8_by_instruction"] is False


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sm", type=int, nargs="+", default=TARGETS, help="compute capabilities (default: all)")
    parser.add_argument("--in-turn", action="store_true", help="each launch for one of them, the next for the next")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--instructions", type=Path, metavar="FILE", help="count those of a step's launches instead")
    return parser.parse_args()


def main() -> int:
    """Compile, print the table and say what is wrong."""
    options = parse_arguments()
    if options.instructions:
        count_instructions(options.instructions)
        return 0
    rows = compile_all(options.only, tuple(options.sm), options.in_turn)
    sizes = ("registers", "stack_bytes", "shared_bytes", "resident_warps")
    heads = ("kernel", "case", "sm", *sizes, "FP8 by instruction")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        fp8 = {True: "yes", False: "NO", None: ""}[row["fp8_by_instruction"]]
        cells = (row["kernel"], row["case"], row["sm"], *(row[size] for size in sizes), fp8)
        print(f"| {' | '.join(map(str, cells))} |")
    bad = [row for row in rows if is_bad(row)]
    print(f"\n{len(rows)} compiled by triton {triton.__version__}, {len(bad)} bad")
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=2) + "\n", "utf-8")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
