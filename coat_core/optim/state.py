"""FP8AdamW's state per parameter: reading and writing moments, checking and converting a state file.

    step                    fp32 []; on the CPU unless capturable
    exp_avg, exp_avg_sq     fp32; the parameter's shape
    …_codes                 or 8-bit codes; the parameter's shape
    …_scale                 fp32 [n_blocks]; of 8-bit codes
    …_exponent, …_center    fp32 [n_blocks]; of FP8 with expansion
    exp_avg_sq_exponent     fp32 [n_blocks]; of uint8_log

Under torch's own names, torch.optim.AdamW would read codes as values.
Only plain tensors, so that `torch.load(weights_only=True)` reads them. Blocks run over the flattened parameter.
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
MOMENT_OF = {name + suffix: name for name in MOMENTS for suffix in ("", "_codes")}  # by key
State = dict[str, Tensor]


class Storage(NamedTuple):
    """How one moment is stored."""

    format: Format | None  # None for fp32
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
    stored = {}
    for name, fmt in zip(MOMENTS, (m1_format, m2_format), strict=True):
        expands = config.use_dynamic_range_expansion and fmt is not None and fmt.dtype.is_floating_point
        stored[name] = Storage(fmt, config.block_size, config.expansion if expands else None)
    return stored


def state_bytes(config: FP8QuantizationConfig, sizes: Iterable[int]) -> int:
    """The bytes of the moments of parameters, with their scales."""
    stored, total = storages(config), 0
    for size, count in Counter(sizes).items():
        for moment in stored.values():
            numbers = len(moment.per_block) * n_blocks(size, moment.block_size)
            total += count * (size * moment.dtype.itemsize + 4 * numbers)
    return total


def empty_moment(blocks: int, storage: Storage, device: torch.device) -> Moment:
    """An all-zero packed moment of `blocks` blocks: zero codes, and 1 for every per-block number."""
    codes = torch.zeros((blocks, storage.block_size), dtype=storage.dtype, device=device)
    return Moment(codes, torch.ones((len(storage.per_block), blocks), dtype=torch.float32, device=device))


def moment_views(name: str, moment: Moment, storage: Storage, first: int, shape: torch.Size) -> State:
    """The state entries of a parameter of `shape` whose blocks of a packed moment start at `first`."""
    after = first + n_blocks(shape.numel(), storage.block_size)
    flat = moment.codes.view(-1)[first * storage.block_size :][: shape.numel()]
    numbers = moment.numbers[:, first:after]
    suffixed = {f"{name}_{suffix}": row for suffix, row in zip(storage.per_block, numbers, strict=True)}
    key = name if storage.format is None else f"{name}_codes"
    return {key: flat.view(shape), **suffixed}


def read_state(state: State, moments: dict[str, Storage]) -> tuple[Tensor, Tensor]:
    """Return exp_avg and exp_avg_sq of one parameter in fp32, in its shape."""
    saved = next(state[key] for key in MOMENT_OF if key in state)
    shape, device = saved.shape, saved.device
    block_size = max(storage.block_size for storage in moments.values())  # fp32 can be read in blocks of any size
    packed = []
    for name, storage in moments.items():
        storage = storage._replace(block_size=block_size)
        packed.append(empty_moment(n_blocks(shape.numel(), block_size), storage, device))
        for key, view in moment_views(name, packed[-1], storage, 0, shape).items():
            view.copy_(state[key])
    m, v = read_moments(packed[0], packed[1], slice(None))
    return m.view(-1)[: shape.numel()].view(shape), v.view(-1)[: shape.numel()].view(shape)


def _same_storage(old: Storage, new: Storage) -> bool:
    """Whether codes can stay: reading them does not depend on the expansion's constants."""
    if old.format is None or new.format is None:
        return old.format is new.format
    return (old.format, old.block_size, old.expansion is None) == (new.format, new.block_size, new.expansion is None)


def convert_state(state: State, old: dict[str, Storage], new: dict[str, Storage]) -> State:
    """The moments of one parameter that are stored in another way, through fp32 values on their device."""
    values = read_state(state, old)
    shape, device = values[0].shape, values[0].device
    block_size = new["exp_avg"].block_size
    expansion = new["exp_avg"].expansion or new["exp_avg_sq"].expansion
    chunk = Chunk(0, block_size)
    chunk.add(0, 0, shape.numel())
    m, v = (chunk.gather([moment.reshape(-1)]) for moment in values)
    packed = {name: empty_moment(chunk.blocks[0], storage, device) for name, storage in new.items()}
    write_moments(packed["exp_avg"], packed["exp_avg_sq"], slice(None), m, v, expansion or ExpansionConfig())
    views: State = {}
    for name, storage in new.items():
        if not _same_storage(old[name], storage):
            views.update(moment_views(name, packed[name], storage, 0, shape))
    return views


UNQUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAME_NETWORK = "use the network settings (rank, targets) of the saved run"


def check_groups(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError unless this is an optimizer's state with as many groups and parameters as `groups`."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"keys {sorted(map(str, state_dict))}: must be 'state' and 'param_groups'")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    own = [len(group["params"]) for group in groups]
    if saved != own:
        raise ValueError(
            f"param_groups: the file has groups of {saved} parameters, the optimizer of {own}; {SAME_NETWORK}"
        )


def saved_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], moments: dict[str, Storage]
) -> list[tuple[Tensor, dict[str, Any], dict[str, Storage]]]:
    """Each parameter with its state in the file, and how each moment is stored there, all checked.

    The file is one of FP8AdamW in any configuration (its groups' "fp8" entry) or of torch.optim.AdamW.
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
                if not _same_storage(stored[name], new):
                    change = "dequantized" if new.format is None else "re-quantized"
                    changes.add(f"{name}: {stored[name].describe()} -> {new.describe()}, {change}")
    if changes:
        logger.warning("FP8AdamW: %s", "; ".join(sorted(changes)))
    return saved


def _storages_in_file(
    where: str, saved: dict[str, Any], param: Tensor, fp8: dict[str, Any] | None
) -> dict[str, Storage]:
    for key in ("step", *MOMENTS):
        if not saved.keys() & {key, f"{key}_codes"}:
            raise ValueError(f"{where}['{key}'] is missing: not a file of FP8AdamW or AdamW")
    storages: dict[str, Storage] = {}
    keys = {"step"}
    per_block: dict[str, int] = {}  # of each expected entry of numbers how many
    for name, choices in zip(MOMENTS, (M1_FORMATS, M2_FORMATS), strict=True):
        formats = {fmt.dtype: fmt for fmt in choices.values()}
        key = name if name in saved else f"{name}_codes"
        keys.add(key)
        tensor = saved[key]
        dtype = tensor.dtype
        if key == name:
            if dtype not in UNQUANTIZED_DTYPES:
                rule = f"must be floating; codes are in '{name}_codes'"
                raise ValueError(f"{where}['{name}'] is {dtype}: {rule}")
            storages[name] = Storage(None, 16, None)  # can be read in blocks of any size
        elif dtype not in formats:
            rule = f"must be the codes of {', '.join(choices)}"
            raise ValueError(f"{where}['{key}'] is {dtype}: {rule}")
        elif not fp8 or not {"block_size", "use_dynamic_range_expansion"} <= fp8.keys():
            raise ValueError(
                f"param_groups 'fp8'={fp8!r}: must give block_size and use_dynamic_range_expansion of the codes"
            )
        else:
            config = FP8QuantizationConfig(block_size=fp8["block_size"])
            expanded = dtype.is_floating_point and fp8["use_dynamic_range_expansion"]
            storages[name] = Storage(formats[dtype], config.block_size, config.expansion if expanded else None)
        if tensor.shape != param.shape:
            raise ValueError(
                f"{where}['{key}'] has shape {tuple(tensor.shape)}: must be {tuple(param.shape)}; {SAME_NETWORK}"
            )
        blocks = n_blocks(param.numel(), storages[name].block_size)
        per_block.update({f"{name}_{suffix}": blocks for suffix in storages[name].per_block})
    described = ", ".join(f"{name} in {storage.describe()}" for name, storage in storages.items())
    unknown = saved.keys() - per_block.keys() - keys
    if unknown:
        raise ValueError(f"{where}['{min(unknown)}']: does not belong to {described}")
    for key, blocks in per_block.items():
        numbers = saved.get(key)
        if not isinstance(numbers, Tensor) or numbers.dtype != torch.float32 or numbers.shape != (blocks,):
            rule = f"must be torch.float32 of shape ({blocks},) with {described}"
            raise ValueError(f"{where}['{key}'] is missing, was cast or has another shape: {rule}")
    return storages


def write_state(
    state: State,
    saved: dict[str, Any],
    stored: dict[str, Storage],
    moments: dict[str, Storage],
    device: torch.device,
) -> None:
    """Copy a saved state into a parameter's own; tensors stored as configured are copied to the last bit."""
    values = {**saved, "step": torch.as_tensor(saved["step"]).reshape(())}
    if not all(_same_storage(stored[name], storage) for name, storage in moments.items()):
        here = {key: tensor.detach().to(device) for key, tensor in saved.items() if key != "step"}
        values.update(convert_state(here, stored, moments))
    for key, own in state.items():
        own.copy_(values[key].detach())  # an unquantized moment may come as bf16
