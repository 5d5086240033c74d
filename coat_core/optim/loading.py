"""Check a whole state file, then turn it into the state of these parameters.

Accepted: files of FP8AdamW in any configuration (the groups' "fp8" entry records it) and of torch.optim.AdamW. A moment
stored otherwise than configured is converted and named in one log line.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from coat_core.config import FP8QuantizationConfig
from coat_core.formats import M1_FORMATS, M2_FORMATS, Format
from coat_core.ops.packing import n_blocks
from coat_core.optim.state import MOMENTS, State, Storage, convert_state

logger = logging.getLogger(__name__)

UNQUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS_OF = dict(zip(MOMENTS, (M1_FORMATS, M2_FORMATS), strict=True))
PER_BLOCK = ("scale", "exponent", "center")
KEYS = {"step", *MOMENTS, *(f"{name}_{suffix}" for name in MOMENTS for suffix in PER_BLOCK)}
# Options of torch.optim.AdamW without a meaning here, and its groups' other entries.
TORCH_ONLY_OPTIONS = ("amsgrad", "foreach", "differentiable", "fused")
TORCH_GROUP_KEYS = (*TORCH_ONLY_OPTIONS, "decoupled_weight_decay")
ANOTHER_FILE = "load the optimizer state of this run, or start without one"


def check_groups(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for differing numbers of groups or parameters, an unknown index, or a file of amsgrad."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"keys {sorted(map(str, state_dict))}: must be 'state' and 'param_groups'; {ANOTHER_FILE}")
    saved_groups = state_dict["param_groups"]
    saved, own = ([len(group["params"]) for group in which] for which in (saved_groups, groups))
    if saved != own:
        raise ValueError(
            f"param_groups: the file has groups of {saved} parameters, the optimizer of {own}; use the network "
            f"settings (rank, targets) of the saved run, or {ANOTHER_FILE}"
        )
    known = {index for group in saved_groups for index in group["params"]}
    unknown = [index for index in state_dict["state"] if index not in known]
    if unknown:
        raise ValueError(f"state[{unknown[0]!r}]: no param group of the file has this parameter; {ANOTHER_FILE}")
    if any(group.get("amsgrad") for group in saved_groups):
        raise ValueError(f"amsgrad=True in the file: not supported by FP8AdamW; {ANOTHER_FILE}")


def adopt_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Convert a loaded group: drop torch-only entries, fill in missing ones, apply this optimizer's storage options."""
    for key, value in defaults.items():
        group.setdefault(key, value)
    for key in TORCH_GROUP_KEYS:  # torch itself adds `differentiable` to the defaults
        group.pop(key, None)
    group.update(fp8=defaults["fp8"], capturable=defaults["capturable"])


def saved_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], moments: dict[str, Storage]
) -> list[tuple[Tensor, dict[str, Any], dict[str, Storage]]]:
    """Return each parameter with its state in the file, and how each moment is stored there, all checked."""
    saved = []
    changes = set()
    for saved_group, group in zip(state_dict["param_groups"], groups, strict=True):
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            state = state_dict["state"].get(index)
            if not state:
                continue
            _check_keys(index, state)
            stored = {name: _storage_in_file(name, index, state, param, saved_group.get("fp8")) for name in MOMENTS}
            saved.append((param, state, stored))
            for name, new in moments.items():
                if not _same_storage(stored[name], new):
                    change = "dequantized" if new.format is None else "re-quantized"
                    changes.add(f"{name}: {stored[name].describe()} -> {new.describe()}, {change}")
    if changes:
        logger.warning("FP8AdamW: %s", "; ".join(sorted(changes)))
    return saved


def write_state(
    state: State,
    tensors: dict[str, Any],
    stored: dict[str, Storage],
    moments: dict[str, Storage],
    device: torch.device,
) -> None:
    """Copy a saved state into a parameter's own; tensors stored as configured are copied to the last bit."""
    values = {**tensors, "step": torch.as_tensor(tensors["step"]).reshape(())}
    changed = tuple(name for name, storage in moments.items() if not _same_storage(stored[name], storage))
    if changed:
        here = {key: tensor.detach().to(device) for key, tensor in values.items() if key != "step"}
        for key, tensor in convert_state(here, stored, moments).items():
            if _moment_of(key) in changed:
                values[key] = tensor
    for key, own in state.items():
        own.copy_(values[key].detach())  # an unquantized moment may come as bf16


