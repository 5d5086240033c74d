"""The `coat:` block: declarations that parsing, error messages and the README's table are generated from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .findings import RULES, Block, ConfigError, Findings
from .options import FORMATS, INT8, Option, build, choice, key, options_of, switch, to_plain

if TYPE_CHECKING:
    from coat_core.config import FP8LinearConfig, FP8QuantizationConfig

RESUME_PARTS = ("data", "seed", "world_size")  # parts of the identity that `allow` can name
AUTO = "auto"
WEIGHT_FORMATS = (*FORMATS, "nvfp4", INT8, AUTO)


@dataclass(frozen=True)
class OptimizerOptions:
    """`coat.optimizer`: how the moments are stored."""

    use_fp8: bool = switch(True, "master switch for both moments")
    use_fp8_m1: bool = switch(True, "the first moment (exp_avg) in 8 bits")
    use_fp8_m2: bool = switch(True, "the second moment (exp_avg_sq) in 8 bits")
    m1_format: str = choice(
        (*FORMATS, "int8_ratio"), "format of exp_avg; int8_ratio: exp_avg/√exp_avg_sq, evenly spaced"
    )
    m2_format: str = choice((*FORMATS, "uint8_log"), "format of exp_avg_sq; uint8_log: evenly spaced in the logarithm")
    block_size: int = key(128, "int", "elements that share one scale", minimum=16, maximum=4096, multiple_of=16)
    use_dynamic_range_expansion: bool = switch(
        True, "f(x) = sign(x)·abs(x)^k per block before the cast to e4m3 or e5m2"
    )
    stochastic_rounding: bool = switch(False, "bf16/fp16 parameters are updated with stochastic rounding")
    moment_rounding: str = choice(
        ("stochastic", "nearest"),
        "stochastic: exp_avg_sq in 8 bits is rounded up or down at random and stays right on average; nearest drifts "
        "upwards, by more than 20 % in 2,000 steps",
    )
    offload: str = choice(
        ("none", "cpu"),
        "full fine-tuning: cpu keeps the moments in CPU memory (FLUX.1: 26 GB), copied at each update; same results",
    )


@dataclass(frozen=True)
class OptimizerParams(OptimizerOptions):
    """`train.optimizer_params` of coat_fp8_adamw."""

    betas: tuple[float, float] = key((0.9, 0.999), "betas", "decay of the two moments", minimum=0, below=1)
    eps: float = key(1e-6, "float", "added to sqrt(exp_avg_sq); the default is ai-toolkit's", above=0)
    weight_decay: float = key(1e-2, "float", "decoupled weight decay", minimum=0)


ADAMW = ("betas", "eps", "weight_decay")


@dataclass(frozen=True)
class WeightOptions:
    """`coat.weight`: how frozen linears are stored."""

    use_fp8: bool = switch(True, "frozen linears hold codes only, no bf16 copy stays in memory")
    format: str = choice(
        WEIGHT_FORMATS,
        "format of the frozen weights; nvfp4: 4.5 bits each (FLUX.1: 6.8 GB instead of 12.0), decoded to e4m3 for "
        "each product; int8: rotated, for cards without FP8 (RTX 20xx, 30xx, A100), with activation.format: int8; "
        "auto: e4m3 or int8, activations too: the one whose products are faster, timed on the card before the load",
    )
    granularity: str = choice(("per_tensor", "per_row"), "what shares one scale in a weight of e4m3 or e5m2")


@dataclass(frozen=True)
class ActivationOptions:
    """`coat.activation`: GEMM inputs, gradients and tensors saved for backward."""

    use_fp8: bool = switch(True, "FP8 GEMM inputs and FP8 tensors saved for backward")
    format: str = choice(
        (*FORMATS, INT8),
        "FP8 format of the forward input; int8: with weight.format: int8, what is saved for backward is e4m3",
    )
    grad_format: str = choice(
        ("e5m2", "e4m3", INT8, "bf16"), "format of the backward gradient; with weight.format: int8 the default is int8"
    )
    wgrad_format: str = choice(
        ("bf16", *FORMATS),
        "full fine-tuning: format of the output's gradient in wgrad, with the FP8 input; bf16: with it dequantized",
    )
    linear_granularity: str = choice(("per_row", "per_tensor"), "scaling of GEMM inputs")
    nonlinear_granularity: str = choice(
        ("per_group", "per_tensor"), "scaling of what norms, GELU, gates and attention save"
    )
    group_size: int = choice((128, 16, 32, 64, 256), "the 1×G group of nonlinear_granularity: per_group")
    attention: str = choice(("fp8", "bf16"), "how q, k, v, out are saved for attention's backward")
    flow: str = choice(
        ("fused", "generic"),
        "fused: FLUX blocks save only what cannot be recomputed; generic: diffusers' code, saved tensors packed",
    )
    include: tuple[str, ...] = key(
        ("*",), "strings", "fnmatch patterns over full module names: the linears that multiply in FP8"
    )
    exclude: tuple[str, ...] = key(
        (),
        "strings",
        "likewise, the linears that multiply in bf16 (weights still follow weight.use_fp8)",
    )
    min_sqnr_db: float | None = key(
        None,
        "float",
        "linears whose FP8 input has a lower SQNR (dB, measured in step 2) multiply in bf16 from then on",
        above=0,
        nullable=True,
    )


@dataclass(frozen=True)
class MemoryOptions:
    """`coat.memory`: recomputation, budget in GB, memory lines."""

    enable_efficient_checkpoint: bool = switch(True, "checkpointed block inputs are stored in FP8")
    checkpointing: str = choice(
        ("auto", "none", "all"),
        "blocks recomputed in backward; auto: as few as budget_gb allows; train.gradient_checkpointing: false: none",
    )
    budget_gb: float | None = key(
        None,
        "float",
        "with checkpointing: auto, the peak the run must stay under; null: the device's memory",
        above=0,
        nullable=True,
    )
    transposed_weights: str = choice(
        ("auto", "always", "never"),
        "a second FP8 copy of the weights for backward (8.6 GB for FLUX.1; in full fine-tuning the codes of trained "
        "weights between updates); auto: if nothing is recomputed and it fits",
    )
    stream_blocks: int | str = key(
        0,
        "blocks",
        "blocks whose frozen codes stay in CPU memory and are copied to the GPU one block ahead; all; "
        "auto: as few as budget_gb allows, weighed against recomputation",
        minimum=0,
    )
    log_memory_stats: bool = switch(True, "print memory lines")
    log_every: int = key(100, "int", "steps between memory lines", minimum=1)


@dataclass(frozen=True)
class SpeedOptions:
    """`coat.speed`: how blocks run."""

    cuda_graphs: str = choice(
        ("auto", "never"),
        "auto: whole steps are captured as CUDA graphs where they can be (stand-alone trainer, on a GPU); never: eager",
    )
    measure: str = choice(
        ("auto", "always", "never"),
        "time the GEMMs (20 s at most) at the start, use the fastest that is as precise as configured; auto: on a GPU",
    )
    kernels: str = choice(
        ("auto", "all", "none"),
        "Triton kernels on a GPU; auto: each is compared with its PyTorch reference before it is used, and replaced by "
        "that where it is wrong or fails; all: not compared, a failure ends the run; none: references",
    )
    kernels_left_out: tuple[str, ...] = key(
        (), "strings", "operators that run as their PyTorch reference, by name as in the start table"
    )
    attention: str = choice(
        ("auto", "cudnn", "flash", "efficient"),
        "attention kernel of FLUX blocks on a GPU; auto: fastest by speed.measure (also FlashAttention 3 and 4), "
        "else torch's choice",
    )


@dataclass(frozen=True)
class DataOptions:
    """`coat.data`: how photos are read."""

    background: str = key("white", "colour", "what transparent parts of a photo become")
    transparency: str = choice(("background", "mask"), "mask: transparent parts are also left out of the loss")


@dataclass(frozen=True)
class GuardOptions:
    """`coat.guard`, and the limits beyond which a run counts as dead; steps are optimizer steps, shares 0 to 1."""

    enabled: bool = switch(True, "stop a run that can no longer succeed, say why, and exit with a nonzero code")
    nonfinite_steps: int = 10  # consecutive steps with NaN or inf; a single one is skipped
    diverging_steps: int = 50  # consecutive steps of diverging loss and weights; nothing is saved meanwhile
    zero_gradient_steps: int = 10  # consecutive steps without any gradient
    dead_lora_steps: int = 50  # every lora_B is still zero after them
    pinned_loss_steps: int = 100  # consecutive steps with exactly the same loss
    health_every: int = 100  # steps between checks of FP8 cast errors
    max_saturation: float = 0.001  # share of a tensor clipped to the format's maximum
    max_underflow: float = 0.5  # share of a tensor rounded to zero


@dataclass(frozen=True)
class ResumeOptions:
    """`coat.resume`: what a resumed run may change."""

    allow: tuple[str, ...] = key((), "strings", "what may differ from the run being resumed: data, seed, world_size")


@dataclass(frozen=True)
class COATConfig:
    """The whole `coat:` block; `COATConfig()` has every default."""

    enabled: bool = switch(True, "false: an ordinary bf16 run, exactly as the trainer does it without COAT")
    include: tuple[str, ...] = key(
        ("*",),
        "strings",
        "full fine-tuning (no network:): fnmatch patterns over names of modules and parameters that are trained",
    )
    exclude: tuple[str, ...] = key(
        (), "strings", "full fine-tuning: likewise, of what is frozen; its linears are stored as weight.* says"
    )
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    weight: WeightOptions = field(default_factory=WeightOptions)
    activation: ActivationOptions = field(default_factory=ActivationOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    speed: SpeedOptions = field(default_factory=SpeedOptions)
    data: DataOptions = field(default_factory=DataOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    chosen: Any = field(default=None, compare=False)  # no key: why this format for `auto`, a `blocks.measure.Picked`
    fallback: str = choice(
        ("int8", "bf16", "error"),
        "when FP8 cannot be used on this device, torch or layer; int8: as weight.format: int8 where the device "
        "multiplies INT8, else bf16",
    )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None, *, file: str = "", key_path: str = "coat") -> COATConfig:
        """Parse the block strictly, even if `enabled` is false; raises ConfigError with every finding."""
        findings = Findings(file)
        config = build(cls, raw, key_path, findings)
        Block({"coat": raw}, key_path.rpartition(".")[0], findings).check(OWN_RULES)
        check_allowed(config, key_path, findings)
        if findings.errors:
            raise ConfigError(findings.errors)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every option with its value, as plain YAML types; `from_dict` reads it back."""
        tree = to_plain(self)
        if self.weight.format == INT8:
            del tree["weight"]["granularity"]
            tree["activation"]["grad_format"] = self.grad_format
        in_fp8 = {self.optimizer.m1_format, self.optimizer.m2_format} & {*FORMATS}
        if self.optimizer.use_dynamic_range_expansion and not in_fp8:
            del tree["optimizer"]["use_dynamic_range_expansion"]
        return tree

    def optimizer_config(
        self, optimizer_params: Mapping[str, Any] | None = None
    ) -> tuple[FP8QuantizationConfig, dict[str, Any]]:
        """FP8AdamW's config and keyword arguments; `optimizer_params` override the block. Raises ConfigError."""
        from coat_core.config import FP8QuantizationConfig

        findings = Findings("")
        params = vars(build(OptimizerParams, optimizer_params, "train.optimizer_params", findings))
        if findings.errors:
            raise ConfigError(findings.errors)
        values = params | vars(self.optimizer) | {name: params[name] for name in optimizer_params or {}}
        adamw = {name: values.pop(name) for name in ADAMW}
        adamw["offload"] = values.pop("offload")
        use_fp8 = values.pop("use_fp8")
        values["use_fp8_m1"] = use_fp8 and values["use_fp8_m1"]
        values["use_fp8_m2"] = use_fp8 and values["use_fp8_m2"]
        return FP8QuantizationConfig(**values), adamw

    def with_weights_in(self, name: str) -> COATConfig:
        """This config with weights in e4m3 or int8, and GEMM inputs in the same."""
        weight, activation = replace(self.weight, format=name), self.activation
        if name == INT8:
            weight = replace(weight, granularity="per_tensor")
            activation = replace(activation, format=INT8, linear_granularity="per_row")
        return replace(self, weight=weight, activation=activation)

    @property
    def grad_format(self) -> str:
        """Format of the gradient in GEMMs; INT8 weights need INT8 gradients unless bf16 is set."""
        grad = self.activation.grad_format
        return INT8 if self.weight.format == INT8 and grad in FORMATS else grad

    def linear_config(self) -> FP8LinearConfig:
        """Storage and GEMM settings of frozen linears."""
        from coat_core.config import FP8LinearConfig

        return FP8LinearConfig(
            weight_format=FORMATS[0] if self.weight.format == AUTO else self.weight.format,  # as on a CPU
            weight_granularity=self.weight.granularity,
            input_format=INT8 if self.weight.format == INT8 else self.activation.format,
            grad_format=self.grad_format,
            input_granularity=self.activation.linear_granularity,
            wgrad_format=self.activation.wgrad_format,
            use_fp8_gemm=self.activation.use_fp8,
            fallback="error" if self.fallback == "error" else "bf16",
        )


OPTIONS = tuple(options_of(COATConfig))
BY_KEY = {option.key: option for option in OPTIONS}
# between these options alone
OWN_RULES = [row for row in RULES if all(key.startswith("coat.") for key in (row["key"], *row["where"].split()))]


def check_allowed(config: COATConfig, path: str, findings: Findings) -> None:
    """Check the names in `resume.allow` and `speed.kernels_left_out`."""
    named = {"resume.allow": (config.resume.allow, RESUME_PARTS)}
    if config.speed.kernels_left_out:
        from coat_core.ops import dispatch

        dispatch.load_operators()
        operators = sorted(name.removeprefix("coat::") for name in dispatch.launchers)
        named["speed.kernels_left_out"] = (config.speed.kernels_left_out, tuple(operators))
    for place, (names, known) in named.items():
        one_of_them = Option("", None, "choice", choices=known)
        for name in names:
            if refusal := one_of_them.refusal(name):
                findings.add(f"{path}.{place}", refusal, name)
