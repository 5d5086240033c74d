"""The optimizer name `coat_fp8_adamw` in ai-toolkit."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ...base.names import COAT_OPTIMIZER
from . import host
from .contract import require_module
from .host import OPTIMIZER_MODULE, info, load_core
from .quantizer import report_stored_linears

if TYPE_CHECKING:
    import torch

LOAD_ERROR = "_coat_flux_load_error"  # attribute of our optimizer: of the last `load_state_dict`
logger = logging.getLogger(__name__)


def install_optimizer() -> None:
    """Wrap ai-toolkit's `get_optimizer`; raises AIToolkitError."""
    require_module(OPTIMIZER_MODULE)
    original = sys.modules[OPTIMIZER_MODULE].get_optimizer
    signature = inspect.signature(original)

    def get_optimizer(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        report_stored_linears()  # the model is loaded, and every training job passes here
        if str(values["optimizer_type"]).lower() != COAT_OPTIMIZER:
            return original(*args, **kwargs)
        return make_optimizer(values["params"], float(values["learning_rate"]), values["optimizer_params"])

    host.wrap_everywhere("get_optimizer", original, get_optimizer)


def make_optimizer(params: Any, lr: float, optimizer_params: dict | None) -> torch.optim.Optimizer:
    """The optimizer of a job; `load_state_dict` records failures, and keeps the config's hyper-parameters."""
    load_core()
    from ..optimizer import build_optimizer, describe_optimizer, restore_optimizer

    host.show_logs()
    optimizer = build_optimizer(params, lr, host.config_or_default(), dict(optimizer_params or {}))
    load = optimizer.load_state_dict

    def load_state_dict(state_dict: dict) -> None:
        try:
            if not optimizer.state:  # loaded from a file to the GPU it was saved from
                for values in state_dict["state"].values():
                    for key, value in values.items():
                        values[key] = value.cpu() if hasattr(value, "cpu") else value
            with host.patched(optimizer, load_state_dict=load):
                changes = restore_optimizer(optimizer, state_dict)
        except Exception as error:
            setattr(optimizer, LOAD_ERROR, error)
            logger.error("the optimizer state cannot be loaded: %s", error)
            raise
        for change in changes:
            info(f"resume: the config's optimizer settings replace the saved ones: {change}")

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    info(f"optimizer {COAT_OPTIMIZER}: {describe_optimizer(optimizer)}")
    return optimizer


def check_optimizer(process: Any) -> tuple[str, str, str]:
    """RuntimeError if `optimizer.pt` was not loaded; else (asked, got, why) for the start table."""
    from ..optimizer import describe_optimizer

    name = process.train_config.optimizer
    optimizer = process.optimizer
    network = process.network
    if name.lower() != COAT_OPTIMIZER:
        return name, name, f"moments in FP8 are for {COAT_OPTIMIZER}"
    path = os.path.join(process.save_root, "optimizer.pt")
    if os.path.exists(path):
        remedy = "restore it, or start a new run: another config.name"
        if network is not None:
            remedy += ", from the LoRA: network.pretrained_lora_path"
        error = getattr(optimizer, LOAD_ERROR, None)
        if error is not None:
            raise RuntimeError(f"resume: {path} could not be loaded ({error}); {remedy}")
        if not optimizer.state:
            if network is None or not network.did_change_weights:
                raise RuntimeError(f"resume: {path} exists but ai-toolkit did not load it; {remedy}")
            info(f"note: the LoRA's shape changed, so {path} was not loaded: moments start fresh")
    return name, describe_optimizer(optimizer), ""
