"""Stochastic rounding between two neighbouring codes, drawn from seed, parameter, step and element alone.

exp_avg_sq decays by 0.1 % a step, and its codes are 5 to 12 % apart: to nearest, a value that should fall stays on its
code, and one that a gradient lifts past the middle stays up. Rounded to the upper code with probability

    (x − lower) / (upper − lower),   lower ≤ x ≤ upper as the two codes are dequantized

the stored value is x on average: the upper one where uniform · (upper − lower) < x − lower. exp_avg changes by 10 % a
step, so to nearest it does not drift, and at random its error doubles (measured: RESULTS.md).

The draws are a hash of a counter, so they need no generator state, are the same bits in PyTorch, in Triton's
interpreter and on a GPU, and depend on no other parameter. All modulo 2^32:

    stream  = mix(mix(seed's low half ^ mix(its high half)) + number of the parameter)
    bits    = mix(mix(element ^ stream) + mix(step ^ mix(stream)))
    uniform = bits / 2^32,   of which the upper 24 bits are used

Parameters in bf16 and fp16 are rounded by the lower bits (`stochastic_cast`) of the streams of `PARAMETERS` ^ seed.

Shapes: blocks [n, B].
Source of mix: the finalizer of MurmurHash3 (Appleby), a bijection.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETERS = 1 << 63  # in the seed of streams that round parameters
MULTIPLIER_1, MULTIPLIER_2 = 0x85EBCA6B, 0xC2B2AE35


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _wrapped(x: int) -> int:
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


SIGNED_1, SIGNED_2 = _wrapped(MULTIPLIER_1), _wrapped(MULTIPLIER_2)


def mix(x: Tensor) -> Tensor:
    """Return 32 well mixed bits of each int32."""
    x = (x ^ _shifted_right(x, 16)) * SIGNED_1
    x = (x ^ _shifted_right(x, 13)) * SIGNED_2
    return x ^ _shifted_right(x, 16)


def streams(seed: int, count: int, device: torch.device | None = None) -> Tensor:
    """The stream of each of `count` parameters, int32 [count], without waiting for the device."""
    low, high = (torch.full((count,), _wrapped(part), dtype=torch.int32, device=device) for part in (seed, seed >> 32))
    return mix(mix(low ^ mix(high)) + torch.arange(count, dtype=torch.int32, device=device))


def random_bits(draws: Tensor, block_size: int) -> Tensor:
    """Return 32 bits for each element of blocks, int32 [n, B]; draws int32 [n, 3]: stream, step, first element."""
    stream, step, first = draws[:, :, None].unbind(1)
    element = first + torch.arange(block_size, dtype=torch.int32, device=draws.device)
    return mix(mix(element ^ stream) + mix(step ^ mix(stream)))


def uniform(draws: Tensor, block_size: int) -> Tensor:
    """A number for each element: fp32 [n, B], from 0 to below 1 in steps of 2^-24."""
    return _shifted_right(random_bits(draws, block_size), 8).to(torch.float32) * 2.0**-24
