"""What kernels and their launchers share: scaling to FP8 as `quantize.py` defines it, reading it back, adapters.

Kernels write rows of values and quantize them; per tensor they leave each row's amax, and a second launch casts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coat_core.formats import INT8, get_format
from coat_core.granularity import PER_ROW, per_group
from coat_core.int8 import rotation_size
from coat_core.ops.codes import code_format
from coat_core.ops.launch import dot_operand, empty, empty_values, finished, launch, n_blocks, nothing, power_of_two
from coat_core.quantize import SMALLEST_SCALE

ROW_BLOCK = 2048
SHARE_BLOCK = 2048  # elements that a program casts with a scale of all
SHARES_MAX = 1024
WIDEST_ROW = 16384  # beyond 8192 the kernels that also hold sums over rows spill registers: slower, still right
TILE_ELEMENTS = 2048
ELEMENTS_A_THREAD = 16
WARPS_MAX = 16
RANKS_AT_ONCE, FP32_RANKS_AT_ONCE = 64, 16  # fp32 is multiplied without tensor cores, from registers
LOW_RANK_ROWS = 16  # the minimum of a tile of tl.dot
HALF_INTEGERS = tl.constexpr(1.5 * 2.0**23)
LEAST_SCALE = tl.constexpr(SMALLEST_SCALE)
OF_INT8 = tl.constexpr(INT8.max)
TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# that share the rows where each leaves column sums, which are written and read again: two for each multiprocessor of a
# large GPU, as many as fit there at once with the registers of LayerNorm's backward
PROGRAMS = 256


@triton.jit
def finite_abs(x):
    """abs(x), with 0 in place of NaN and inf."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def finite_amax(x, axis):
    """The largest finite magnitude along an axis; 0 without one."""
    amax = tl.max(tl.abs(tl.fma(x, 0.0, x)), axis=axis)  # that is NaN for inf, and tl.max leaves NaN out
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def amax_of(x, axis, FORMAT_MAX: tl.constexpr):
    """`finite_amax`, or, of INT8, inf where a magnitude is not finite."""
    if FORMAT_MAX == OF_INT8:
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis)  # in the order of magnitudes, NaN above inf
        amax = bits.to(tl.float32, bitcast=True)
        amax = tl.where(amax < float("inf"), amax, float("inf"))
    else:
        amax = finite_amax(x, axis)
    return amax


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr):
    """The dequantization multiplier amax / max, at least LEAST_SCALE; 1 where amax is 0. INT8: NaN where it is inf."""
    scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, FORMAT_MAX), LEAST_SCALE), 1.0)
    if FORMAT_MAX == OF_INT8:
        scale = tl.where(amax < float("inf"), scale, float("nan"))
    return scale


@triton.jit
def saturated(x, limit):
    """X clamped to ±limit. NaN stays NaN."""
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nearest(x):
    """X rounded to an integer, ties to even, for abs(x) < 2^22: fp32 has no bits left for a fraction up there."""
    return (x + HALF_INTEGERS) - HALF_INTEGERS


