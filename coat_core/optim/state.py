"""What FP8AdamW keeps per parameter, and how a moment gets in and out of it.

| key                                             | dtype, shape                                   | present       |
|-------------------------------------------------|------------------------------------------------|---------------|
| step                                            | fp32 on the CPU, []                            | always        |
| exp_avg, exp_avg_sq                             | FP8 codes, or fp32; the parameter's shape      | always        |
| exp_avg_scale, exp_avg_sq_scale                 | fp32 [n_blocks]                                | FP8           |
| exp_avg_exponent, _center; exp_avg_sq_exponent, _center | fp32 [n_blocks]                        | FP8, expanded |

Only plain tensors, so that `torch.load(weights_only=True)` reads them. Blocks run over the flattened parameter; the
last one may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.expansion import QuantizedBlocks, dequantize_blocks, quantize_blocks
from coat_core.formats import Format, get_format
from coat_core.optim.packing import Layout, n_blocks

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


def zero_moment(name: str, param: Tensor, storage: Storage) -> State:
    """Return the state entries of an all-zero moment: zero codes, and 1 for every per-block number."""
    blocks = n_blocks(param.numel(), storage.block_size)
    state = {name: torch.zeros(param.shape, dtype=storage.dtype, device=param.device)}
    for suffix in storage.per_block:
        state[f"{name}_{suffix}"] = torch.ones(blocks, dtype=torch.float32, device=param.device)
    return state


def zero_state(param: Tensor, moments: dict[str, Storage]) -> State:
    """Return the whole state of a parameter before its first step."""
    state = {"step": torch.tensor(0.0, dtype=torch.float32)}
    for name, storage in moments.items():
        state.update(zero_moment(name, param, storage))
    return state


def read_moment(name: str, states: Sequence[State], storage: Storage, layout: Layout) -> Tensor:
    """Dequantize one moment of several flat states into fp32 [n_blocks, B]."""
    codes = layout.gather([state[name] for state in states], storage.dtype)
    if storage.format is None:
        return codes
    per_block = {
        suffix: layout.gather_per_block([state[f"{name}_{suffix}"] for state in states]) for suffix in storage.per_block
    }
    return dequantize_blocks(QuantizedBlocks(codes, **per_block))


def write_moment(name: str, states: Sequence[State], storage: Storage, layout: Layout, blocks: Tensor) -> None:
    """Inverse of `read_moment`: quantize fp32 [n_blocks, B] into the tensors of the states, in place."""
    codes = [state[name] for state in states]
    if storage.format is None:
        layout.scatter(blocks, codes)
        return
    stored = quantize_blocks(blocks, storage.format, storage.expansion)
    layout.scatter(stored.codes, codes)
    for suffix in storage.per_block:
        layout.scatter_per_block(getattr(stored, suffix), [state[f"{name}_{suffix}"] for state in states])


def flat_state(state: State) -> State:
    """View every tensor of a state, all contiguous, as one dimension."""
    return {key: tensor.view(-1) for key, tensor in state.items()}


def convert_moment(name: str, state: State, old: Storage, new: Storage, param: Tensor) -> State:
    """Re-quantize one moment from one storage to another; through exact fp32 values, on the parameter's device."""
    size = [param.numel()]
    values = torch.empty(param.shape, dtype=torch.float32, device=param.device)
    old_layout, new_layout = Layout(size, old.block_size), Layout(size, new.block_size)
    old_layout.scatter(read_moment(name, [flat_state(state)], old, old_layout), [values.view(-1)])
    converted = zero_moment(name, param, new)
    blocks = new_layout.gather([values.view(-1)], torch.float32)
    write_moment(name, [flat_state(converted)], new, new_layout, blocks)
    return converted
