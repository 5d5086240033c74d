"""The optimizer `coat_fp8_adamw`, built the same way by both trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from coat_core.optim import FP8AdamW
from coat_core.optim.sharded import ShardedFP8AdamW
from coat_core.optim.state import storages

from ..config.coat import COATConfig

__all__ = ["build_optimizer", "describe_optimizer"]


def build_optimizer(
    params: Iterable[Any] | Mapping[str, Any],
    lr: float,
    config: COATConfig,
    optimizer_params: Mapping[str, Any] | None = None,
    *,
    capturable: bool = False,
    seed: int = 0,
) -> FP8AdamW:
    """Build FP8AdamW from the `coat:` block and the job's `train.optimizer_params`.

    `optimizer.use_fp8: false`, like `enabled: false`, keeps both moments in fp32: torch.optim.AdamW to the last bit.
    eps is 1e-6 unless given, as ai-toolkit passes to every AdamW of its own (torch's default is 1e-8): sqrt(v) of LoRA
    moments is itself near 1e-6 at the start, so with another eps it would not be comparable with the bf16 run.

    Args:
        params: parameters or param groups; or parameters by name, that FSDP2 has sharded.
        lr: learning rate of groups without one of their own.
        config: the `coat:` block; its `optimizer` part counts.
        optimizer_params: `betas`, `eps`, `weight_decay`, and keys of `coat.optimizer`, which override the block.
        capturable: of FP8AdamW.
        seed: of FP8AdamW, for `optimizer.moment_rounding: stochastic`.

    Raises:
        ConfigError: unknown keys or refused values in `optimizer_params`.
        ValueError: lr or a parameter that FP8AdamW refuses.
    """
    fp8_config, adamw = config.optimizer_config(optimizer_params)
    if not config.enabled:
        fp8_config = replace(fp8_config, use_fp8_m1=False, use_fp8_m2=False, stochastic_rounding=False)
        adamw["offload"] = "none"
    options = {"lr": lr, "capturable": capturable, "seed": seed, "fp8_config": fp8_config, **adamw}
    return ShardedFP8AdamW(params, **options) if isinstance(params, Mapping) else FP8AdamW(params, **options)


def describe_optimizer(optimizer: FP8AdamW) -> str:
    """One line for the start of a run: how many parameters, and how both moments are stored."""
    config = optimizer.fp8_config
    count = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    stored = ", ".join(f"{name} {storage.describe()}" for name, storage in storages(config).items())
    rounding = ", stochastic rounding" if config.stochastic_rounding else ""
    drawn = (
        ", exp_avg_sq rounded stochastically" if config.use_fp8_m2 and config.moment_rounding == "stochastic" else ""
    )
    place = ", in host memory" if optimizer.offload == "cpu" else ""
    return f"FP8AdamW over {count:,} parameters, {stored}{place}{drawn}{rounding}"
