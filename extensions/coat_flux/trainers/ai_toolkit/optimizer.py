"""The optimizer name `coat_fp8_adamw`, understood wherever ai-toolkit takes an optimizer name.

`toolkit.optimizer.get_optimizer` is imported by name into several modules, so the wrapper is put into each of them
(`common.rebind`). It is marked, and installed once however often this is imported. Every other name goes to the
original with the very arguments it came with.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...base.names import COAT_OPTIMIZER
from .common import AIToolkitError, active_config, info, load_core, rebind, show_logs
from .quantizer import say_what_is_stored

if TYPE_CHECKING:
    import torch


__all__ = ["COAT_OPTIMIZER", "check_optimizer", "install_optimizer", "is_wrapped", "load_error", "states_left_alone"]

PARAMETERS = ("params", "optimizer_type", "learning_rate", "optimizer_params")
HYPER_PARAMETERS = ("betas", "eps", "weight_decay")
_MARK = "_coat_flux_original"
_LOAD_ERROR = "_coat_flux_load_error"
_log = logging.getLogger(__name__)


def is_wrapped(function: object) -> bool:
    """Whether `function` is our wrapper."""
    return hasattr(function, _MARK)


def install_optimizer() -> list[str]:
    """Wrap ai-toolkit's `get_optimizer` wherever it is bound.

    Returns:
        Names of the modules changed by this call; empty when it had been done before.

    Raises:
        AIToolkitError: `get_optimizer` is missing or takes other parameters.
    """
    try:
        from toolkit.optimizer import get_optimizer
    except ImportError as error:
        raise AIToolkitError(f"toolkit.optimizer.get_optimizer is missing ({error})") from error
    if is_wrapped(get_optimizer):
        return rebind("get_optimizer", getattr(get_optimizer, _MARK), get_optimizer)
    names = tuple(inspect.signature(get_optimizer).parameters)[:4]
    if names != PARAMETERS:
        raise AIToolkitError(f"toolkit.optimizer.get_optimizer takes {names}, not {PARAMETERS}")
    return rebind("get_optimizer", get_optimizer, _wrap(get_optimizer))


def _wrap(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_optimizer(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        say_what_is_stored()  # the model is there, and every training job comes by here
        if str(values["optimizer_type"]).lower() != COAT_OPTIMIZER:
            return original(*args, **kwargs)
        return _build(values["params"], float(values["learning_rate"]), values["optimizer_params"])

    setattr(get_optimizer, _MARK, original)
    return get_optimizer


def _build(params: Any, lr: float, optimizer_params: dict | None) -> torch.optim.Optimizer:
    load_core()
    from ..optimizer import build_optimizer, describe_optimizer

    show_logs()
    optimizer = build_optimizer(params, lr, active_config(), dict(optimizer_params or {}))
    _guard_loading(optimizer)
    info(f"[coat] optimizer {COAT_OPTIMIZER}: {describe_optimizer(optimizer)}")
    return optimizer


def _guard_loading(optimizer: torch.optim.Optimizer) -> None:
    """Make what ai-toolkit does with `optimizer.pt` visible.

    A failed load is kept (`load_error`): ai-toolkit prints one line and continues with fresh moments. Hyper-parameters
    stay those of the config: torch takes them from the file, so a changed `optimizer_params` would do nothing (T2).
    The file's moments wait in CPU memory: of a whole model, the GPU would not hold them twice.
    """
    load = optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(state_dict: dict) -> None:
        asked = [{key: group[key] for key in HYPER_PARAMETERS} for group in optimizer.param_groups]
        try:
            if not optimizer.state:  # so this is a file's, which ai-toolkit reads to the GPU it was saved from
                for values in state_dict["state"].values():
                    values.update({key: value.cpu() for key, value in values.items() if hasattr(value, "cpu")})
            load(state_dict)
        except Exception as error:
            setattr(optimizer, _LOAD_ERROR, error)
            _log.error("the optimizer state was refused, its moments would start fresh: %s", error)
            raise
        setattr(optimizer, _LOAD_ERROR, None)
        for group, own in zip(optimizer.param_groups, asked, strict=True):
            for key in own:
                if _comparable(group[key]) != _comparable(own[key]):
                    info(f"[coat] resume: {key} is {own[key]} as configured, not {group[key]} as in the file")
            group.update(own)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@contextmanager
def states_left_alone(process: Any) -> Iterator[None]:
    """Let accelerate wrap the optimizer of a whole model inside the block without its state.

    It would move the state to the GPU, also what belongs into host memory, and have it loaded from there: twice.
    """
    if process._full is None:
        yield
        return
    optimizer = process.optimizer
    own = vars(optimizer).get("load_state_dict")
    optimizer.state_dict, optimizer.load_state_dict = dict, lambda _: None
    try:
        yield
    finally:
        del optimizer.state_dict, optimizer.load_state_dict
        if own is not None:
            optimizer.load_state_dict = own


def load_error(optimizer: object) -> Exception | None:
    """Return what made the last `load_state_dict` of an optimizer of ours fail, if it did."""
    return getattr(getattr(optimizer, "optimizer", optimizer), _LOAD_ERROR, None)


def check_optimizer(process: Any) -> tuple[str, str, str]:
    """Check that ai-toolkit loaded the optimizer state in the save folder, and describe the optimizer.

    Args:
        process: with its optimizer, before the training loop.

    Returns:
        Asked, got and why, for the start table.

    Raises:
        RuntimeError: it did not load it; the run would go on with fresh moments.
    """
    from ..optimizer import describe_optimizer

    name = process.train_config.optimizer
    if name.lower() != COAT_OPTIMIZER:
        return name, name, f"moments in FP8 are for {COAT_OPTIMIZER}"
    _check_loaded(process, os.path.join(process.save_root, "optimizer.pt"))
    return name, describe_optimizer(process.optimizer), ""


def _check_loaded(process: Any, path: str) -> None:
    if not os.path.exists(path):
        return
    remedy = "restore it, or start a new run: another config.name"
    if process.network is not None:
        remedy += ", from the LoRA: network.pretrained_lora_path"
    error = load_error(process.optimizer)
    if error is not None:
        raise RuntimeError(f"resume: {path} could not be loaded ({error}); {remedy}")
    if process.optimizer.state:
        return
    if process.network is not None and process.network.did_change_weights:
        info(f"[coat] note: the LoRA's shape changed, so {path} was not loaded: moments start fresh")
        return
    raise RuntimeError(f"resume: {path} exists but ai-toolkit did not load it; {remedy}")
