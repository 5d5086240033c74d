"""Full fine-tuning in both trainers: the trained parameters, the update inside backward, and saves of the model.

Trained linears of the blocks multiply in FP8, with codes cast from their weights (`FP8TrainableLinear`); embedders,
norms and modulation train in `train.dtype`. Untrained linears hold codes, as under a LoRA.

With `train.fused_backward` the last micro-batch's backward pass updates each parameter as soon as its gradient is
complete, and frees the gradient. So nothing can depend on all gradients: each is clipped to `train.max_grad_norm` by
itself, a nonfinite one skips its own parameter, a nonfinite loss skips all. One process only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn

from coat_core.optim import FP8AdamW

from ..blocks.models import trained_names
from ..blocks.runner import BlockRunner
from ..config.coat import COATConfig
from ..saves.errors import ResumeError
from ..saves.state import REMEDY, SHARD_BYTES, load_tensors, restore_tensors, save_tensors
from .weights import INDEX, WEIGHTS, Weights

PART = "transformer"  # folder of the model in a save
CLIP_EPS = 1e-6  # as torch's clip_grad_norm_


class Chosen:
    """The `parameters` and `linears` (full names) that `coat.include` and `coat.exclude` choose, before conversion."""

    def __init__(self, coat: COATConfig) -> None:
        self._coat = coat
        self.parameters: list[str] = []
        self.linears: set[str] = set()

    def find(self, model: nn.Module) -> set[str]:
        """Choose from a model, perhaps on the meta device; returns `linears`. ConfigError if there is none to train."""
        names = [name for name, _ in model.named_parameters()]
        self.parameters = trained_names(names, self._coat.include, self._coat.exclude)
        chosen = set(self.parameters)
        linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        self.linears = {name for name in linears if f"{name}.weight" in chosen}
        return self.linears

    def train(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Make these parameters, and no others, trainable; returns them by name."""
        model.requires_grad_(False)
        own = dict(model.named_parameters())
        return {name: own[name].requires_grad_() for name in self.parameters}


def make_states(optimizer: Any, transformer: nn.Module) -> None:
    """Create or restore the optimizer's large states before the first step: blocks budget the memory that remains."""
    runner = BlockRunner.of(transformer)
    if isinstance(optimizer, FP8AdamW):
        optimizer.make_states()
        if runner is not None:
            runner.states_are_made = True


class UpdateInBackward:
    """Updates parameters in backward, inside `updating`, each gradient clipped to `max_norm` by itself.

    `begins` is called before the first update of a backward pass.
    """

    def __init__(
        self, optimizer: FP8AdamW, params: list[nn.Parameter], max_norm: float, begins: Callable[[], None]
    ) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._begins = begins
        self._skip: Tensor | None = None  # fp32 []: 1 where the loss is not finite; None outside of `updating`
        self._squares: Tensor | None = None
        self.norm = torch.zeros(())  # fp32 []: L2, of all gradients of the last `updating`, before clipping
        for param in params:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @contextmanager
    def updating(self, skip: Tensor) -> Iterator[None]:
        """In this block a complete gradient updates its parameter and is freed; `skip` fp32 []: 1 updates nothing."""
        self._skip, self._squares = skip, None
        try:
            yield
        finally:
            self._skip = self._optimizer.found_inf = None
            self.norm = torch.zeros(()) if self._squares is None else self._squares.sqrt()

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        if self._skip is None or param.grad is None:
            return
        if self._squares is None:
            self._begins()
            self._squares = torch.zeros((), device=param.device)
        norm = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
        self._squares += norm.square()
        param.grad.mul_((self._max_norm / (norm + CLIP_EPS)).clamp(max=1.0))
        skip = torch.maximum(self._skip, 1.0 - norm.isfinite().to(torch.float32))
        if self._optimizer.defaults["capturable"]:
            self._optimizer.found_inf = skip
        if self._optimizer.found_inf is not None or not skip:
            self._optimizer.step_parameter(param)
        param.grad = None


def write_model(
    folder: Path,
    model: Any,
    base: Weights,
    trained: Mapping[str, Tensor],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """Write a transformer in diffusers' layout into `folder`/`PART`: config, shards in `dtype` and index.

    `base` has the weights that the run started from; CheckpointError if they are unreadable.
    """
    target = folder / PART
    target.mkdir(parents=True)
    model.save_config(target)
    sizes = {name: dtype.itemsize * math.prod(place.shape) for name, place in base.places.items()}
    pattern = WEIGHTS.replace(".", "{suffix}.")
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=pattern, max_shard_size=SHARD_BYTES
    )
    for file, names in split.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            if name in trained:
                tensors[name] = trained[name].detach().to("cpu", dtype)
            else:
                tensor = base.read(name)
                tensors[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        save_tensors(target / file, tensors, metadata)
    base.close()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def check_model(folder: Path, trained: Mapping[str, Tensor]) -> str:
    """Check that every trained tensor of a save is there and finite; returns a line, or raises ResumeError."""
    missing = dict(trained)
    size = 0
    for file in sorted((folder / PART).glob("*.safetensors")):
        size += file.stat().st_size
        for name, tensor in load_tensors(file).items():
            expected = missing.pop(name, None)
            if expected is not None and (tensor.shape != expected.shape or not tensor.isfinite().all()):
                raise ResumeError(f"{file}: {name} is not as it was trained, or not finite; {REMEDY}")
    if missing:
        raise ResumeError(f"{folder}: lacks {next(iter(missing))}; {REMEDY}")
    return f"{len(trained)} trained tensors read back from {PART}/, {size / 1e9:.2f} GB"


def restore_model(trained: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the trained tensors of a save into those of a run, shard by shard; ResumeError if they do not fit."""
    missing = dict(trained)
    for file in sorted((folder / PART).glob("*.safetensors")):
        saved = {name: tensor for name, tensor in load_tensors(file).items() if name in missing}
        restore_tensors({name: missing.pop(name) for name in saved}, saved, file)
    if missing:
        raise ResumeError(f"{folder / PART}: lacks {next(iter(missing))} of this run; {REMEDY}")
