"""FP8AdamW's state per parameter: reading and writing moments, checking and converting a state file.

    step                    fp32 []; on the CPU unless capturable
    exp_avg, exp_avg_sq     fp32; the parameter's shape
    …_codes                 or 8-bit codes in its place; the parameter's shape
    …_scale                 fp32 [n_blocks]; of 8-bit codes
    …_exponent, …_center    fp32 [n_blocks]; of FP8 codes with expansion
    exp_avg_sq_exponent     fp32 [n_blocks]; of uint8_log codes

Codes have keys of their own: torch.optim.AdamW would take them for values under exp_avg.
Entries are plain tensors, which `torch.load(weights_only=True)` reads. Blocks run over the flattened parameter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coat_core.config import ExpansionConfig, FP8QuantizationConfig
from coat_core.formats import M1_FORMATS, M2_FORMATS, Format
from coat_core.ops.adamw import Chunk, Moment, read_moments, write_moments
from coat_core.ops.launch import n_blocks

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_OF = {name + suffix: name for name in MOMENTS for suffix in ("", "_codes")}  # key of values or codes → moment
UNQUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAME_NETWORK = "use the network settings (rank, targets) of the saved run"
State = dict[str, Tensor]


class Storage(NamedTuple):
    """How one moment is stored."""

    format: Format | None  # None for fp32
    block_size: int  # elements that share a scale; without effect for fp32
    expansion: ExpansionConfig | None  # None: no dynamic range expansion, which only FP8 formats can have

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values or codes."""
        return torch.float32 if self.format is None else self.format.dtype

    @property
    def per_block(self) -> tuple[str, ...]:
        """Suffixes of the fp32 [n_blocks] tensors beside the codes."""
        if self.format is None:
            return ()
        return self.format.numbers if self.expansion is None else ("scale", "exponent", "center")

    def describe(self) -> str:
        """Return e.g. "fp32", "e4m3 (block 128, expanded)" or "int8_ratio (block 128)"."""
        if self.format is None:
            return "fp32"
        scaling = ""
        if self.format.dtype.is_floating_point:
            scaling = ", plain" if self.expansion is None else ", expanded"
        return f"{self.format.name} (block {self.block_size}{scaling})"


def storages(config: FP8QuantizationConfig) -> dict[str, Storage]:
    """How the configuration stores each of `MOMENTS`."""
    m1_format = M1_FORMATS[config.m1_format] if config.use_fp8_m1 else None
    m2_format = M2_FORMATS[config.m2_format] if config.use_fp8_m2 else None
    configured = {}
    for name, fmt in zip(MOMENTS, (m1_format, m2_format), strict=True):
        expands = config.use_dynamic_range_expansion and fmt is not None and fmt.dtype.is_floating_point
        configured[name] = Storage(fmt, config.block_size, config.expansion if expands else None)
    return configured


def state_bytes(config: FP8QuantizationConfig, sizes: Iterable[int]) -> int:
    """The bytes of both moments, with their scales, for parameters of `sizes` elements."""
    configured = storages(config)
    total = 0
    for size, count in Counter(sizes).items():
        for storage in configured.values():
            numbers = len(storage.per_block) * n_blocks(size, storage.block_size)  # fp32
            total += count * (size * storage.dtype.itemsize + 4 * numbers)
    return total


def empty_moment(blocks: int, storage: Storage, device: torch.device) -> Moment:
    """An all-zero packed moment of `blocks` blocks: zero codes, and 1 for every per-block number."""
    codes = torch.zeros((blocks, storage.block_size), dtype=storage.dtype, device=device)
    return Moment(codes, torch.ones((len(storage.per_block), blocks), dtype=torch.float32, device=device))


