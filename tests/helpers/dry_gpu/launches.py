"""Checks of one kernel launch: what would fail, or read wrong memory, on a GPU and does not show on a CPU.

A kernel takes strides by the names of its arguments (`x_ptr` with `x_stride`, or `stride_b`), everything else it reads
as one piece. The dtypes that a pointer may have are those it is compiled for by scripts/compile_kernels.py.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coat_core.ops.launch import recorded_launches
from tests.helpers.kernel_cases import CASES

from .card import address

LARGEST_GRID = (2**31 - 1, 65535, 65535)
TILES = [1 << power for power in range(21)]  # elements of a block, up to Triton's limit
VECTOR = 16  # bytes that one thread reads at once


class LaunchError(AssertionError):
    """A launch that a GPU would refuse, or that would read what is not the tensor's."""


class Signature(NamedTuple):
    """What a kernel's source says about its arguments."""

    names: inspect.Signature
    constants: frozenset[str]  # that are compiled in
    ranges: frozenset[str]  # constants of `tl.arange`
    strides: dict[str, tuple[str, ...]]  # of each pointer; empty where the kernel reads it as one piece


@functools.cache
def signature_of(kernel: Any) -> Signature:
    """Read a kernel's signature, interpreted or compiled."""
    from triton.runtime.jit import JITFunction

    compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)
    names = [parameter.name for parameter in compiled.params]
    constants = frozenset(parameter.name for parameter in compiled.params if parameter.is_constexpr)
    ranges = frozenset(re.findall(r"tl\.arange\(0, (\w+)\)", inspect.getsource(kernel.fn))) & constants
    pointers = [name for name in names if name.endswith("_ptr")]
    strides = {name: tuple(n for n in names if n.startswith(f"{name[:-4]}_stride")) for name in pointers}
    if "x_ptr" in strides:
        strides["x_ptr"] = strides["x_ptr"] or tuple(n for n in names if n.startswith("stride_"))
    return Signature(inspect.signature(kernel.fn), constants, ranges, strides)


def check_launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """Return the kernel's name; LaunchError if it could not run, or would read something else than its arguments."""
    name, signature = kernel.fn.__name__, signature_of(kernel)
    given, options = _bound(kernel, args, keywords)
    for fault in _faults(name, signature, grid, given, options):
        raise LaunchError(f"{name}: {fault}")
    return name


def _bound(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name of each argument → what it got, and the options for the compiler and the launch."""
    names = signature_of(kernel).names
    try:
        given = names.bind(*args, **{k: v for k, v in keywords.items() if k in names.parameters}).arguments
    except TypeError as error:
        raise LaunchError(f"{kernel.fn.__name__}: {error}") from None
    return dict(given), {k: v for k, v in keywords.items() if k not in names.parameters}


@functools.cache
def _known_options() -> frozenset[str]:
    from triton.backends.nvidia.compiler import CUDAOptions

    return frozenset(inspect.signature(CUDAOptions).parameters)


def _faults(
    kernel: str, signature: Signature, grid: tuple[int, ...], given: dict[str, Any], options: dict[str, Any]
) -> Iterator[str]:
    sizes = zip(grid, LARGEST_GRID, strict=False)
    if not (1 <= len(grid) <= 3 and all(type(size) is int and 0 < size <= limit for size, limit in sizes)):
        yield f"grid {grid}: must be 1 to 3 whole numbers from 1 to {LARGEST_GRID}"
    unknown = options.keys() - _known_options()
    if unknown:
        yield f"{', '.join(sorted(unknown))}: neither an argument of the kernel nor an option of Triton"
    if options.get("num_warps", 4) not in (1, 2, 4, 8, 16, 32):
        yield f"num_warps={options['num_warps']}: must be a power of two up to 32"
    for name, value in given.items():
        if name in signature.strides:
            yield from _pointer_faults(kernel, name, value, [given[stride] for stride in signature.strides[name]])
        elif name not in signature.constants:
            if type(value) not in (int, float, bool):
                yield f"{name} is a {type(value).__name__}: must be an int, a float or a bool"
            elif type(value) is int and not -(2**63) <= value < 2**63:
                yield f"{name}={value}: does not fit 64 bits"
        elif isinstance(value, Tensor):
            yield f"{name} is a tensor, and a constant of the kernel: Triton would read it back and compile"
        elif name in signature.ranges and not (type(value) is int and value in TILES):
            yield f"{name}={value}: tl.arange takes a power of two up to {TILES[-1]}"
        elif name == "ALIGNED" and not value:
            yield "ALIGNED=False: threads would read one element at a time"


def _pointer_faults(kernel: str, name: str, value: Any, strides: list[int]) -> Iterator[str]:
    kinds = compiled_for().get((kernel, name), frozenset())
    kind = None if value is None else getattr(value, "dtype", type(value))
    if kind not in kinds:
        yield f"{name} is {kind}: compiled for {', '.join(sorted(map(str, kinds)))} (tests/helpers/kernel_cases.py)"
    if value is None:
        return
    if not value.is_meta:
        yield f"{name} is on the {value.device.type}: a kernel reads the GPU's memory only"
    if address(value) % VECTOR:
        yield f"{name} starts {address(value) % VECTOR} bytes after a multiple of {VECTOR}"
    if not strides:
        if not value.is_contiguous():
            yield f"{name} has strides {value.stride()} for shape {tuple(value.shape)}: read as one piece"
        return
    expected = value.stride()[:-1] if len(strides) > 1 else _row_stride(value)
    if tuple(strides) != tuple(expected) or (value.ndim > 1 and value.shape[-1] != 1 and value.stride(-1) != 1):
        yield f"{name} has strides {value.stride()} for shape {tuple(value.shape)}, and is read by {strides}"


def _row_stride(x: Tensor) -> tuple[int, ...]:
    """The distance of the rows of x [..., K]; () where that is not the same for all. One number is read everywhere."""
    if x.ndim == 0:
        return (0,)
    steps = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    if any(outer != inner * size for (_, outer), (size, inner) in itertools.pairwise(steps)):
        return ()
    return (steps[-1][1] if steps else x.shape[-1],)


@functools.cache
def compiled_for() -> dict[tuple[str, str], frozenset[torch.dtype | None]]:
    """(kernel, pointer) → the dtypes it is compiled for, None where it may be absent."""
    found: dict[tuple[str, str], set[torch.dtype | None]] = {}

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given, _ = _bound(kernel, args, keywords)
        for name in signature_of(kernel).strides:
            found.setdefault((kernel.fn.__name__, name), set()).add(getattr(given[name], "dtype", None))

    with recorded_launches(record):
        for case in CASES.values():
            case()
    return {key: frozenset(kinds) for key, kinds in found.items()}
