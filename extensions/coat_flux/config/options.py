"""Every option of the `coat:` block, once. Defaults, parsing, error texts and the README table all come from here."""

from __future__ import annotations

from .findings import show
from .values import Option

FORMATS = ("e4m3", "e5m2")
M1_FORMATS = (*FORMATS, "int8_ratio")
M2_FORMATS = (*FORMATS, "uint8_log")


def _switch(key: str, default: bool, doc: str) -> Option:
    return Option(key, default, "bool", doc)


def _choice(key: str, choices: tuple[object, ...], doc: str) -> Option:
    return Option(key, choices[0], "choice", doc, choices=choices)


OPTIONS: tuple[Option, ...] = (
    _switch("enabled", True, "false: an ordinary bf16 run, exactly as the trainer does it without COAT"),
    _switch("optimizer.use_fp8", True, "master switch for both moments"),
    _switch("optimizer.use_fp8_m1", True, "the first moment (exp_avg) in 8 bits"),
    _switch("optimizer.use_fp8_m2", True, "the second moment (exp_avg_sq) in 8 bits"),
    _choice("optimizer.m1_format", M1_FORMATS, "format of exp_avg; int8_ratio: exp_avg/√exp_avg_sq, evenly spaced"),
    _choice("optimizer.m2_format", M2_FORMATS, "format of exp_avg_sq; uint8_log: evenly spaced in the logarithm"),
    Option(
        "optimizer.block_size",
        128,
        "int",
        "elements that share one scale",
        minimum=16,
        maximum=4096,
        multiple_of=16,
    ),
    _switch(
        "optimizer.use_dynamic_range_expansion",
        True,
        "f(x) = sign(x)·abs(x)^k per block before the cast to e4m3 or e5m2",
    ),
    _switch("optimizer.stochastic_rounding", False, "bf16/fp16 parameters are updated with stochastic rounding"),
    _switch("weight.use_fp8", True, "frozen linears hold FP8 codes only, no bf16 copy stays in memory"),
    _choice("weight.format", FORMATS, "FP8 format of the frozen weights"),
    _choice("weight.granularity", ("per_tensor", "per_row"), "what shares one scale in a weight"),
    _switch("activation.use_fp8", True, "FP8 GEMM inputs and FP8 tensors saved for backward"),
    _choice("activation.format", FORMATS, "FP8 format of the forward input"),
    _choice("activation.grad_format", ("e5m2", "e4m3", "bf16"), "format of the backward gradient"),
    _choice("activation.linear_granularity", ("per_tensor", "per_row", "per_group"), "scaling of GEMM inputs"),
    _choice(
        "activation.nonlinear_granularity",
        ("per_group", "per_tensor"),
        "scaling of what norms, GELU, gates and attention save",
    ),
    _choice("activation.group_size", (128, 16, 32, 64, 256), "the 1×G group of per_group"),
    _choice("activation.attention", ("fp8", "bf16"), "how q, k, v, out are saved for attention's backward"),
    _choice(
        "activation.flow",
        ("fused", "generic"),
        "fused: FLUX blocks save only what cannot be recomputed; generic: diffusers' code, saved tensors packed",
    ),
    Option(
        "activation.include",
        ("*",),
        "strings",
        "fnmatch patterns over full module names: the linears that multiply in FP8",
    ),
    Option(
        "activation.exclude",
        (),
        "strings",
        "fnmatch patterns over full module names: linears that multiply in bf16 (weights still follow weight.use_fp8)",
    ),
    Option(
        "activation.min_sqnr_db",
        None,
        "float",
        "linears whose FP8 input has a lower SQNR than this (dB, measured in step 2) multiply in bf16 from then on; "
        "null: none do",
        above=0,
        nullable=True,
    ),
    _switch("memory.enable_efficient_checkpoint", True, "checkpointed block inputs are stored in FP8"),
    _choice(
        "memory.checkpointing",
        ("auto", "none", "all", "every_n"),
        "blocks recomputed in backward; auto: as few as budget_gb allows; train.gradient_checkpointing: false: none",
    ),
    Option("memory.every_n", 2, "int", "with checkpointing: every_n, one block in this many is recomputed", minimum=1),
    Option(
        "memory.budget_gb",
        None,
        "float",
        "with checkpointing: auto, the peak the run must stay under; null: the device's memory",
        above=0,
        nullable=True,
    ),
    _choice(
        "memory.transposed_weights",
        ("auto", "always", "never"),
        "a second FP8 copy of the weights for backward (8.6 GB for FLUX.1); auto: if nothing is recomputed and it fits",
    ),
    _switch("memory.log_memory_stats", True, "print memory lines"),
    Option("memory.log_every", 100, "int", "steps between memory lines", minimum=1),
    _choice(
        "speed.compile",
        ("auto", "none", "blocks", "cudagraphs"),
        "torch.compile for each FLUX block; cudagraphs: as CUDA graphs; auto: the fastest by speed.measure, else none",
    ),
    _choice(
        "speed.measure",
        ("auto", "always", "never"),
        "time the GEMMs (20 s at most) at the start, use the fastest that is as precise as configured; auto: on a GPU",
    ),
    Option("data.background", "white", "colour", "what transparent parts of a photo become"),
    _choice(
        "data.transparency",
        ("background", "mask"),
        "mask: transparent parts are also left out of the loss",
    ),
    _choice(
        "data.prepare",
        ("auto", "never"),
        "inside ai-toolkit: photos it would misread (EXIF, color profile, transparency, 16 bit) are read from "
        "corrected copies in the run folder",
    ),
    _switch("guard.enabled", True, "stop a run that can no longer succeed, say why, and exit with a nonzero code"),
    Option(
        "guard.nonfinite_steps",
        10,
        "int",
        "consecutive steps with NaN or inf that stop the run; a single one is skipped",
        minimum=1,
    ),
    Option(
        "guard.diverging_steps",
        50,
        "int",
        "consecutive steps of diverging loss and weights that stop the run; nothing is saved meanwhile",
        minimum=1,
    ),
    Option(
        "guard.zero_gradient_steps", 10, "int", "consecutive steps without any gradient that stop the run", minimum=1
    ),
    Option("guard.dead_lora_steps", 50, "int", "stop if every lora_B is still zero after this many steps", minimum=1),
    Option(
        "guard.pinned_loss_steps",
        100,
        "int",
        "consecutive steps with exactly the same loss that stop the run",
        minimum=2,
    ),
    Option("guard.health_every", 100, "int", "steps between checks of what the FP8 casts lose", minimum=1),
    Option(
        "guard.max_saturation",
        0.001,
        "float",
        "share of a tensor clipped to the format's maximum that stops the run",
        above=0,
        maximum=1,
    ),
    Option(
        "guard.max_underflow", 0.5, "float", "share of a tensor rounded to zero that stops the run", above=0, maximum=1
    ),
    Option(
        "resume.allow",
        (),
        "strings",
        "what may differ from the run being resumed: data, seed, world_size",
    ),
    _choice("fallback", ("bf16", "error"), "when FP8 cannot be used on this device, torch or layer"),
)

