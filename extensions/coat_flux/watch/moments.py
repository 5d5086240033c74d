"""AdamW's moments, measured around its step: what the update makes of them in fp32, and what comes back from 8 bits.

The operator changes the packed moments in place, so a sample of blocks is read before it; the update is done on the
sample once more. Each block is a segment of `measure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coat_core.formats import FORMATS
from coat_core.kernels.adamw import Hyper, Moment, adamw_update_, read_moments

from ..blocks.cast_loss import low_end, octaves

__all__ = ["MomentSample"]

BLOCKS = 16  # looked at per parameter and moment
FP8 = {fmt.dtype: fmt for fmt in FORMATS.values()}


class MomentSample:
    """A sample of the blocks of `coat::fp8_adamw_step`; made before the operator runs.

    Args:
        args: of the operator.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        params, grads, *moments, first_blocks, hyper, _, _, maximize, _ = args
        self._moments = Moment(*moments[:2]), Moment(*moments[2:])
        block_size = self._moments[0].codes.shape[1]
        blocks, owners, values = [], [], []
        for owner, (grad, first) in enumerate(zip(grads, first_blocks, strict=True)):
            rows, picked = _blocks_of(grad, block_size)
            values.append(rows)
            blocks += [first + number for number in picked]
            owners += [owner] * len(picked)
        device = grads[0].device
        self._count, self._owners = len(params), torch.tensor(owners, device=device)
        self._rows = torch.tensor(blocks, device=device)
        self._expected = tuple(moment.clone() for moment in self._read())
        grad = torch.cat(values).to(torch.float32)
        adamw_update_(torch.zeros_like(grad), -grad if maximize else grad, *self._expected, Hyper(*hyper))

    def measure(self) -> Tensor:
        """Return fp32 [2 moments, parameters, 2], noise and range used as in `Measures`; call it after the step."""
        found = []
        for moment, expected, got in zip(self._moments, self._expected, self._read(), strict=True):
            # relative to the block's largest: squares of small moments would be zero in fp32
            high = expected.abs().amax(-1, keepdim=True)
            values, errors = expected / high, (expected - got) / high
            noise = (errors.square().sum(-1) / values.square().sum(-1)).clamp(max=1.0)
            fmt = FP8.get(moment.codes.dtype)
            asked = -torch.log2(low_end(values.abs()))
            used = torch.full_like(noise, torch.nan) if fmt is None else asked / octaves(fmt)
            found.append(torch.stack([self._mean(noise), self._mean(used)], dim=-1))
        return torch.stack(found)

    def _read(self) -> tuple[Tensor, Tensor]:
        taken = (Moment(_rows(codes, self._rows), numbers[:, self._rows]) for codes, numbers in self._moments)
        return read_moments(*taken, slice(None))

    def _mean(self, per_block: Tensor) -> Tensor:
        """Mean over the blocks of each parameter, of those that are not nan; [blocks] to [parameters]."""
        known = ~per_block.isnan()
        sums = per_block.new_zeros(2, self._count)
        sums[0].index_add_(0, self._owners, torch.where(known, per_block, 0.0))
        sums[1].index_add_(0, self._owners, known.to(per_block.dtype))
        return sums[0] / sums[1]


def _blocks_of(grad: Tensor, size: int) -> tuple[Tensor, range]:
    """Evenly spaced whole blocks of a gradient [n, size], and their numbers; the one there is where none is whole."""
    flat, whole = grad.detach().reshape(-1), grad.numel() // size
    if not whole:
        return torch.nn.functional.pad(flat, (0, size - flat.numel()))[None], range(1)
    picked = range(0, whole, -(-whole // BLOCKS))
    return flat[: whole * size].view(whole, size)[:: picked.step], picked


def _rows(codes: Tensor, rows: Tensor) -> Tensor:
    return codes[rows] if codes.dtype == torch.float32 else codes.view(torch.uint8)[rows].view(codes.dtype)
