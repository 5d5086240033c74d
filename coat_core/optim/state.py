"""What FP8AdamW keeps per parameter, and how a moment gets in and out of it.

| key                                             | dtype, shape                                   | present       |
|-------------------------------------------------|------------------------------------------------|---------------|
| step                                            | fp32, []; on the CPU unless capturable         | always        |
| exp_avg, exp_avg_sq                             | FP8 codes, or fp32; the parameter's shape      | always        |
| exp_avg_scale, exp_avg_sq_scale                 | fp32 [n_blocks]                                | FP8           |
| exp_avg_exponent, _center; exp_avg_sq_exponent, _center | fp32 [n_blocks]                        | FP8, expanded |

Only plain tensors, so that `torch.load(weights_only=True)` reads them. Blocks run over the flattened parameter; the
last one may be shorter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.formats import Format, get_format
from coat_core.kernels.adamw import Moment, read_moment, write_moment
from coat_core.kernels.packing import Layout, n_blocks

MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Tensor]


class Storage(NamedTuple):
    """How one moment is stored.

    Attributes:
        format: FP8 format, or None for fp32.
        block_size: elements that share a scale.
        expansion: constants of dynamic range expansion, or None without it.
    """

    format: Format | None
    block_size: int
    expansion: ExpansionConfig | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the moment itself."""
        return torch.float32 if self.format is None else self.format.dtype

    @property
    def per_block(self) -> tuple[str, ...]:
        """The suffixes of the fp32 [n_blocks] tensors beside the codes."""
        if self.format is None:
            return ()
        return ("scale",) if self.expansion is None else ("scale", "exponent", "center")

    def describe(self) -> str:
        """Return e.g. "fp32" or "e4m3 (block 128, expanded)"."""
        if self.format is None:
            return "fp32"
        return f"{self.format.name} (block {self.block_size}, {'expanded' if self.expansion else 'plain'})"


def storages(config: FP8QuantizationConfig) -> dict[str, Storage]:
    """Return how the configuration stores each of `MOMENTS`."""
    formats = (
        get_format(config.m1_format) if config.use_fp8_m1 else None,
        get_format(config.m2_format) if config.use_fp8_m2 else None,
    )
    expansion = config.expansion if config.use_dynamic_range_expansion else None
    return {name: Storage(fmt, config.block_size, expansion) for name, fmt in zip(MOMENTS, formats, strict=True)}


def empty_moment(blocks: int, storage: Storage, device: torch.device) -> Moment:
    """Return an all-zero packed moment of `blocks` blocks: zero codes, and 1 for every per-block number."""
    codes = torch.zeros((blocks, storage.block_size), dtype=storage.dtype, device=device)
    return Moment(codes, torch.ones((len(storage.per_block), blocks), dtype=torch.float32, device=device))


def moment_views(name: str, moment: Moment, storage: Storage, first: int, shape: torch.Size) -> State:
    """Return the state entries of a parameter of `shape` whose blocks of a packed moment start at `first`."""
    after = first + n_blocks(shape.numel(), storage.block_size)
    flat = moment.codes.view(-1)[first * storage.block_size :][: shape.numel()]
    numbers = moment.numbers[:, first:after]
    suffixed = {f"{name}_{suffix}": row for suffix, row in zip(storage.per_block, numbers, strict=True)}
    return {name: flat.view(shape), **suffixed}


def convert_moment(name: str, state: State, old: Storage, new: Storage, param: Tensor) -> State:
    """Re-quantize one moment from one storage to another; through exact fp32 values, on the parameter's device."""
    source = empty_moment(n_blocks(param.numel(), old.block_size), old, param.device)
    for key, view in moment_views(name, source, old, 0, param.shape).items():
        view.copy_(state[key])
    everything = slice(None)
    values = read_moment(source, everything).view(-1)[: param.numel()]
    target = empty_moment(n_blocks(param.numel(), new.block_size), new, param.device)
    blocks = Layout([param.numel()], new.block_size).gather([values], torch.float32)
    write_moment(target, everything, blocks, new.expansion or ExpansionConfig())
    return moment_views(name, target, new, 0, param.shape)