def _moment_of(key: str) -> str:
    return MOMENTS[1] if key.startswith(MOMENTS[1]) else MOMENTS[0]


def _check_keys(index: int, saved: dict[str, Any]) -> None:
    for key in ("step", *MOMENTS):
        if key not in saved:
            raise ValueError(f"state[{index}]['{key}'] is missing: not a file of FP8AdamW or AdamW; {ANOTHER_FILE}")
    for key, value in saved.items():
        if key not in KEYS:
            raise ValueError(f"state[{index}]['{key}']: not an entry of FP8AdamW; {ANOTHER_FILE}")
        if key != "step" and not isinstance(value, Tensor):
            raise ValueError(f"state[{index}]['{key}'] is {type(value).__name__}: must be a tensor; {ANOTHER_FILE}")
    if torch.as_tensor(saved["step"]).numel() != 1:
        raise ValueError(f"state[{index}]['step']={saved['step']!r}: must be one number; {ANOTHER_FILE}")


def _storage_in_file(
    name: str, index: int, saved: dict[str, Any], param: Tensor, fp8: dict[str, Any] | None
) -> Storage:
    """Return how one moment of one parameter was stored, after checking its entries."""
    where = f"state[{index}]['{name}']"
    _check_tensor(where, saved[name], tuple(param.shape), None)
    dtype = saved[name].dtype
    suffixes = {suffix for suffix in PER_BLOCK if f"{name}_{suffix}" in saved}
    if dtype in UNQUANTIZED_DTYPES:
        if suffixes:
            raise ValueError(
                f"{where} is {dtype} although there is {name}_{min(suffixes)}: its codes were cast by whoever wrote or "
                f"loaded the file; {ANOTHER_FILE}"
            )
        return Storage(None, 16, None)  # can be read in blocks of any size
    formats = {fmt.dtype: fmt for fmt in FORMATS_OF[name].values()}
    if dtype not in formats:
        rule = f"must be floating or the codes of {', '.join(FORMATS_OF[name])}"
        raise ValueError(f"{where} is {dtype}: {rule}; {ANOTHER_FILE}")
    if not fp8 or not {"block_size", "use_dynamic_range_expansion"} <= fp8.keys():
        raise ValueError(
            f"param_groups 'fp8'={fp8!r}: must give block_size and use_dynamic_range_expansion of the codes in the "
            f"file; {ANOTHER_FILE}"
        )
    config = FP8QuantizationConfig(block_size=fp8["block_size"])
    expanded = isinstance(formats[dtype], Format) and fp8["use_dynamic_range_expansion"]
    storage = Storage(formats[dtype], config.block_size, config.expansion if expanded else None)
    blocks = (n_blocks(param.numel(), storage.block_size),)
    for suffix in storage.per_block:
        key = f"{name}_{suffix}"
        if key not in saved:
            raise ValueError(f"state[{index}]['{key}'] is missing, but there are codes of {name}; {ANOTHER_FILE}")
        _check_tensor(f"state[{index}]['{key}']", saved[key], blocks, torch.float32)
    unknown = suffixes.difference(storage.per_block)
    if unknown:
        raise ValueError(
            f"state[{index}]['{name}_{min(unknown)}']: codes that the file says are {storage.describe()} have none; "
            f"{ANOTHER_FILE}"
        )
    return storage


def _check_tensor(where: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{where} has shape {tuple(tensor.shape)}: must be {shape}, as the parameter needs; use the network "
            f"settings (rank, targets) of the saved run, or {ANOTHER_FILE}"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype}: must be {dtype}, it was cast on the way; {ANOTHER_FILE}")


def _same_storage(old: Storage, new: Storage) -> bool:
    """Whether codes can stay: reading them does not depend on the expansion's constants."""
    if old.format is None or new.format is None:
        return old.format is new.format
    return (old.format, old.block_size, old.expansion is None) == (new.format, new.block_size, new.expansion is None)
