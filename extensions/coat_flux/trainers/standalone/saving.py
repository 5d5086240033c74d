"""Saves of the stand-alone trainer; `saves.commit` makes them atomic.

    <run>/coat/state-000000500/   the set of 500 optimizer steps:
        published.safetensors     the LoRA (the EMA, if any) in save.dtype; of full fine-tuning a folder published/
                                  with the whole model, see `full`
        optimizer.pt              optimizer.state_dict()
        ...                       the rest of a resume's state, see `saves.state`
    <run>/<name>_000000500.safetensors, <run>/optimizer.pt   the first two, published: hard links where possible

LoRA keys are ai-toolkit's, `transformer.<module>.lora_A.weight`, which `FluxPipeline.load_lora_weights` reads.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from coat_core.optim.sharded import ShardedFP8AdamW, gather

from ...base.files import discard
from ...config.job import JobConfig
from ...export.check import check_export
from ...saves.commit import commit
from ...saves.rng import rng_state
from ...saves.state import OPTIMIZER_FILE, STANDALONE, RunState, execution_of, save_tensors
from ...watch.guard import WINDOW
from ..full import PART, ModelFiles, check_model
from ..processes import exchange
from .loading import base_weights

if TYPE_CHECKING:
    from .session import Session

__all__ = ["lora_metadata", "rotate_saves", "save", "save_dtype", "save_name", "trusted_after"]

PUBLISHED_FILE = "published.safetensors"
MODEL_FOLDER = "published"
FP32_BYTES = 4
SAVE_DTYPES = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
SAVE_DTYPES |= {"float32": torch.float32, "fp32": torch.float32, "float": torch.float32}


def save_name(name: str, step: int | None, *, full: bool = False) -> str:
    """Name of a save: `<name>_000000500.safetensors`, `<name>.safetensors` without a step; `full`: a folder's name."""
    ending = "" if full else ".safetensors"
    return f"{name}{ending}" if step is None else f"{name}_{step:09d}{ending}"


def save_dtype(name: str) -> torch.dtype:
    """The torch dtype of `save.dtype`; ValueError if unknown."""
    if name not in SAVE_DTYPES:
        raise ValueError(f"save.dtype={name!r}: must be one of {', '.join(SAVE_DTYPES)}")
    return SAVE_DTYPES[name]


def trusted_after(job: JobConfig) -> int:
    """Steps after which a state is known to be good if no doubt arose: the guard's longest delay."""
    return min(job.save.save_every, WINDOW)


def save(session: Session, *, final: bool) -> Path:
    """Write and commit a set, publish its LoRA or model and `optimizer.pt`; returns the published path.

    All processes call it together, to exchange shards; the main process writes. One earlier set is kept.

    Raises:
        DeadRunError: what is trained is not worth saving.
        ExportError: the LoRA cannot be read back; the previous checkpoint is intact.
        SaveError: the disk is full or cannot be written; the previous checkpoint is intact.
    """
    job, optimizer, is_main = session.job, session.optimizer, session.workers.is_main
    path = job.folder / save_name(job.name, None if final else session.step, full=job.full)
    session.watch.guard.check_now(session.step)
    with session.watch.phases.during("save"):
        record = {
            **session.record,
            "optimizer": job.train.optimizer,
            "sampler": session.sampler.state_dict(),
            "guard": session.watch.state_dict(),
            "path": execution_of(session.transformer, recomputed=True),
            "identity": session.identity,
            "step": session.step,
        }
        lora: Mapping[str, Tensor] = session.lora
        average: Mapping[str, Tensor] = {} if session.ema is None else session.ema.shadow
        if isinstance(optimizer, ShardedFP8AdamW):
            with exchange():
                lora, average = gather(lora, is_main), gather(average, is_main)
                states = optimizer.whole_state_dict(is_main)
        else:
            states = optimizer.state_dict()
        if is_main:
            _write(session, path, record, lora, average, states, final=final)
    session.workers.wait()
    return path


def _write(
    session: Session,
    path: Path,
    record: Mapping[str, Any],
    lora: Mapping[str, Tensor],
    average: Mapping[str, Tensor],
    states: Mapping[str, Any],
    *,
    final: bool,
) -> None:
    job, rng, dtype = session.job, rng_state(), save_dtype(session.job.save.dtype)
    published = average or lora
    metadata = lora_metadata(
        job.name,
        step=session.step,
        epoch=session.epoch,
        trigger_word=job.trigger_word,
        meta=job.meta,
        coat=job.coat.to_dict(),
        got=None if session.report is None else session.report.metadata(),
    )
    model = ModelFiles(session.transformer, base_weights(job.model.name_or_path)) if job.full else None
    as_trained = model is not None and not average and all(tensor.dtype == dtype for tensor in lora.values())
    raw = {} if as_trained else lora
    inside = PUBLISHED_FILE if model is None else MODEL_FOLDER

    def write(folder: Path) -> None:
        if model is None:
            save_tensors(folder / inside, {name: value.to(dtype) for name, value in published.items()}, metadata)
        else:
            model.write(folder / inside, published, dtype, metadata)
        with (folder / OPTIMIZER_FILE).open("wb") as file:
            torch.save(dict(states), file)
        RunState.write(folder, STANDALONE, record, raw, average, rng)
        if model is None:
            checked = _check_lora(session, folder / inside, final=final)
        else:
            checked = check_model(folder / inside, session.lora)
        session.log.info(f"{path.name}: {checked}")

    elements = sum(tensor.numel() for tensor in lora.values())
    loose = sum(tensor.nbytes for tensor in (*_tensors(states), *rng.values(), *raw.values()))
    needed = elements * dtype.itemsize if model is None else model.nbytes(dtype)
    needed += elements * FP32_BYTES * bool(average) + loose
    publish = {path.name: inside, OPTIMIZER_FILE: OPTIMIZER_FILE}
    commit(job.folder, session.step, write, publish, needed_bytes=needed, apart=trusted_after(job))
    for old in rotate_saves(job.folder, job.name, job.save.max_step_saves_to_keep):
        session.log.detail(f"Removing old save: {old}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _check_lora(session: Session, path: Path, *, final: bool) -> str:
    if not final and not any(up.any() for name, up in load_file(path).items() if ".lora_B." in name):
        return f"every lora_B is still zero in {session.job.save.dtype}, this LoRA has no effect yet"
    return check_export(path, expected={name: tuple(param.shape) for name, param in session.lora.items()}).line()


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
    """Metadata of a saved LoRA, keys and form as ai-toolkit's; `[name]` in the config's `meta` is replaced."""
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


def rotate_saves(run_dir: Path, name: str, keep: int) -> list[Path]:
    """Remove all but the newest `keep` step saves (never the final one); returns the removed files or folders."""
    pattern = re.compile(re.escape(name) + r"_\d{9}(\.safetensors)?")
    named = (path for path in run_dir.glob(f"{glob.escape(name)}_*") if pattern.fullmatch(path.name))
    saves = sorted(path for path in named if path.suffix or (path / PART).is_dir())
    old = saves[: max(len(saves) - keep, 0)]
    for path in old:
        discard(path)
    return old
