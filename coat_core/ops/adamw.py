"""AdamW with moments stored in 8 bits: one step of many tensors as one operator.

The paper's Algorithm 1 (decoupled weight decay) with t the step counted from 1, all in fp32:

    w   ← w · (1 − lr·λ)
    m   ← β1·m + (1 − β1)·g
    v   ← β2·v + (1 − β2)·g²
    w   ← w − lr/(1 − β1^t) · m / ( sqrt(v)/sqrt(1 − β2^t) + ε )

with m and v dequantized before and quantized after. The moments of all tensors share one packed buffer each, tensor i
from row first_blocks[i] on, its last block padded with zeros (`Chunk`): lists of moments and their numbers would cost
the dispatcher 4.3 ms a step for 1000 tensors instead of 0.7 (measured on a CPU core).

Shapes: B elements a block, n blocks in all; codes [n, B]; numbers fp32 [S, n], S rows of: scale, exponent, center.
S = 3 with dynamic range expansion, 1 without, 0 for a moment in fp32; an integer format has as many as its `numbers`.
The dtype of the codes and S identify the format.
Source: arXiv 2410.19313, section 3; order of operations as in torch.optim.AdamW's single-tensor path, to the bit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from coat_core.casts import declares
from coat_core.config import ExpansionConfig
from coat_core.expansion import dequantize_blocks, quantize_blocks
from coat_core.formats import INT8_RATIO, format_of
from coat_core.moments import DECODERS, ENCODERS, update_ratio
from coat_core.ops.dispatch import run_by_triton
from coat_core.ops.launch import n_blocks
from coat_core.quantize import stochastic_cast
from coat_core.rounding import random_bits, uniform

# --- many small tensors as one buffer of blocks: as few launches for any number of parameters ---
# Each flat piece starts a new block, padded with zeros, so scales belong to one piece each:
#
#     piece 0: a a a a a 0 0 0 | piece 1: b b b b | ...      (block_size 4)
#
# Large parameters are split at block borders, which bounds the buffers and changes no result. A piece [size]; a buffer
# [n_blocks, B].

# Elements of one packed buffer. GPU: large enough to hide the launches, small enough (64 MiB in fp32) to fit next to a
# model that fills the memory. CPU: about the size that stays in the cache between the passes; measured, RESULTS.md.
CHUNK_ELEMENTS_GPU = 1 << 24
CHUNK_ELEMENTS_CPU = 1 << 17


def chunk_elements(device: torch.device) -> int:
    """The largest number of elements to pack into one buffer on this device."""
    return CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_GPU


class Chunk:
    """Pieces of flat tensors that are worked on together, in a buffer [n_blocks, B] of their own."""

    def __init__(self, first_row: int, block_size: int) -> None:
        self.block_size = block_size
        self.pieces: list[tuple[int, int, int]] = []  # index of the tensor, start and stop in elements
        self.blocks: list[int] = []  # of each piece
        self.rows = slice(first_row, first_row)  # of the packed state: one after the other
        self._cuts: list[int] = []  # of the buffer: a piece, its padding, the next piece, ...

    def add(self, index: int, start: int, stop: int) -> None:
        """Add elements `start` to `stop` of tensor `index`, whose blocks are the next rows of the packed state."""
        blocks = n_blocks(stop - start, self.block_size)
        self.pieces.append((index, start, stop))
        self.blocks.append(blocks)
        self.rows = slice(self.rows.start, self.rows.stop + blocks)
        self._cuts += [stop - start, blocks * self.block_size - (stop - start)]

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """The pieces of flat tensors, as views."""
        return [tensors[index][start:stop] for index, start, stop in self.pieces]

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """Copy the pieces of flat tensors into a new fp32 buffer, zeros in the padding."""
        shape = (self.rows.stop - self.rows.start, self.block_size)
        buffer = torch.zeros(shape, dtype=torch.float32, device=tensors[0].device)
        torch._foreach_copy_(list(buffer.view(-1).split(self._cuts))[::2], self.cut(tensors))
        return buffer

    def scatter(self, buffer: Tensor, tensors: list[Tensor]) -> None:
        """Copy a buffer back into the flat tensors, converting to their dtype."""
        torch._foreach_copy_(self.cut(tensors), list(buffer.view(-1).split(self._cuts))[::2])

    def per_block(self, table: Tensor) -> Tensor:
        """Return for each block the row of its tensor in a table."""
        places = zip(self.pieces, self.blocks, strict=True)
        return torch.cat([table[index].expand(blocks, -1) for (index, _, _), blocks in places])


@functools.lru_cache(maxsize=32)  # a step asks for the same chunks as the one before
def chunks(sizes: tuple[int, ...], first_blocks: tuple[int, ...], block_size: int, limit: int) -> list[Chunk]:
    """Cut flat tensors into chunks whose blocks follow each other in the packed state, of at most `limit` elements.

    `limit` is a multiple of the block size, and padding counts. A tensor without elements is an empty piece.
    """
    made: list[Chunk] = []
    for index, (size, first) in enumerate(zip(sizes, first_blocks, strict=True)):
        for start in range(0, max(size, 1), limit):
            stop = min(start + limit, size)
            row = first + start // block_size
            after = row + n_blocks(stop - start, block_size)
            chunk = made[-1] if made else None
            if chunk is None or chunk.rows.stop != row or (after - chunk.rows.start) * block_size > limit:
                chunk = Chunk(row, block_size)
                made.append(chunk)
            chunk.add(index, start, stop)
    return made


# --- a step ---


class Hyper(NamedTuple):
    """Scalars of one AdamW step."""

    weight1: float  # 1 − β1
    beta2: float  # β2
    weight2: float  # 1 − β2
    eps: float  # ε
    decay: float  # 1 − lr·λ
    step_size: float  # lr/(1 − β1^t)
    root: float  # sqrt(1 − β2^t)


class Moment(NamedTuple):
    """One moment of all tensors: codes, 8 bits or fp32 [n, B], and their numbers per block, fp32 [S, n]."""

    codes: Tensor
    numbers: Tensor


def hyper_of_step(
    lr: float | Tensor, step: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Hyper:
    """The scalars of step number `step`; a tensor lr is on the CPU, and its products are fp32 as in torch."""
    beta1, beta2 = betas
    decay = float(1 - lr * weight_decay)
    step_size = float(lr / (1 - beta1**step))
    return Hyper(1 - beta1, beta2, 1 - beta2, eps, decay, step_size, math.sqrt(1 - beta2**step))


def hyper_table(lr: float | Tensor, steps: Tensor, betas: tuple[float, float], weight_decay: float) -> Tensor:
    """Return decay, step_size and root of `Hyper` per tensor, fp32 [n, 3], from fp64: 1 − β2 in fp32 errs by 1e-4."""
    step = steps.to(torch.float64)
    rate = lr.to(torch.float64).reshape(()) if isinstance(lr, Tensor) else torch.full_like(step, lr)
    step_size = rate / (1 - betas[0] ** step)
    columns = ((1 - rate * weight_decay).expand_as(step), step_size, (1 - betas[1] ** step).sqrt())
    return torch.stack(columns, dim=-1).to(torch.float32)


def adamw_update_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Hyper, table: Tensor | None = None
) -> None:
    """Do one AdamW step in place, on a CPU bit-equal to torch.optim.AdamW(foreach=False)."""
    decay, step_size, root = hyper[-3:] if table is None else table[:, :, None].unbind(1)
    param.mul_(decay)
    exp_avg.lerp_(grad, hyper.weight1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=hyper.weight2)
    denominator = (exp_avg_sq.sqrt() / root).add_(hyper.eps)
    param.add_((exp_avg * -step_size).div_(denominator))


def read_moments(exp_avg: Moment, exp_avg_sq: Moment, rows: slice) -> tuple[Tensor, Tensor]:
    """Dequantize some blocks into m and v, fp32 [n, B]; a moment in fp32 is not copied."""
    values = []
    for moment in (exp_avg, exp_avg_sq):
        codes, numbers = moment.codes[rows], moment.numbers[:, rows, None]
        decode = DECODERS.get(codes.dtype, dequantize_blocks)
        values.append(decode(codes, *numbers) if len(numbers) else codes)
    m, v = values
    if exp_avg.codes.dtype == INT8_RATIO.dtype:
        m *= v.sqrt()
    return m, v


def write_moments(
    exp_avg: Moment,
    exp_avg_sq: Moment,
    rows: slice,
    m: Tensor,
    v: Tensor,
    expansion: ExpansionConfig,
    uniform: Tensor | None = None,
) -> None:
    """Inverse of `read_moments`, in place; with `uniform` (of `rounding`), v is rounded stochastically."""
    if exp_avg.codes.dtype == INT8_RATIO.dtype:
        m = update_ratio(m, v)
    for (codes, numbers), values, draws in ((exp_avg, m, None), (exp_avg_sq, v, uniform)):
        if not len(numbers):
            codes[rows] = values
            continue
        if codes.dtype in ENCODERS:
            encoded = ENCODERS[codes.dtype](values, *(() if draws is None else (draws,)))
        else:
            encoded = quantize_blocks(values, format_of(codes.dtype), expansion if len(numbers) == 3 else None, draws)
        codes[rows] = encoded[0]
        numbers[:, rows] = torch.cat(encoded[1:], dim=1).t()


@torch.library.custom_op(
    "coat::fp8_adamw_step",
    mutates_args=("params", "exp_avg", "exp_avg_numbers", "exp_avg_sq", "exp_avg_sq_numbers"),
)
def _fp8_adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: Tensor,
    exp_avg_numbers: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_numbers: Tensor,
    first_blocks: list[int],
    hyper: list[float],
    table: Tensor | None,
    draws: Tensor | None,
    param_draws: Tensor | None,
    expansion: list[float],
    maximize: bool,
) -> None:
    # non-contiguous parameters are updated in a flat copy and written back
    flat_params = [param.detach().reshape(-1) for param in params]
    flat_grads = [grad.reshape(-1) for grad in grads]
    moments = (Moment(exp_avg, exp_avg_numbers), Moment(exp_avg_sq, exp_avg_sq_numbers))
    block_size = exp_avg.shape[1]
    limit = max(chunk_elements(exp_avg.device) // block_size, 1) * block_size
    for chunk in chunks(tuple(map(Tensor.numel, flat_params)), tuple(first_blocks), block_size, limit):
        rows = chunk.rows
        w = chunk.gather(flat_params)
        g = chunk.gather(flat_grads)
        m, v = read_moments(*moments, rows)
        scalars = None if table is None else chunk.per_block(table)
        stored = [w]
        for codes, numbers in moments:
            stored += [codes[rows].view(torch.uint8), numbers[:, rows].t()]
        before = [] if scalars is None else list(map(torch.clone, stored))
        adamw_update_(w, -g if maximize else g, m, v, Hyper(*hyper), scalars)
        rounding = None if draws is None else uniform(_draws(draws, chunk), block_size)
        write_moments(*moments, rows, m, v, _expansion_of(*expansion), rounding)
        if scalars is not None:
            skipped = scalars[:, -1:].isnan()
            for tensor, copy in zip(stored, before, strict=True):
                tensor.copy_(torch.where(skipped, copy, tensor))
        if param_draws is not None and params[0].dtype != torch.float32:
            w = stochastic_cast(w, params[0].dtype, random_bits(_draws(param_draws, chunk), block_size))
        chunk.scatter(w, flat_params)
    for param, flat in zip(params, flat_params, strict=True):
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))


declares(_fp8_adamw_step)(lambda out, a: a)
_expansion_of = functools.cache(ExpansionConfig)  # the same few at every step


def _draws(table: Tensor, chunk: Chunk) -> Tensor:
    """Return stream, step and first element of each block, which counts from its parameter's start."""
    rows = chunk.per_block(table)
    starts = []
    for (_, start, _), blocks in zip(chunk.pieces, chunk.blocks, strict=True):
        own = torch.arange(blocks, dtype=torch.int32, device=table.device)
        starts.append(own * chunk.block_size + start)
    rows[:, 2] += torch.cat(starts)
    return rows


