"""The `coat:` block as dataclasses, and what the numerics take from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .build import build, from_option, parse_keys, to_plain
from .findings import Findings, closest
from .options import ADAMW_OPTIONS, BY_KEY, FORMATS, OPTIONS

if TYPE_CHECKING:
    from coat_core.config import FP8LinearConfig, FP8QuantizationConfig

RESUME_PARTS = ("data", "seed", "world_size")  # of a run's identity that a resume may change when it is told to


@dataclass(frozen=True)
class OptimizerOptions:
    """`coat.optimizer`: how the moments are stored."""

    use_fp8: bool = from_option(BY_KEY["optimizer.use_fp8"])
    use_fp8_m1: bool = from_option(BY_KEY["optimizer.use_fp8_m1"])
    use_fp8_m2: bool = from_option(BY_KEY["optimizer.use_fp8_m2"])
    m1_format: str = from_option(BY_KEY["optimizer.m1_format"])
    m2_format: str = from_option(BY_KEY["optimizer.m2_format"])
    block_size: int = from_option(BY_KEY["optimizer.block_size"])
    use_dynamic_range_expansion: bool = from_option(BY_KEY["optimizer.use_dynamic_range_expansion"])
    stochastic_rounding: bool = from_option(BY_KEY["optimizer.stochastic_rounding"])

    @property
    def has_fp8_moment(self) -> bool:
        """Whether a moment has a format that its range can be expanded to."""
        return self.m1_format in FORMATS or self.m2_format in FORMATS


@dataclass(frozen=True)
class WeightOptions:
    """`coat.weight`: how frozen linears are stored."""

    use_fp8: bool = from_option(BY_KEY["weight.use_fp8"])
    format: str = from_option(BY_KEY["weight.format"])
    granularity: str = from_option(BY_KEY["weight.granularity"])


@dataclass(frozen=True)
class ActivationOptions:
    """`coat.activation`: GEMM inputs, gradients and what is saved for backward."""

    use_fp8: bool = from_option(BY_KEY["activation.use_fp8"])
    format: str = from_option(BY_KEY["activation.format"])
    grad_format: str = from_option(BY_KEY["activation.grad_format"])
    linear_granularity: str = from_option(BY_KEY["activation.linear_granularity"])
    nonlinear_granularity: str = from_option(BY_KEY["activation.nonlinear_granularity"])
    group_size: int = from_option(BY_KEY["activation.group_size"])
    attention: str = from_option(BY_KEY["activation.attention"])
    flow: str = from_option(BY_KEY["activation.flow"])
    include: tuple[str, ...] = from_option(BY_KEY["activation.include"])
    exclude: tuple[str, ...] = from_option(BY_KEY["activation.exclude"])
    min_sqnr_db: float | None = from_option(BY_KEY["activation.min_sqnr_db"])


@dataclass(frozen=True)
class MemoryOptions:
    """`coat.memory`: recomputation, budget in GB, memory lines."""

    enable_efficient_checkpoint: bool = from_option(BY_KEY["memory.enable_efficient_checkpoint"])
    checkpointing: str = from_option(BY_KEY["memory.checkpointing"])
    every_n: int = from_option(BY_KEY["memory.every_n"])
    budget_gb: float | None = from_option(BY_KEY["memory.budget_gb"])
    transposed_weights: str = from_option(BY_KEY["memory.transposed_weights"])
    log_memory_stats: bool = from_option(BY_KEY["memory.log_memory_stats"])
    log_every: int = from_option(BY_KEY["memory.log_every"])


@dataclass(frozen=True)
class SpeedOptions:
    """`coat.speed`: how blocks run."""

    compile: str = from_option(BY_KEY["speed.compile"])
    measure: str = from_option(BY_KEY["speed.measure"])


@dataclass(frozen=True)
class DataOptions:
    """`coat.data`: how photos are read."""

    background: str = from_option(BY_KEY["data.background"])
    transparency: str = from_option(BY_KEY["data.transparency"])
    prepare: str = from_option(BY_KEY["data.prepare"])


@dataclass(frozen=True)
class GuardOptions:
    """`coat.guard`: when a run counts as dead; steps are optimizer steps, shares are from 0 to 1."""

    enabled: bool = from_option(BY_KEY["guard.enabled"])
    nonfinite_steps: int = from_option(BY_KEY["guard.nonfinite_steps"])
    diverging_steps: int = from_option(BY_KEY["guard.diverging_steps"])
    zero_gradient_steps: int = from_option(BY_KEY["guard.zero_gradient_steps"])
    dead_lora_steps: int = from_option(BY_KEY["guard.dead_lora_steps"])
    pinned_loss_steps: int = from_option(BY_KEY["guard.pinned_loss_steps"])
    health_every: int = from_option(BY_KEY["guard.health_every"])
    max_saturation: float = from_option(BY_KEY["guard.max_saturation"])
    max_underflow: float = from_option(BY_KEY["guard.max_underflow"])


@dataclass(frozen=True)
class ResumeOptions:
    """`coat.resume`: what a continued run may change."""

    allow: tuple[str, ...] = from_option(BY_KEY["resume.allow"])


@dataclass(frozen=True)
class COATConfig:
    """The whole `coat:` block; `COATConfig()` has every default."""

    enabled: bool = from_option(BY_KEY["enabled"])
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    weight: WeightOptions = field(default_factory=WeightOptions)
    activation: ActivationOptions = field(default_factory=ActivationOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    speed: SpeedOptions = field(default_factory=SpeedOptions)
    data: DataOptions = field(default_factory=DataOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    fallback: str = from_option(BY_KEY["fallback"])

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None, *, file: str = "", key_path: str = "coat") -> COATConfig:
        """Parse the block strictly, also where `enabled` is false.

        Args:
            raw: the block as YAML gives it; None or an empty block has every default.
            file: named in errors, where there is one.
            key_path: dotted key of the block, named in errors.

        Raises:
            ConfigError: unknown keys, wrong types, values out of range, options that exclude each other; all of them.
        """
        findings = Findings(file)
        config = build(cls, raw, key_path, findings)
        check_combinations(config, key_path, findings)
        findings.raise_if_any()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every option with its value, as plain YAML types; `from_dict` reads it back."""
        tree = to_plain(self)
        if self.memory.checkpointing != "every_n":
            del tree["memory"]["every_n"]
        if self.optimizer.use_dynamic_range_expansion and not self.optimizer.has_fp8_moment:
            del tree["optimizer"]["use_dynamic_range_expansion"]
        return tree

    def optimizer_config(
        self,
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        file: str = "",
        key_path: str = "train.optimizer_params",
    ) -> tuple[FP8QuantizationConfig, dict[str, Any]]:
        """How FP8AdamW stores its moments, and its other arguments.

        Args:
            optimizer_params: the host's block; a key of `coat.optimizer` in it overrides that one, `betas`, `eps` and
                `weight_decay` are passed on.
            file: named in errors, where there is one.
            key_path: dotted key of the block, named in errors.

        Returns:
            (config, keyword arguments of AdamW).

        Raises:
            ConfigError: unknown keys or refused values in `optimizer_params`.
        """
        from coat_core.config import FP8QuantizationConfig

        findings = Findings(file)
        given = parse_optimizer_params(optimizer_params, key_path, findings)
        findings.raise_if_any()
        adamw = {option.key: given.pop(option.key, option.default) for option in ADAMW_OPTIONS}
        values = {**to_plain(self.optimizer), **given}
        use_fp8 = values.pop("use_fp8")
        values["use_fp8_m1"] = use_fp8 and values["use_fp8_m1"]
        values["use_fp8_m2"] = use_fp8 and values["use_fp8_m2"]
        return FP8QuantizationConfig(**values), adamw

    def linear_config(self) -> FP8LinearConfig:
        """How frozen linears are stored and multiply."""
        from coat_core.config import FP8LinearConfig

        return FP8LinearConfig(
            weight_format=self.weight.format,
            weight_granularity=self.weight.granularity,
            input_format=self.activation.format,
            grad_format=self.activation.grad_format,
            input_granularity=self.activation.linear_granularity,
            group_size=self.activation.group_size,
            use_fp8_gemm=self.activation.use_fp8,
            fallback=self.fallback,
        )


