"""The memory report inside ai-toolkit: its parts by name, its phases by hook, its config for the prediction.

`load` goes on until the data sets are loaded, `cache` until the training loop; what ai-toolkit samples and saves lies
between its hooks, so `CoatFluxTrainer` wraps those two methods.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...config.job import JobConfig
    from ...watch.phases import PhaseTracker

__all__ = ["JSON_FILE", "hold_models", "hold_training", "job_config", "tracker"]

JSON_FILE = Path("coat") / "memory.json"


def tracker(device: Any, save_root: str, is_main: bool, compiled: bool) -> PhaseTracker:
    """Return the tracker of a run that begins to load its model, which ai-toolkit may compile."""
    from ...watch.phases import PhaseTracker

    made = PhaseTracker(device, Path(save_root) / JSON_FILE if is_main else None, counts=not compiled)
    made.enter("load")
    return made


def hold_models(phases: PhaseTracker, sd: Any, text_encoders: Iterable[Any]) -> None:
    """Count the transformer, the VAE and the text encoders of ai-toolkit's `StableDiffusion`."""
    from ...blocks.held import module_tensors

    phases.hold("transformer", sd.unet, module_tensors)
    phases.hold_models(getattr(sd, "vae", None), text_encoders)


def hold_training(phases: PhaseTracker, network: Any, optimizer: Any, ema: Any) -> None:
    """Count the adapters, their gradients, the optimizer's states and the EMA."""
    from ...blocks.held import gradients, state_tensors, trained

    if network is not None:
        phases.hold("lora", network, trained)
        phases.hold("gradients", network, gradients)
    phases.hold("optimizer", optimizer, state_tensors)
    if ema is not None:
        phases.hold("ema", ema, lambda average: average.shadow_params)


def job_config(name: str, process: Mapping[str, Any], file: str) -> JobConfig:
    """The job as `coat-flux plan` reads it.

    Raises:
        ConfigError: it has what the stand-alone trainer refuses.
    """
    from ...config.job import JobConfig

    raw = {"job": "extension", "config": {"name": name, "process": [copy.deepcopy(dict(process))]}}
    return JobConfig.from_dict(raw, file=file)