def moment_views(name: str, moment: Moment, storage: Storage, first: int, shape: torch.Size) -> State:
    """The state entries of a parameter of `shape`: views into a packed moment, from block `first`."""
    stop = first + n_blocks(shape.numel(), storage.block_size)
    codes = moment.codes[first:stop].view(-1)[: shape.numel()].view(shape)  # without the last block's padding
    views = {name if storage.format is None else f"{name}_codes": codes}
    for suffix, row in zip(storage.per_block, moment.numbers, strict=True):
        views[f"{name}_{suffix}"] = row[first:stop]
    return views


def read_state(state: State, moments: dict[str, Storage]) -> tuple[Tensor, Tensor]:
    """Return exp_avg and exp_avg_sq of one parameter, stored as `moments`, in fp32 and its shape."""
    values_or_codes = next(state[key] for key in MOMENT_OF if key in state)
    shape, device = values_or_codes.shape, values_or_codes.device
    size = shape.numel()
    block_size = max(storage.block_size for storage in moments.values())  # an fp32 moment takes the other's
    packed = []
    for name, storage in moments.items():
        storage = storage._replace(block_size=block_size)
        moment = empty_moment(n_blocks(size, block_size), storage, device)
        for key, view in moment_views(name, moment, storage, 0, shape).items():
            view.copy_(state[key])
        packed.append(moment)
    m, v = read_moments(packed[0], packed[1], slice(None))
    return m.view(-1)[:size].view(shape), v.view(-1)[:size].view(shape)


def _codes_can_stay(old: Storage, new: Storage) -> bool:
    """Whether a moment needs no conversion: the constants of the expansion matter only when codes are written."""
    if old.format is None or new.format is None:
        return old.format is new.format
    same_blocks = old.block_size == new.block_size
    return old.format == new.format and same_blocks and (old.expansion is None) == (new.expansion is None)


def convert_state(state: State, old: dict[str, Storage], new: dict[str, Storage]) -> State:
    """The entries of one parameter's moments whose storage changes, converted through fp32."""
    values = read_state(state, old)
    shape, device = values[0].shape, values[0].device
    chunk = Chunk(0, new["exp_avg"].block_size)  # pads the values to whole blocks
    chunk.add(0, 0, shape.numel())
    m, v = (chunk.gather([moment.reshape(-1)]) for moment in values)
    packed = {name: empty_moment(chunk.blocks[0], storage, device) for name, storage in new.items()}
    expansion = new["exp_avg"].expansion or new["exp_avg_sq"].expansion or ExpansionConfig()
    # both are written even if only one changes: codes of m may be relative to v (int8_ratio)
    write_moments(packed["exp_avg"], packed["exp_avg_sq"], slice(None), m, v, expansion)
    views: State = {}
    for name, storage in new.items():
        if not _codes_can_stay(old[name], storage):
            views.update(moment_views(name, packed[name], storage, 0, shape))
    return views


# --- loading a state file ---


def check_groups(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError unless this is an optimizer's state with as many groups and parameters as `groups`."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"keys {sorted(map(str, state_dict))}: must be 'state' and 'param_groups'")
    in_file = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if in_file != expected:
        raise ValueError(
            f"param_groups: the file has groups of {in_file} parameters, the optimizer of {expected}; {SAME_NETWORK}"
        )


def saved_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], moments: dict[str, Storage]
) -> list[tuple[Tensor, dict[str, Any], dict[str, Storage]]]:
    """Each parameter with its state in the file, and how each moment is stored there, all checked.

    The file is from FP8AdamW in any configuration (its groups' "fp8" entry) or from torch.optim.AdamW.
    One warning lists what differs from `moments`, the storage in this optimizer.
    """
    saved = []
    changes = set()
    for saved_group, group in zip(state_dict["param_groups"], groups, strict=True):
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            state = state_dict["state"].get(index)
            if not state:
                continue
            stored = _storages_in_file(f"state[{index!r}]", state, param, saved_group.get("fp8"))
            saved.append((param, state, stored))
            for name, new in moments.items():
                old = stored[name]
                if not _codes_can_stay(old, new):
                    change = "dequantized" if new.format is None else "re-quantized"
                    changes.add(f"{name}: {old.describe()} -> {new.describe()}, {change}")
    if changes:
        logger.warning("FP8AdamW: %s", "; ".join(sorted(changes)))
    return saved


