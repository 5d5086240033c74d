"""What must be true of the ai-toolkit we run in, checked before a model is loaded and after the LoRA is made.

Nothing here runs for jobs that are not ours. Each failed check is one line that names the missing piece; all are
reported together, with ai-toolkit's version.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from .common import AIToolkitError, ai_toolkit_version, load_core
from .optimizer import install_optimizer, is_wrapped
from .quantizer import install_quantizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HOOKS", "check_host", "check_network", "let_lora_find", "untested_version"]

TESTED_SERIES = "0.12."
TESTED_VERSION = "0.12.26"
HOOKS = (
    "hook_before_model_load",
    "hook_after_model_load",
    "hook_add_extra_train_params",
    "before_dataset_load",
    "hook_before_train_loop",
    "hook_train_loop",
    "calculate_loss",
    "get_guided_loss",
    "get_mean_flow_loss",
    "end_step_hook",
    "sample",
    "save",
    "clean_up_saves",
    "post_save_hook",
    "update_training_metadata",
    "get_training_info",
    "done_hook",
    "on_error",
    "get_conf",
    "get_latest_save_path",
)
LORA_PARTS = ("lora_down", "lora_up")
PROCESS_MODULE = "jobs.process.BaseSDTrainProcess"


def check_host(process_class: type) -> None:
    """Check everything that can be checked without a model.

    Raises:
        AIToolkitError: naming ai-toolkit's version and every missing piece.
    """
    problems = [f"{process_class.__name__} has no {name}" for name in HOOKS if not hasattr(process_class, name)]
    for check in (load_core, install_optimizer, install_quantizer, _check_binding, _check_lora_names):
        try:
            check()
        except AIToolkitError as error:
            problems.append(str(error.piece))
    if problems:
        raise AIToolkitError("; ".join(problems))


def _check_binding() -> None:
    module = sys.modules.get(PROCESS_MODULE)
    if module is None:
        raise AIToolkitError(f"{PROCESS_MODULE} is not loaded")
    if not is_wrapped(vars(module).get("get_optimizer")):
        raise AIToolkitError(f"{PROCESS_MODULE} does not use toolkit.optimizer.get_optimizer")


def _check_lora_names() -> None:
    for name, names in _lora_name_lists():
        if "OstrisLinear" not in names:
            raise AIToolkitError(f"{name}.LINEAR_MODULES does not list OstrisLinear: LoRA would not find FP8 linears")


def _lora_name_lists() -> list[tuple[str, list[str]]]:
    lists = []
    for name in ("toolkit.lora_special", "toolkit.network_mixins"):
        try:
            lists.append((name, importlib.import_module(name).LINEAR_MODULES))
        except (ImportError, AttributeError) as error:
            raise AIToolkitError(f"{name}.LINEAR_MODULES is missing ({error})") from error
    return lists


def let_lora_find(class_name: str) -> None:
    """Add a class to those ai-toolkit's LoRA attaches to, which it finds by name. No other class has a name of ours.

    Raises:
        AIToolkitError: ai-toolkit keeps no such list.
    """
    for _, names in _lora_name_lists():
        if class_name not in names:
            names.append(class_name)


def untested_version() -> str | None:
    """Return a warning when ai-toolkit is of a series that was never tested, else None."""
    if ai_toolkit_version().startswith(TESTED_SERIES):
        return None
    return (
        f"ai-toolkit {ai_toolkit_version()} is not tested with COAT-FLUX, {TESTED_VERSION} is; its parts were checked"
    )


def check_network(network: nn.Module) -> int:
    """Check the LoRA network ai-toolkit made.

    Returns:
        How many LoRA modules it has.

    Raises:
        AIToolkitError: there are none, or they are not built as we know them.
    """
    from ...blocks.lora import base_of  # of coat_core, which `check_host` makes sure of

    modules = [module for module in network.modules() if hasattr(module, "lora_name")]
    if not modules:
        raise AIToolkitError("the LoRA network found no linear to train; check network.network_kwargs.only_if_contains")
    lost = {part: [module.lora_name for module in modules if not hasattr(module, part)] for part in LORA_PARTS}
    lost["org_module, nor an orig_module_ref"] = [module.lora_name for module in modules if base_of(module) is None]
    for part, without in lost.items():
        if without:
            raise AIToolkitError(f"LoRA modules have no {part} ({without[0]} and {len(without) - 1} more)")
    return len(modules)