def fp8_adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: Moment,
    exp_avg_sq: Moment,
    first_blocks: list[int],
    hyper: Hyper,
    *,
    table: Tensor | None = None,
    draws: Tensor | None = None,
    param_draws: Tensor | None = None,
    expansion: ExpansionConfig,
    maximize: bool = False,
) -> None:
    """Do one AdamW step in place on `params` and their blocks of both moments; on CUDA one launch, without a sync.

    params are fp32, bf16 or fp16 of any shapes, grads of one dtype and their sizes; first_blocks is where the blocks
    of each start. table: fp32 [n, 3], rows of `hyper_table` in place of the last three of `hyper`; a row of NaN skips
    its parameter. draws: int32 [n, 3] for `rounding.random_bits`, rounds exp_avg_sq stochastically (None:
    to nearest); param_draws the same for bf16 and fp16 parameters.

    Numerics: one step from the same state. Without expansion the kernel has the reference's codes and scales to the
        bit, and parameters within 1 ulp of the update (torch's own sqrt on a CPU is not correctly rounded). With
        expansion, int8_ratio or uint8_log, powers and logarithms are the GPU's own: at most 10 of 10,000 codes are one
        code off (measured 0.2), all others equal. Draws have the same bits everywhere.
    """
    _fp8_adamw_step(
        params, grads, *exp_avg, *exp_avg_sq, first_blocks, list(hyper), table, draws,
        param_draws, [expansion.range_fraction, expansion.exponent_step, expansion.exponent_max], maximize,
    )  # fmt: skip


run_by_triton(_fp8_adamw_step)