def _storages_in_file(
    where: str, state: dict[str, Any], param: Tensor, fp8: dict[str, Any] | None
) -> dict[str, Storage]:
    """How each moment of one parameter is stored in the file; ValueError for a damaged entry."""
    for key in ("step", *MOMENTS):
        if key not in state and f"{key}_codes" not in state:
            raise ValueError(f"{where}['{key}'] is missing: not a file of FP8AdamW or AdamW")
    stored: dict[str, Storage] = {}
    known_keys = {"step"}
    blocks_of: dict[str, int] = {}  # key of each per-block tensor → its length
    for name, choices in zip(MOMENTS, (M1_FORMATS, M2_FORMATS), strict=True):
        key = name if name in state else f"{name}_codes"
        known_keys.add(key)
        dtype, shape = state[key].dtype, state[key].shape
        formats = {fmt.dtype: fmt for fmt in choices.values()}
        if key == name:
            if dtype not in UNQUANTIZED_DTYPES:
                rule = f"must be floating; codes are in '{name}_codes'"
                raise ValueError(f"{where}['{name}'] is {dtype}: {rule}")
            stored[name] = Storage(None, 16, None)  # the smallest block size: see `read_state`
        elif dtype not in formats:
            rule = f"must be the codes of {', '.join(choices)}"
            raise ValueError(f"{where}['{key}'] is {dtype}: {rule}")
        elif not fp8 or not {"block_size", "use_dynamic_range_expansion"} <= fp8.keys():
            raise ValueError(
                f"param_groups 'fp8'={fp8!r}: must give block_size and use_dynamic_range_expansion of the codes"
            )
        else:
            config = FP8QuantizationConfig(block_size=fp8["block_size"])  # checks it
            expanded = dtype.is_floating_point and fp8["use_dynamic_range_expansion"]
            stored[name] = Storage(formats[dtype], config.block_size, config.expansion if expanded else None)
        if shape != param.shape:
            raise ValueError(f"{where}['{key}'] has shape {tuple(shape)}: must be {tuple(param.shape)}; {SAME_NETWORK}")
        blocks = n_blocks(param.numel(), stored[name].block_size)
        blocks_of.update({f"{name}_{suffix}": blocks for suffix in stored[name].per_block})
    described = ", ".join(f"{name} in {storage.describe()}" for name, storage in stored.items())
    unknown = state.keys() - blocks_of.keys() - known_keys
    if unknown:
        raise ValueError(f"{where}['{min(unknown)}']: does not belong to {described}")
    for key, blocks in blocks_of.items():
        numbers = state.get(key)
        if not isinstance(numbers, Tensor) or numbers.dtype != torch.float32 or numbers.shape != (blocks,):
            rule = f"must be torch.float32 of shape ({blocks},) with {described}"
            raise ValueError(f"{where}['{key}'] is missing, was cast or has another shape: {rule}")
    return stored


def write_state(
    state: State,
    saved: dict[str, Any],
    stored: dict[str, Storage],
    moments: dict[str, Storage],
    device: torch.device,
) -> None:
    """Copy a parameter's saved state into `state`: moments that need no conversion to the last bit.

    `stored` and `moments`: how each moment is stored in the file and in `state`.
    """
    loaded = {**saved, "step": torch.as_tensor(saved["step"]).reshape(())}
    if not all(_codes_can_stay(stored[name], storage) for name, storage in moments.items()):
        on_device = {key: tensor.detach().to(device) for key, tensor in saved.items() if key != "step"}
        loaded.update(convert_state(on_device, stored, moments))
    for key, tensor in state.items():
        tensor.copy_(loaded[key].detach())  # may cast: torch.optim.AdamW saves bf16 moments of bf16 parameters
