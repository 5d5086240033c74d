"""Optimizers: `coat_fp8_adamw` of both trainers; in the stand-alone one also ai-toolkit's, and schedules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from io import StringIO
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
)

from coat_core.optim import FP8AdamW
from coat_core.optim.sharded import ShardedFP8AdamW
from coat_core.optim.state import storages

from ..base.names import COAT_OPTIMIZER
from ..config.coat import COATConfig, OptimizerParams
from ..config.findings import ConfigError
from ..config.job_sections import PRODIGY_LOW_LR

HOST_EPS = OptimizerParams.eps
DEFAULT_WARMUP_STEPS = 1000
GROUP_STATE = ("d", "d_max", "d_numerator", "k")  # learned by Prodigy, stored with the hyper-parameters

# name → its class, and ai-toolkit's defaults for `optimizer_params`
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {"eps": HOST_EPS}),
    "adam": ("torch.optim", "Adam", {"eps": HOST_EPS}),
    "adamw8bit": ("bitsandbytes.optim", "AdamW8bit", {"eps": HOST_EPS}),
    "prodigy": ("prodigyopt", "Prodigy", {"eps": HOST_EPS}),
    "adafactor": (
        "transformers.optimization",
        "Adafactor",
        {"relative_step": False, "scale_parameter": False, "warmup_init": False},
    ),
    "lion": ("lion_pytorch", "Lion", {}),
}


def build_optimizer(
    params: Iterable[Any] | Mapping[str, Any],
    lr: float,
    config: COATConfig,
    optimizer_params: Mapping[str, Any] | None = None,
    *,
    capturable: bool = False,
    seed: int = 0,
) -> FP8AdamW:
    """Build FP8AdamW from the `coat:` block and the job's `train.optimizer_params`, which override it.

    `optimizer.use_fp8: false`, like `enabled: false`, keeps both moments in fp32: torch.optim.AdamW to the last bit.
    eps defaults to 1e-6, as in ai-toolkit (torch: 1e-8): sqrt(v) of LoRA moments is itself near 1e-6 at the start.
    `params` are parameters or groups, or by name if FSDP2 has sharded them. ConfigError for `optimizer_params`.
    """
    fp8_config, adamw = config.optimizer_config(optimizer_params)
    if not config.enabled:
        fp8_config = replace(fp8_config, use_fp8_m1=False, use_fp8_m2=False, stochastic_rounding=False)
        adamw["offload"] = "none"
    options = {"lr": lr, "capturable": capturable, "seed": seed, "fp8_config": fp8_config, **adamw}
    return ShardedFP8AdamW(params, **options) if isinstance(params, Mapping) else FP8AdamW(params, **options)


def describe_optimizer(optimizer: FP8AdamW) -> str:
    """One line for the start of a run: number of parameters, format of both moments."""
    config = optimizer.fp8_config
    count = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    parts = [f"FP8AdamW over {count:,} parameters"]
    parts += [f"{name} {storage.describe()}" for name, storage in storages(config).items()]
    if optimizer.offload == "cpu":
        parts.append("in CPU memory")
    if config.use_fp8_m2 and config.moment_rounding == "stochastic":
        parts.append("exp_avg_sq rounded stochastically")
    if config.stochastic_rounding:
        parts.append("stochastic rounding")
    return ", ".join(parts)


def make_optimizer(
    name: str,
    params: Sequence[nn.Parameter] | Mapping[str, nn.Parameter],
    lr: float,
    config: COATConfig,
    optimizer_params: Mapping[str, Any],
    seed: int = 0,
) -> Optimizer:
    """The optimizer `train.optimizer` names, with ai-toolkit's defaults: eps 1e-6 for Adam's kin, Prodigy's lr 1.

    Adafactor is transformers' class: the same arithmetic on fp32 parameters as ai-toolkit's copy. ConfigError if the
    installed version of a package does not accept these parameters.
    """
    if name == COAT_OPTIMIZER:
        trained = params.values() if isinstance(params, Mapping) else params
        on_gpu = all(param.is_cuda for param in trained)  # steps counted on the GPU can be skipped there
        return build_optimizer(params, lr, config, dict(optimizer_params), capturable=on_gpu, seed=seed)
    module, cls, defaults = CLASSES[name]
    make = getattr(import_module(module), cls)
    if name == "prodigy" and lr < PRODIGY_LOW_LR:
        lr = 1.0
    try:
        with redirect_stdout(StringIO()):  # Prodigy prints a greeting
            return make(params, lr=lr, **{**defaults, **optimizer_params})
    except TypeError as error:
        rule = f"the installed {module.split('.')[0]} does not take them ({error}); update it or remove them"
        raise ConfigError(f"train.optimizer_params={dict(optimizer_params)}: {rule}") from error


def make_scheduler(name: str, optimizer: Optimizer, steps: int, params: Mapping[str, Any]) -> LRScheduler:
    """The schedule `train.lr_scheduler` names, over the `steps` of the whole run, as in ai-toolkit.

    `linear` is torch's LinearLR: a ramp from 1/3 up to lr.
    """
    from diffusers.optimization import get_constant_schedule_with_warmup

    make, defaults = {
        "constant": (ConstantLR, {"factor": 1.0, "total_iters": steps}),
        "constant_with_warmup": (get_constant_schedule_with_warmup, {"num_warmup_steps": DEFAULT_WARMUP_STEPS}),
        "linear": (LinearLR, {"total_iters": steps}),
        "cosine": (CosineAnnealingLR, {"T_max": steps}),
        "cosine_with_restarts": (CosineAnnealingWarmRestarts, {"T_0": steps}),
    }[name]
    return make(optimizer, **{**defaults, **params})


def advance(scheduler: LRScheduler, steps: int) -> None:
    """Advance a new scheduler by `steps` steps, with the arithmetic of a run that did them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):
            scheduler.step()


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Load a saved state of whole parameters, but keep this run's hyper-parameters; returns a line for each change."""
    learned = ("params", *GROUP_STATE)
    configured = [
        {key: value for key, value in group.items() if key not in learned} for group in optimizer.param_groups
    ]
    if isinstance(optimizer, ShardedFP8AdamW):
        optimizer.load_whole_state_dict(state)
    else:
        optimizer.load_state_dict(dict(state))
    changes = []
    for group, hyper in zip(optimizer.param_groups, configured, strict=True):
        for key, value in hyper.items():
            if key != "lr" and group.get(key) != value:
                changes.append(f"{key} {group.get(key)} -> {value}")
        group.pop("initial_lr", None)
        group.update(hyper)
    return changes
