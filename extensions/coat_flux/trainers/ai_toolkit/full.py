"""Full fine-tuning: a job without `network:` trains the transformer itself.

ai-toolkit then trains every parameter that requires a gradient, and starts from its newest save in place of the model.
It saves a FLUX as a folder, whatever `save.format` and `save.dtype` say:

    <name>_000000500/transformer/      in diffusers' layout, in `train.dtype`
    <name>_000000500/aitk_meta.yaml    metadata, by which it knows the step

Here it is the same folder, and what is trained is what `coat.include` and `coat.exclude` choose. Other linears hold
codes, so what is not trained is copied from the files of the model that the run started from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...saves.repair import MODEL_META

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn

    from ...watch.step_watch import StepWatch
    from ..full import UpdateInBackward

__all__ = ["FullModel"]


class FullModel:
    """The transformer that a job trains; from here on ai-toolkit's model saves as this says.

    Args:
        process: with its model loaded, and nothing converted.

    Attributes:
        linears: full names of the linears whose weight is trained.
        size: elements of the transformer.
        trained: full name → parameter, once `param_groups` has chosen them.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
        CheckpointError: the files of the model are not whole.
    """

    def __init__(self, process: Any):
        from ..full import PART, Chosen, ModelFiles
        from ..weights import folder_weights, local_folder

        self._model: nn.Module = process.sd.unet
        self._chosen = Chosen(process.coat)
        self._files = ModelFiles(self._model, folder_weights(local_folder(process.model_config.name_or_path, PART)))
        self.linears = self._chosen.find(self._model)
        self.size = sum(parameter.numel() for parameter in self._model.parameters())
        self.trained: dict[str, nn.Parameter] = {}
        self._fused: UpdateInBackward | None = None
        process.sd.save = self.save

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Let the chosen parameters, and no others, be trained; returns them for ai-toolkit's optimizer."""
        self.trained = self._chosen.train(self._model)
        return [{"params": list(self.trained.values()), "lr": lr}]

    def begin(self, process: Any, watch: StepWatch) -> None:
        """Make the optimizer's states, and let it update in backward where `train.fused_backward` asks for that.

        To be called before the first step: until then ai-toolkit moves the model to the CPU and back, and switches its
        gradients off and on.

        Args:
            process: with its optimizer.
            watch: of the run.
        """
        from ...blocks.held import gradients
        from ...blocks.runner import BlockRunner
        from ..full import UpdateInBackward, make_states

        watch.phases.hold("gradients", self._model, gradients)
        optimizer = getattr(process.optimizer, "optimizer", process.optimizer)  # without accelerate's wrapper
        make_states(optimizer, self._model)
        if not (process.get_conf("train", None) or {}).get("fused_backward"):
            return
        params, norm = list(self.trained.values()), process.train_config.max_grad_norm
        self._fused = UpdateInBackward(optimizer, params, norm, watch.begin_update)
        runner = BlockRunner.of(self._model)
        if runner is not None:
            runner.expect(frees_gradients=True)

    def updating(self, losses: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Around the backward pass that completes the gradients of a step.

        Args:
            losses: of its micro-batches as computed: ai-toolkit puts 0 in place of NaN.
        """
        if self._fused is None:
            return nullcontext()
        return self._fused.updating(1.0 - sum(losses).isfinite().float())

    def grad_norm(self, norm: float) -> float:
        """The gradient norm of a step; `norm` where there were gradients after backward."""
        return norm if self._fused is None else float(self._fused.norm())

    # -- a save ----------------------------------------------------------------------------------------------------

    def save(self, output_file: str, meta: Mapping[str, Any], save_dtype: torch.dtype | None = None) -> None:
        """Write the model, in place of ai-toolkit's method of this name.

        Args:
            output_file: the folder to make.
            meta: of the run.
            save_dtype: not used, as in ai-toolkit: a model is saved as it is trained.
        """
        folder, dtype = Path(output_file), next(iter(self.trained.values())).dtype
        plain = json.loads(json.dumps(meta))
        text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
        self._files.write(folder, self.trained, dtype, text | {"format": "pt"})
        (folder / MODEL_META).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")

    def check(self, folder: Path) -> str:
        """Read the model back that ai-toolkit has saved into a folder; returns a line to say.

        Raises:
            ResumeError: it is not the one that was trained.
        """
        from ..full import check_model

        return check_model(next(path.parent for path in folder.glob(f"*/{MODEL_META}")), self.trained)
