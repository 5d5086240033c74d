"""FP8AdamW's state per parameter, and reading and writing its moments.

| key                                             | dtype, shape                                   | present       |
|-------------------------------------------------|------------------------------------------------|---------------|
| step                                            | fp32, []; on the CPU unless capturable         | always        |
| exp_avg, exp_avg_sq                             | 8-bit codes, or fp32; the parameter's shape    | always        |
| exp_avg_scale, exp_avg_sq_scale                 | fp32 [n_blocks]                                | 8-bit codes   |
| exp_avg_exponent, _center; exp_avg_sq_exponent, _center | fp32 [n_blocks]                        | FP8, expanded |
| exp_avg_sq_exponent                             | fp32 [n_blocks]                                | uint8_log     |

Only plain tensors, so that `torch.load(weights_only=True)` reads them. Blocks run over the flattened parameter; the
last one may be shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.formats import M1_FORMATS, M2_FORMATS, Format, IntegerFormat
from coat_core.ops.adamw import Moment, read_moments, write_moments
from coat_core.ops.packing import Layout, n_blocks

MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Tensor]


class Storage(NamedTuple):
    """How one moment is stored."""

    format: Format | IntegerFormat | None  # None for fp32
    block_size: int  # elements that share a scale
    # constants of dynamic range expansion, or None without it; always None for integer formats
    expansion: ExpansionConfig | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the moment itself."""
        return torch.float32 if self.format is None else self.format.dtype

    @property
    def per_block(self) -> tuple[str, ...]:
        """Suffixes of the fp32 [n_blocks] tensors beside the codes."""
        if self.format is None:
            return ()
        if isinstance(self.format, IntegerFormat):
            return self.format.numbers
        return ("scale",) if self.expansion is None else ("scale", "exponent", "center")

    def describe(self) -> str:
        """Return e.g. "fp32", "e4m3 (block 128, expanded)" or "int8_ratio (block 128)"."""
        if self.format is None:
            return "fp32"
        if isinstance(self.format, IntegerFormat):
            return f"{self.format.name} (block {self.block_size})"
        return f"{self.format.name} (block {self.block_size}, {'expanded' if self.expansion else 'plain'})"


def storages(config: FP8QuantizationConfig) -> dict[str, Storage]:
    """Return how the configuration stores each of `MOMENTS`."""
    formats = (
        M1_FORMATS[config.m1_format] if config.use_fp8_m1 else None,
        M2_FORMATS[config.m2_format] if config.use_fp8_m2 else None,
    )
    expansion = config.expansion if config.use_dynamic_range_expansion else None
    return {
        name: Storage(fmt, config.block_size, expansion if isinstance(fmt, Format) else None)
        for name, fmt in zip(MOMENTS, formats, strict=True)
    }


def state_bytes(config: FP8QuantizationConfig, sizes: Iterable[int]) -> int:
    """Return the bytes of the moments of parameters, with their scales."""
    stored, counts = storages(config).values(), Counter(sizes)
    return sum(
        count * (size * moment.dtype.itemsize + 4 * len(moment.per_block) * n_blocks(size, moment.block_size))
        for moment in stored
        for size, count in counts.items()
    )


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


def read_state(state: State, moments: dict[str, Storage]) -> tuple[Tensor, Tensor]:
    """Return exp_avg and exp_avg_sq of one parameter in fp32, in its shape."""
    shape = state["exp_avg"].shape
    device = state["exp_avg"].device
    block_size = max(storage.block_size for storage in moments.values())  # fp32 can be read in blocks of any size
    packed = []
    for name, storage in moments.items():
        storage = storage._replace(block_size=block_size)
        packed.append(empty_moment(n_blocks(shape.numel(), block_size), storage, device))
        for key, view in moment_views(name, packed[-1], storage, 0, shape).items():
            view.copy_(state[key])
    m, v = read_moments(packed[0], packed[1], slice(None))
    return m.view(-1)[: shape.numel()].view(shape), v.view(-1)[: shape.numel()].view(shape)


def convert_state(state: State, old: dict[str, Storage], new: dict[str, Storage]) -> State:
    """Store both moments of one parameter in another way, through fp32 values on their device."""
    values = read_state(state, old)
    shape, device = values[0].shape, values[0].device
    block_size = new["exp_avg"].block_size
    expansion = new["exp_avg"].expansion or new["exp_avg_sq"].expansion
    layout = Layout([shape.numel()], block_size)
    m, v = (layout.gather([moment.reshape(-1)], torch.float32) for moment in values)
    packed = {name: empty_moment(sum(layout.blocks), storage, device) for name, storage in new.items()}
    write_moments(packed["exp_avg"], packed["exp_avg_sq"], slice(None), m, v, expansion or ExpansionConfig())
    views: State = {}
    for name, storage in new.items():
        views.update(moment_views(name, packed[name], storage, 0, shape))
    return views