def parse_optimizer_params(raw: Any, path: str, findings: Findings) -> dict[str, Any]:
    """Check `train.optimizer_params` of coat_fp8_adamw; returns the keys that were given."""
    rows = [option for option in OPTIONS if option.key.startswith("optimizer.")]
    return parse_keys([*rows, *ADAMW_OPTIONS], raw, path, findings)


def check_combinations(config: COATConfig, path: str, findings: Findings) -> None:
    """Refuse options that the user wrote and that would have no effect beside the others."""
    memory = f"{path}.memory"
    mode = config.memory.checkpointing
    if f"{memory}.every_n" in findings.given and mode != "every_n":
        rule = f"only used with checkpointing: every_n, which is {mode}; remove it or write checkpointing: every_n"
        findings.add(f"{memory}.every_n", rule, config.memory.every_n)
    if config.memory.budget_gb is not None and mode != "auto":
        rule = f"only used with checkpointing: auto, which is {mode}; write null or checkpointing: auto"
        findings.add(f"{memory}.budget_gb", rule, config.memory.budget_gb)
    expansion = f"{path}.optimizer.use_dynamic_range_expansion"
    optimizer = config.optimizer
    if expansion in findings.given and optimizer.use_dynamic_range_expansion and not optimizer.has_fp8_moment:
        rule = f"expands blocks of e4m3 and e5m2, not of {optimizer.m1_format} and {optimizer.m2_format}; remove it"
        findings.add(expansion, rule, True)
    if config.speed.compile in ("blocks", "cudagraphs") and config.activation.flow == "generic":
        rule = "compiles the fused flow's blocks, and activation.flow is generic; write flow: fused or compile: none"
        findings.add(f"{path}.speed.compile", rule, config.speed.compile)
    if config.activation.min_sqnr_db is not None:
        rule = _obstacle_to_minimum(config)
        if rule is not None:
            findings.add(f"{path}.activation.min_sqnr_db", rule, config.activation.min_sqnr_db)
    for part in config.resume.allow:
        if part not in RESUME_PARTS:
            near = closest(part, RESUME_PARTS)
            remedy = f"did you mean '{near}'?" if near else f"write {RESUME_PARTS[0]}, for example"
            findings.add(f"{path}.resume.allow", f"each must be one of {', '.join(RESUME_PARTS)}; {remedy}", part)


def _obstacle_to_minimum(config: COATConfig) -> str | None:
    """Why the inputs of GEMMs cannot be measured under these options, as a rule and a remedy."""
    if not config.activation.use_fp8:
        return "only used with activation.use_fp8: true; write null or use_fp8: true"
    if config.activation.linear_granularity == "per_group":
        return "is not for linear_granularity: per_group; write null, or linear_granularity: per_row"
    if config.speed.compile == "cudagraphs":
        return "needs to look into a step, which replayed CUDA graphs do not allow; write null or speed.compile: blocks"
    return None
