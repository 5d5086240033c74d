"""What a save of the stand-alone engine holds; `checkpoint.commit` makes it whole or not at all.

    <run>/coat/state-000000500/   the set of 500 optimizer steps:
        published.safetensors     the LoRA (the EMA where one is kept) in save.dtype
        optimizer.pt              optimizer.state_dict(); loads with weights_only=True
        lora.safetensors          the raw LoRA in fp32
        ema.safetensors           its average in fp32, where one is kept
        rng.safetensors           states of the random generators (of the main process)
        state.json                step, place in the data, identity of the run, guard, path of the blocks
    <run>/<name>_000000500.safetensors, <run>/optimizer.pt   the first two, published: hard links where there are any

Saves come between optimizer steps, so there are never half-accumulated gradients to keep. LoRA keys are ai-toolkit's,
`transformer.<module>.lora_A.weight`, which `FluxPipeline.load_lora_weights` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...base.files import discard
from ...saves.commit import commit

__all__ = [
    "EMA_FILE",
    "LORA_FILE",
    "OPTIMIZER_FILE",
    "RNG_FILE",
    "STATE_FILE",
    "Checkpoint",
    "lora_metadata",
    "rotate_saves",
    "save_checkpoint",
    "save_dtype",
    "save_name",
    "step_saves",
]

PUBLISHED_FILE = "published.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
LORA_FILE, EMA_FILE, RNG_FILE = "lora.safetensors", "ema.safetensors", "rng.safetensors"
STATE_FILE = "state.json"
SAVE_DTYPES = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
SAVE_DTYPES |= {"float32": torch.float32, "fp32": torch.float32, "float": torch.float32}


def save_name(name: str, step: int | None) -> str:
    """File name of a LoRA: `<name>_000000500.safetensors`, or `<name>.safetensors` without a step."""
    return f"{name}.safetensors" if step is None else f"{name}_{step:09d}.safetensors"


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
    fields["software"] = {"name": "coat-flux", "version": _package_version()}
    if coat is not None:
        fields["coat"] = dict(coat)
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return text | dict(got or {}) | {"format": "pt"}


def _package_version() -> str:
    try:
        return version("coat-flux")
    except PackageNotFoundError:
        return "unknown"


def save_dtype(name: str) -> torch.dtype:
    """The torch dtype of `save.dtype`.

    Raises:
        ValueError: unknown name.
    """
    if name not in SAVE_DTYPES:
        raise ValueError(f"save.dtype={name!r}: must be one of {', '.join(SAVE_DTYPES)}")
    return SAVE_DTYPES[name]


@dataclass(frozen=True)
class Checkpoint:
    """Everything one save holds.

    Attributes:
        step: optimizer steps done.
        lora: raw LoRA parameters by saved name.
        ema: their average, where one is kept; it is what the LoRA file then holds.
        optimizer: `optimizer.state_dict()`: tensors, numbers, strings.
        rng: states of the random generators, `checkpoint.rng_state()`.
        metadata: of the LoRA file, from `lora_metadata`.
        record: further JSON values for `state.json`.
    """

    step: int
    lora: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] | None
    optimizer: Mapping[str, Any]
    rng: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    record: Mapping[str, Any]

    def bytes(self, dtype: torch.dtype) -> int:
        """About what it takes on disk, with a LoRA file of `dtype`."""
        elements = sum(tensor.numel() for tensor in self.lora.values())
        fp32_copies = 1 if self.ema is None else 2
        loose = [*_tensors(self.optimizer), *self.rng.values()]
        return elements * (dtype.itemsize + 4 * fp32_copies) + sum(tensor.nbytes for tensor in loose)

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Write its files into an empty folder."""
        _write(folder / PUBLISHED_FILE, self.lora if self.ema is None else self.ema, dtype, self.metadata)
        with (folder / OPTIMIZER_FILE).open("wb") as file:
            torch.save(dict(self.optimizer), file)
        _write(folder / LORA_FILE, self.lora, torch.float32)
        if self.ema is not None:
            _write(folder / EMA_FILE, self.ema, torch.float32)
        save_file(dict(self.rng), folder / RNG_FILE)
        record = json.dumps({**self.record, "step": self.step}, indent=1)
        (folder / STATE_FILE).write_text(record + "\n", encoding="utf-8")


def _write(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, metadata: Mapping[str, str] | None = None
) -> None:
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, path, dict(metadata or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def save_checkpoint(
    run_dir: Path, file_name: str, point: Checkpoint, dtype: torch.dtype, check: Callable[[Path], None], apart: int = 1
) -> Path:
    """Write and commit a set, and publish its LoRA and `optimizer.pt`; of the sets before one is kept.

    Args:
        run_dir: the run's folder.
        file_name: of the LoRA, from `save_name`.
        point: what to write.
        dtype: of the LoRA file.
        check: is given the LoRA file before anything is committed; what it raises leaves the checkpoint before.
        apart: steps that the older set is behind.

    Returns:
        The LoRA file.

    Raises:
        SaveError: the disk is full or cannot be written; the checkpoint before is as it was.
    """

    def write(folder: Path) -> None:
        point.write(folder, dtype)
        check(folder / PUBLISHED_FILE)

    publish = {file_name: PUBLISHED_FILE, OPTIMIZER_FILE: OPTIMIZER_FILE}
    commit(run_dir, point.step, write, publish, needed_bytes=point.bytes(dtype), apart=apart)
    return run_dir / file_name


def step_saves(run_dir: Path, name: str) -> list[Path]:
    """The `<name>_<step>.safetensors` files of a run, oldest step first."""
    pattern = re.compile(re.escape(name) + r"_\d{9}\.safetensors")
    return sorted(path for path in run_dir.glob("*.safetensors") if pattern.fullmatch(path.name))


def rotate_saves(run_dir: Path, name: str, keep: int) -> list[Path]:
    """Remove all but the newest `keep` step saves; the final LoRA is never touched.

    Returns:
        The files removed.
    """
    saves = step_saves(run_dir, name)
    old = saves[: max(len(saves) - keep, 0)]
    for path in old:
        discard(path)
    return old
