"""Full fine-tuning: a job without `network:` trains the transformer itself, saved as ai-toolkit does.

<name>_000000500/transformer/      in diffusers' layout, in `train.dtype`
<name>_000000500/aitk_meta.yaml    metadata with the step
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ...blocks.runner import BlockRunner
from ...saves.repair import MODEL_META
from ...watch.step_watch import StepWatch
from ..full import PART, Chosen, UpdateInBackward, make_states, write_model
from ..weights import folder_weights, local_folder


class FullModel:
    """The transformer that a job trains: its `linears`, and `trained` name → parameter, in backward by `fused`."""

    def __init__(self, process: Any):
        self._model: nn.Module = process.sd.unet
        self._chosen = Chosen(process.coat)
        self._base = folder_weights(local_folder(process.model_config.name_or_path, PART))
        self.linears = self._chosen.find(self._model)
        self.size = sum(parameter.numel() for parameter in self._model.parameters())
        self.trained: dict[str, nn.Parameter] = {}
        self.fused: UpdateInBackward | None = None
        process.sd.save = self.save

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Train the chosen parameters only."""
        self.trained = self._chosen.train(self._model)
        return [{"params": list(self.trained.values()), "lr": lr}]

    def begin(self, process: Any, watch: StepWatch) -> None:
        """Create the optimizer's states at the first step: until then ai-toolkit moves the model."""
        optimizer = getattr(process.optimizer, "optimizer", process.optimizer)  # without accelerate's wrapper
        make_states(optimizer, self._model)
        if not (process.get_conf("train", None) or {}).get("fused_backward"):
            return
        params = list(self.trained.values())
        norm = process.train_config.max_grad_norm
        self.fused = UpdateInBackward(optimizer, params, norm, watch.begin_update)
        runner = BlockRunner.of(self._model)
        if runner is not None:
            runner.expect(frees_gradients=True)

    def save(self, output_file: str, meta: Mapping[str, Any], save_dtype: torch.dtype | None = None) -> None:
        """Write the model, in place of ai-toolkit's method."""
        folder = Path(output_file)
        dtype = next(iter(self.trained.values())).dtype
        plain = json.loads(json.dumps(meta))
        text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
        write_model(folder, self._model, self._base, self.trained, dtype, text | {"format": "pt"})
        (folder / MODEL_META).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
