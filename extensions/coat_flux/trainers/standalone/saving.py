"""A save of the stand-alone trainer; `saves.commit` makes it whole or not at all.

    <run>/coat/state-000000500/   the set of 500 optimizer steps:
        published.safetensors     the LoRA (the EMA where one is kept) in save.dtype; of full fine-tuning a folder
                                  published/ with the whole model, see `full`
        optimizer.pt              optimizer.state_dict()
        ...                       what a resume needs besides, see `saves.state`
    <run>/<name>_000000500.safetensors, <run>/optimizer.pt   the first two, published: hard links where possible

LoRA keys are ai-toolkit's, `transformer.<module>.lora_A.weight`, which `FluxPipeline.load_lora_weights` reads.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from coat_core.optim.sharded import ShardedFP8AdamW, gather

from ...base.files import discard
from ...saves.commit import commit
from ...saves.rng import rng_state
from ...saves.state import OPTIMIZER_FILE, STANDALONE, RunState, save_tensors
from ..full import PART, ModelFiles
from ..processes import exchange

__all__ = ["lora_metadata", "rotate_saves", "save_checkpoint", "save_dtype", "save_name", "whole_parts"]

PUBLISHED_FILE = "published.safetensors"
MODEL_FOLDER = "published"
FP32_BYTES = 4
SAVE_DTYPES = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
SAVE_DTYPES |= {"float32": torch.float32, "fp32": torch.float32, "float": torch.float32}


def save_name(name: str, step: int | None, *, full: bool = False) -> str:
    """Name of a save: `<name>_000000500.safetensors`, `<name>.safetensors` without a step; `full`: a folder's name."""
    ending = "" if full else ".safetensors"
    return f"{name}{ending}" if step is None else f"{name}_{step:09d}{ending}"


def lora_metadata(
    name: str,
    *,
    step: int,
    epoch: int,
    trigger_word: str | None = None,
    meta: Mapping[str, Any] | None = None,
    coat: Mapping[str, Any] | None = None,
    got: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Metadata of a saved LoRA, keys and form as ai-toolkit's; every value a string, JSON where it is not plain text.

    Args:
        name: the job's name.
        step: optimizer steps done.
        epoch: passes over the data done.
        trigger_word: goes into `ss_tag_frequency` where given.
        meta: the config's own `meta` block; `[name]` in it is replaced.
        coat: the coat block as asked for, under our own key `coat`.
        got: what became of it, `CoatReport.metadata()`.
    """
    fields: dict[str, Any] = json.loads(json.dumps(dict(meta or {})).replace("[name]", name))
    fields["training_info"] = {"step": step, "epoch": epoch}
    fields["ss_base_model_version"] = "flux.1"
    fields["ss_output_name"] = name
    if trigger_word:
        fields["ss_tag_frequency"] = {f"1_{trigger_word}": {trigger_word: 1}}
    try:
        software = version("coat-flux")
    except PackageNotFoundError:
        software = "unknown"
    fields["software"] = {"name": "coat-flux", "version": software}
    if coat is not None:
        fields["coat"] = dict(coat)
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return text | dict(got or {}) | {"format": "pt"}


def save_dtype(name: str) -> torch.dtype:
    """The torch dtype of `save.dtype`.

    Raises:
        ValueError: unknown name.
    """
    if name not in SAVE_DTYPES:
        raise ValueError(f"save.dtype={name!r}: must be one of {', '.join(SAVE_DTYPES)}")
    return SAVE_DTYPES[name]


def whole_parts(
    trained: Mapping[str, Tensor], average: Mapping[str, Tensor] | None, optimizer: Optimizer, keep: bool
) -> dict[str, Any]:
    """What one process hands to `save_checkpoint`; shards are gathered, for which all processes call this together.

    Args:
        trained: by name.
        average: of them, where one is kept.
        optimizer: of them.
        keep: whether this process saves: only there is all of it, of shards as copies in CPU memory.

    Raises:
        LostProcessError: a process has ended.
    """
    if not isinstance(optimizer, ShardedFP8AdamW):
        return {"lora": trained, "ema": average, "optimizer": optimizer.state_dict()}
    with exchange():
        lora, ema = gather(trained, keep), None if average is None else gather(average, keep)
        return {"lora": lora, "ema": ema, "optimizer": optimizer.whole_state_dict(keep)}


def save_checkpoint(
    run_dir: Path,
    file_name: str,
    *,
    lora: Mapping[str, Tensor],
    ema: Mapping[str, Tensor] | None,
    optimizer: Mapping[str, Any],
    record: Mapping[str, Any],
    metadata: Mapping[str, str],
    dtype: torch.dtype,
    check: Callable[[Path], None],
    apart: int = 1,
    model: ModelFiles | None = None,
) -> Path:
    """Write and commit a set, and publish its LoRA and `optimizer.pt`; of the sets before one is kept.

    Args:
        run_dir: the run's folder.
        file_name: of the LoRA, from `save_name`.
        lora: raw LoRA parameters by saved name.
        ema: their average, where one is kept; it is what the LoRA file then holds.
        optimizer: `optimizer.state_dict()`: tensors, numbers, strings.
        record: for `state.json`, with the step.
        metadata: of the LoRA file, from `lora_metadata`.
        dtype: of the LoRA file.
        check: is given the LoRA file before anything is committed; what it raises leaves the checkpoint before.
        apart: steps that the older set is behind.
        model: of full fine-tuning: a whole model is published in place of a LoRA file.

    Returns:
        The LoRA file, or the model's folder.

    Raises:
        SaveError: the disk is full or cannot be written; the checkpoint before is as it was.
    """
    published, rng = lora if ema is None else ema, rng_state()
    inside = PUBLISHED_FILE if model is None else MODEL_FOLDER
    as_trained = model is not None and ema is None and all(tensor.dtype == dtype for tensor in lora.values())
    raw = {} if as_trained else lora

    def write(folder: Path) -> None:
        if model is None:
            save_tensors(folder / inside, {name: value.to(dtype) for name, value in published.items()}, metadata)
        else:
            model.write(folder / inside, published, dtype, metadata)
        with (folder / OPTIMIZER_FILE).open("wb") as file:
            torch.save(dict(optimizer), file)
        RunState.write(folder, STANDALONE, record, raw, ema, rng)
        check(folder / inside)

    elements = sum(tensor.numel() for tensor in lora.values())
    loose = sum(tensor.nbytes for tensor in (*_tensors(optimizer), *rng.values(), *raw.values()))
    given = elements * dtype.itemsize if model is None else model.nbytes(dtype)
    needed = given + elements * FP32_BYTES * (ema is not None) + loose
    publish = {file_name: inside, OPTIMIZER_FILE: OPTIMIZER_FILE}
    commit(run_dir, record["step"], write, publish, needed_bytes=needed, apart=apart)
    return run_dir / file_name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def rotate_saves(run_dir: Path, name: str, keep: int) -> list[Path]:
    """Remove all but the newest `keep` step saves, `<name>_<step>.safetensors` or a whole model's folder of that name.

    The final one is never touched.

    Returns:
        What was removed.
    """
    pattern = re.compile(re.escape(name) + r"_\d{9}(\.safetensors)?")
    found = (path for path in run_dir.glob(f"{glob.escape(name)}_*") if pattern.fullmatch(path.name))
    saves = sorted(path for path in found if path.suffix or (path / PART).is_dir())
    old = saves[: max(len(saves) - keep, 0)]
    for path in old:
        discard(path)
    return old