@triton.jit
def as_codes(x, codes_ptr):
    """X, fp32 within ±max, rounded to the pointer's code type; bytes are e4m3 on a GPU without an instruction for it.

    Normal values round in their own bits. Of the rest 2^-9 is the unit, and 2^14 is where fp32 has no finer one.
    """
    if codes_ptr.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 120 * 8
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, small, tl.where(magnitude > 0x7F800000, 0x7F, normal))
        codes = (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        codes = x.to(codes_ptr.dtype.element_ty)
    return codes


@triton.jit
def quantized(x, scale, codes_ptr, FORMAT_MAX: tl.constexpr):
    """X over its scale, in the pointer's code type: one division a scale, a multiplication an element."""
    x *= tl.div_rn(1.0, scale)
    if FORMAT_MAX == OF_INT8:
        x = nearest(x)
        codes = tl.where(x == x, x, 0.0)
    else:
        if codes_ptr.dtype.element_ty != tl.float8e4nv:  # which only a GPU has whose conversion saturates
            x = saturated(x, FORMAT_MAX)
        codes = as_codes(x, codes_ptr)
    return codes


@triton.jit
def rotated(x, STAGES: tl.constexpr):
    """X [..., C] in fp32, each 4 ** STAGES neighbours rotated: `int8.rotate`."""
    SHAPE: tl.constexpr = x.shape
    for stage in tl.static_range(STAGES):
        x = tl.reshape(x, (x.numel // 4 ** (stage + 1), 2, 2, 4**stage))
        total = tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
        x = total * 0.5 - x
    return tl.reshape(x, SHAPE)


@triton.jit
def as_values(codes):
    """Codes or saved values in fp32; bytes are e4m3, as in `as_codes`."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        signed = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        values = signed.to(tl.float32, bitcast=True) * 2.0**120  # exponents of bias 7 and 127
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def row_columns(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The columns [1, BLOCK] of `whole_rows`; a thread reads VECTOR neighbours: a hint of fewer than there are."""
    return tl.max_contiguous(tl.arange(0, BLOCK), VECTOR if VECTOR < BLOCK else BLOCK)[None, :]


@triton.jit
def rounded(x, like_ptr):
    """X rounded to the dtype that a pointer points to, in fp32."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def store_row_codes(
    values,
    codes_ptr,
    scale_ptr,
    rows,
    are_rows,
    offsets,
    inside,
    FORMAT_MAX: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Quantize whole rows that a program holds, `rotated` in STAGES.

    Without codes leave each row's amax, without scales do nothing.
    """
    if scale_ptr is not None:
        values = rotated(values, STAGES)
        amax = amax_of(values, 1, FORMAT_MAX)
        if codes_ptr is None:
            tl.store(scale_ptr + rows, amax, mask=are_rows)
        else:
            scale = scale_from_amax(amax, FORMAT_MAX)
            tl.store(scale_ptr + rows, scale, mask=are_rows)
            tl.store(codes_ptr + offsets, quantized(values, scale[:, None], codes_ptr, FORMAT_MAX), mask=inside)


@triton.jit
def store_group_codes(
    values,
    codes_ptr,
    scale_ptr,
    rows,
    are_rows,
    first,
    end,
    width,
    FORMAT_MAX: tl.constexpr,
    G: tl.constexpr,
):
    """Quantize a tile [R, BLOCK], columns first to end of rows of `width`, in groups of G, a power of two up to BLOCK.

    Without codes do nothing.
    """
    if codes_ptr is not None:
        R: tl.constexpr = values.shape[0]
        BLOCK: tl.constexpr = values.shape[1]
        groups = tl.reshape(values, (R, BLOCK // G, G))
        scale = scale_from_amax(finite_amax(groups, 2), FORMAT_MAX)
        places = first // G + tl.arange(0, BLOCK // G)[None, :]
        are_groups = are_rows[:, None] & (places * G < end)
        tl.store(scale_ptr + rows[:, None] * tl.cdiv(width, G) + places, scale, mask=are_groups)
        codes = tl.reshape(quantized(groups, scale[:, :, None], codes_ptr, FORMAT_MAX), (R, BLOCK))
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = are_rows[:, None] & (columns < end)
        tl.store(codes_ptr + rows[:, None] * width + columns, codes, mask=inside)


@triton.jit
def rstd_of(squares, width, eps):
    """1/sqrt(mean + eps) from the sum of the squares of `width` elements."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, width * 1.0) + eps))


@triton.jit
def load_saved(x_ptr, scale_ptr, offsets, groups, inside, DTYPE: tl.constexpr):
    """Read values, or codes and their scales, in fp32, 0 outside; code · scale is rounded to DTYPE."""
    x = as_values(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    if scale_ptr is not None:
        x = (x * tl.load(scale_ptr + groups, mask=inside, other=0.0)).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def load_groups(
    source,
    tile,
    first,
    end,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Read a tile [R, BLOCK] in columns first to end as `load_saved` does, each scale once; VECTOR as `row_columns`.

    `source` has the distances of the rows of both; `first` starts a group or is in one with the whole tile.
    """
    x_ptr, scale_ptr, stride, scales_per_row = source
    row, places, are_rows = tile
    x_ptr += row * stride
    if scale_ptr is not None:
        scale_ptr += row * scales_per_row
    if GROUP < BLOCK:
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
        exist = are_rows[:, None] & (groups * GROUP < end)
        columns = groups[:, :, None] * GROUP + row_columns(GROUP, VECTOR)[:, None, :]
        inside = are_rows[:, None, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None, None] * stride + columns, mask=inside, other=0.0))
        x *= tl.load(scale_ptr + places[:, None] * scales_per_row + groups, mask=exist, other=0.0)[:, :, None]
        x = tl.reshape(x, (places.shape[0], BLOCK))
    else:
        columns = first + row_columns(BLOCK, VECTOR)
        inside = are_rows[:, None] & (columns < end)
        x = as_values(tl.load(x_ptr + places[:, None] * stride + columns, mask=inside, other=0.0))
        if scale_ptr is not None:
            x *= tl.load(scale_ptr + places * scales_per_row + first // GROUP, mask=are_rows, other=0.0)[:, None]
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def add_low_rank(
    y,
    h_ptr,
    up_ptr,
    h_rows,
    up_columns,
    up_stride,
    are_rows,
    are_columns,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Return y + h·upᵀ in fp32 from these offsets, up's numbers up_stride apart; R and RANK_BLOCK are at least 16."""
    for start in tl.range(0, RANK, RANK_BLOCK, num_stages=1):
        rank = start + tl.arange(0, RANK_BLOCK)
        h = tl.load(h_ptr + h_rows[:, None] + rank, mask=are_rows[:, None] & (rank < RANK), other=0.0)
        up = tl.load(
            up_ptr + up_columns[None, :] + rank[:, None] * up_stride,
            mask=are_columns[None, :] & (rank < RANK)[:, None],
            other=0.0,
        )
        y = tl.dot(h, up, acc=y, input_precision="ieee")
    return y


@triton.jit
def load_scaled(x_ptr, factor_ptr, offsets, columns, inside):
    """Read x in fp32, times its column's factor where there are factors."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=inside, other=0.0)
    return x


@triton.jit
def _cast_by_amax_fwd_kernel(
    x_ptr,
    factor_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    K,
    total,
    parts,
    FORMAT_MAX: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([PARTS_BLOCK], tl.float32)
    for start in range(0, parts, PARTS_BLOCK):
        index = start + tl.arange(0, PARTS_BLOCK)
        largest = tl.maximum(largest, tl.load(amax_ptr + index, mask=index < parts, other=0.0))
    scale = scale_from_amax(tl.max(largest, axis=0), FORMAT_MAX)
    block = tl.program_id(0).to(tl.int64)
    tl.store(scale_ptr, scale, mask=block == 0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    x = load_scaled(x_ptr, factor_ptr, offsets, offsets % K, inside)
    tl.store(codes_ptr + offsets, quantized(x, scale, codes_ptr, FORMAT_MAX), mask=inside)


@triton.jit
def _quantize_rows_fwd_kernel(
    x_ptr,
    factor_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    K,
    parts,
    FORMAT_MAX: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program; reads it once more where the amax of its parts is not there."""
    row = tl.program_id(0).to(tl.int64)
    if amax_ptr is not None:
        place = tl.arange(0, PARTS_BLOCK)
        largest = tl.load(amax_ptr + row * parts + place, mask=place < parts, other=0.0)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, K, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = load_scaled(x_ptr, factor_ptr, row * K + columns, columns, columns < K)
            largest = tl.maximum(largest, finite_abs(x))
    scale = scale_from_amax(tl.max(largest, axis=0), FORMAT_MAX)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        offsets, inside = row * K + columns, columns < K
        x = load_scaled(x_ptr, factor_ptr, offsets, columns, inside)
        tl.store(codes_ptr + offsets, quantized(x, scale, codes_ptr, FORMAT_MAX), mask=inside)


def cast_by_amax(x: Tensor, amax: Tensor, fmt: str, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x, times its columns' factors, per tensor, from the finite amax of any number of parts."""
    form = get_format(fmt)
    codes = empty_values(x.shape, form.dtype, x.device)
    scale = empty((), torch.float32, x.device)
    launch(
        _cast_by_amax_fwd_kernel,
        (n_blocks(x.numel(), SHARE_BLOCK),),
        *(x, factors, amax, codes, scale),
        *(x.shape[-1], x.numel(), amax.numel()),
        FORMAT_MAX=form.max,
        PARTS_BLOCK=SHARES_MAX,
        BLOCK=SHARE_BLOCK,
    )
    return finished(codes, form.dtype), scale


def quantize_rows(x: Tensor, fmt: str, factors: Tensor | None, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize x, times its columns' factors, per row; amax fp32 [rows, parts] is that of a row's parts, if known."""
    form = get_format(fmt)
    k = x.shape[-1]
    parts = 1 if amax is None else amax.shape[1]
    codes = empty_values(x.shape, form.dtype, x.device)
    scale = empty((*x.shape[:-1], 1), torch.float32, x.device)
    launch(
        _quantize_rows_fwd_kernel,
        (x.numel() // k,),
        *(x, factors, amax, codes, scale, k, parts),
        FORMAT_MAX=form.max,
        PARTS_BLOCK=power_of_two(parts),
        BLOCK=row_block(k),
    )
    return finished(codes, form.dtype), scale


def stages_of(size: int) -> int:
    """STAGES of `rotated` in blocks of `size`, a power of 4."""
    return (size.bit_length() - 1) // 2


def rotation_stages(fmt: str, width: int) -> int:
    """STAGES of `rotated` before rows of `width` become codes of this format: none but for INT8."""
    return stages_of(rotation_size(width)) if fmt == INT8.name else 0


def row_block(k: int) -> int:
    """How many elements of a row of k a program takes at once."""
    return min(power_of_two(k), ROW_BLOCK)


class Codes:
    """Buffers for codes of values [..., K] and their scale, as a kernel's arguments; None where they are not asked for.

    Per tensor the kernel leaves each row's amax in place of scales, and the codes are cast from its values.
    """

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, fmt: str, granularity: str, group_size: int = 128
    ) -> None:
        self._device = device
        self._fmt = form = code_format(fmt)
        self.format_max = form.max
        self.stages = rotation_stages(fmt, shape[-1])
        self.codes = self.scale = None
        if "none" in (fmt, granularity):
            return
        if granularity != "per_tensor":
            self.codes = empty_values(shape, form.dtype, device)
        sharing = per_group(group_size) if granularity == "per_group" else PER_ROW
        self.scale = empty(sharing.scale_shape(shape), torch.float32, device)

    def results(self, values: Tensor | None = None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scale once the kernel has run, per tensor from its `values`, contiguous, in their dtype.

        `factors` fp32 [K] multiplied them before the cast.
        """
        if self.scale is None:
            return nothing(self._fmt.dtype, self._device), nothing(torch.float32, self._device)
        if self.codes is None:
            assert values is not None
            return cast_by_amax(values, self.scale.view(-1).amax(0, keepdim=True), self._fmt.name, factors)
        return finished(self.codes, self._fmt.dtype), self.scale


def adapter(h: Tensor | None, up: Tensor | None) -> tuple[Tensor | None, int, Tensor | None, dict[str, int]]:
    """Return h, the distance of its rows, and up as `add_low_rank` reads them, and its constants."""
    if h is None or up is None:
        return None, 0, None, {"RANK": 0, "RANK_BLOCK": 0}
    h, h_stride = with_row_stride(dot_operand(h))
    up = dot_operand(up).contiguous()
    return h, h_stride, up, rank_options(up.shape[-1], up.dtype)


def rank_options(rank: int, dtype: torch.dtype) -> dict[str, int]:
    """The constants of `add_low_rank` for matrices of this dtype."""
    at_once = FP32_RANKS_AT_ONCE if dtype == torch.float32 else RANKS_AT_ONCE
    return {"RANK": rank, "RANK_BLOCK": min(max(power_of_two(rank), 16), at_once)}


def contiguous(x: Tensor | None) -> Tensor | None:
    """An argument that may be left out, in one piece."""
    return None if x is None else x.contiguous()


def saved_groups(scale: Tensor | None, group_size: int, width: int) -> tuple[Tensor | None, int, int]:
    """A scale as `load_groups` reads it, scales per row (0: one for all), and at least the elements of one in a row."""
    if scale is None:
        return None, 0, power_of_two(width)
    per_row = scale.shape[-1] if scale.ndim else 0
    return scale.contiguous(), per_row, group_size if per_row > 1 else power_of_two(width)


def with_row_stride(x: Any) -> tuple[Any, int]:
    """Return x [..., K] and the distance of its rows in elements, copied only where that varies; 0 for None."""
    if x is None:
        return None, 0
    width = x.shape[-1]
    if x.is_contiguous():  # most are
        return x, width
    if x.stride(-1) != 1 and width != 1:
        return x.contiguous(), width
    rows, beyond = width, None  # distance of rows; where the next dimension starts if that is the same for all
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if beyond is None:
            rows = stride
        elif stride != beyond:
            return x.contiguous(), width
        beyond = stride * size
    return x, rows


def whole_rows(width: int, sums: bool = False) -> dict[str, int]:
    """The constants of a program that holds whole rows, several if short; ValueError where it cannot.

    Where a quarter of BLOCK or more lies beyond the row, as of 3072, its threads pass over 1024 columns at once: passes
    beyond it are not compiled, as D is a constant. With `sums` over rows, too, twice the threads share the registers.
    """
    if width > WIDEST_ROW:
        raise ValueError(f"x with rows of {width}: the Triton kernel holds at most {WIDEST_ROW}; split the rows")
    block = power_of_two(width)
    tile = max(TILE_ELEMENTS // block, 1)
    options = {"D": width, "R": tile, "BLOCK": block, "VECTOR": block, "num_warps": warps(tile * block)}
    if tile == 1 and 4 * width <= 3 * block:
        options |= {"VECTOR": 4} if sums else {"VECTOR": 8, "num_warps": warps(block // 2)}
    return options


@functools.cache
def warps(elements: int) -> int:
    """How many warps share so many elements (a power of two)."""
    return min(max(elements // (32 * ELEMENTS_A_THREAD), 1), WARPS_MAX)


def shared_rows(images: int, rows: int, tile: int) -> tuple[int, int]:
    """How many programs share an image's rows, each leaving column sums, and how many tiles each takes."""
    tiles = n_blocks(rows, tile)
    rounds = max(n_blocks(tiles, max(PROGRAMS // max(images, 1), 1)), 1)
    return n_blocks(tiles, rounds), rounds