BY_KEY: dict[str, Option] = {option.key: option for option in OPTIONS}

ADAMW_OPTIONS: tuple[Option, ...] = (
    Option("betas", (0.9, 0.999), "betas", "decay of the two moments", minimum=0, below=1),
    Option("eps", 1e-6, "float", "added to sqrt(exp_avg_sq); the default is ai-toolkit's for every AdamW", above=0),
    Option("weight_decay", 1e-2, "float", "decoupled weight decay", minimum=0),
)

_NO_LR = "the learning rate is train.lr, and Adafactor does not take both; remove the line"

# optimizer of another package → its `train.optimizer_params`, with the defaults ai-toolkit gives it
OPTIMIZER_PARAMS: dict[str, tuple[Option, ...]] = {
    "prodigy": (
        Option("betas", (0.9, 0.999), "betas", "decay of the two moments", minimum=0, below=1),
        Option("beta3", None, "float", "decay of the step size's averages; null: sqrt(beta2)", nullable=True, above=0),
        Option("eps", 1e-6, "float", "added to sqrt(exp_avg_sq)", above=0),
        Option("weight_decay", 0.0, "float", "weight decay", minimum=0),
        _switch("decouple", True, "decoupled weight decay, as in AdamW"),
        _switch("use_bias_correction", False, "bias correction, as in Adam"),
        _switch("safeguard_warmup", False, "for a learning rate that warms up"),
        Option("d0", 1e-6, "float", "first estimate of the step size", above=0),
        Option("d_coef", 1.0, "float", "multiplies the estimate", above=0),
        Option("growth_rate", 1.02, "float", "largest growth of the estimate per step; default: no limit", minimum=1),
        Option("slice_p", 1, "int", "estimate from one element in so many", minimum=1),
    ),
    "adafactor": (
        Option("eps", (1e-30, 1e-3), "betas", "added to squared gradients; smallest parameter scale", minimum=0),
        Option("clip_threshold", 1.0, "float", "largest root mean square of an update", above=0),
        Option("decay_rate", -0.8, "float", "exponent of the second moment's decay", below=0),
        Option("beta1", None, "float", "decay of the first moment; null: none", nullable=True, minimum=0, below=1),
        Option("weight_decay", 0.0, "float", "weight decay", minimum=0),
        _switch("scale_parameter", False, "multiply lr by the parameter's root mean square"),
        Option("relative_step", False, "bool", "no other value", refused=((True, _NO_LR),)),
        Option("warmup_init", False, "bool", "no other value", refused=((True, _NO_LR),)),
    ),
    "lion": (
        Option("betas", (0.9, 0.99), "betas", "weights of the momentum", minimum=0, maximum=1),
        Option("weight_decay", 0.0, "float", "weight decay", minimum=0),
        _switch("use_triton", False, "the package's Triton kernel"),
        _switch("decoupled_weight_decay", False, "weight decay that does not depend on lr"),
    ),
}

# optimizer → module it comes from, and what pip calls it
OPTIMIZER_PACKAGES = {
    "adamw8bit": ("bitsandbytes", "bitsandbytes"),
    "prodigy": ("prodigyopt", "prodigyopt"),
    "lion": ("lion_pytorch", "lion-pytorch"),
}


def markdown_table() -> str:
    """The README's table of the `coat:` block: key, values with the default first, effect."""
    lines = ["| key | values (default first) | effect |", "|---|---|---|"]
    lines += [f"| `{option.key}` | {_values(option)} | {option.doc} |" for option in OPTIONS]
    return "\n".join(lines) + "\n"


def _values(option: Option) -> str:
    if option.kind == "bool":
        return "true, false" if option.default else "false, true"
    if option.choices:
        return ", ".join(str(choice) for choice in option.choices)
    default = show(list(option.default) if isinstance(option.default, tuple) else option.default)
    return f"{default}; {option.rule().removeprefix('must be ').removesuffix(', or null')}"
