"""Compile every Triton kernel for GPUs that are not there: `python scripts/compile_kernels.py [--json FILE]`.

Runs the launchers on tensors without memory, at FLUX.1's width, takes what they would launch, and compiles it for
Ampere (sm_80, 86), Ada (89), Hopper (90) and Blackwell (100, 120). Prints registers, shared memory and bytes of stack
(spilled registers) for each. Exit code 1 where a kernel spills, or converts FP8 by anything but the GPU's instruction
where it has one. For sm_80 ptxas makes room for more warps and spills a few bytes: listed alone. Needs triton alone.
"""

from __future__ import annotations

import argparse
import json
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
from tests.helpers.kernel_cases import CASES, launcher_modules

TARGETS = (80, 86, 89, 90, 100, 120)
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
    reads_fp8 = has_e4m3 and any("fp8" in kind for kind in launch.signature.values())
    return {
        "kernel": launch.kernel.__name__,
        "types": ", ".join(kind for kind in launch.signature.values() if kind.startswith("*")),
        "sm": capability,
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": kernel.metadata.shared,
        "fp8_by_instruction": bool(FP8_INSTRUCTION.search(kernel.asm["ptx"])) if reads_fp8 else None,
    }


def compile_all(only: str, targets: tuple[int, ...], in_turn: bool) -> list[dict[str, Any]]:
    """Compile every distinct launch of the cases whose name contains `only`, for every target, or for one in turn."""
    rows, seen = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            for launch in recorded(case) if only in name else ():
                if launch.key in seen:
                    continue
                chosen = targets[len(seen) % len(targets) :][:1] if in_turn else targets
                seen.add(launch.key)
                rows += [{"case": name, **compiled(launch, target, Path(folder))} for target in chosen]
    return rows


def is_bad(row: dict[str, Any]) -> bool:
    """Whether the kernel spills on any but an A100, or converts FP8 in software."""
    return (row["stack_bytes"] > 0 and row["sm"] != 80) or row["fp8_by_instruction"] is False


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sm", type=int, nargs="+", default=TARGETS, help="compute capabilities (default: all)")
    parser.add_argument("--in-turn", action="store_true", help="each case for one of them, the next for the next")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Compile, print the table and say what is wrong."""
    options = parse_arguments()
    rows = compile_all(options.only, tuple(options.sm), options.in_turn)
    heads = ("kernel", "case", "sm", "registers", "stack, bytes", "shared, bytes", "FP8 by instruction")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        fp8 = {True: "yes", False: "NO", None: ""}[row["fp8_by_instruction"]]
        cells = (row["kernel"], row["case"], row["sm"], row["registers"], row["stack_bytes"], row["shared_bytes"], fp8)
        print(f"| {' | '.join(map(str, cells))} |")
    bad = [row for row in rows if is_bad(row)]
    print(f"\n{len(rows)} compiled by triton {triton.__version__}, {len(bad)} bad")
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=2) + "\n", "utf-8")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
