"""What is compared, and at which sizes. A new row in `CONFIGURATIONS` is all that a new configuration takes.

Rows of a model train the same LoRA (PEFT, on every linear of the blocks), each as its trainer runs it: bf16 and torchao
under bf16 autocast, as accelerate's scripts do, COAT and ai-toolkit's recipes without, as these two trainers do. Rows
of the level "optimizer" are optimizers alone, those of "rates" single kernels. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.names import COAT_OPTIMIZER
from .limits import Geometry

OK, CANNOT, OUT_OF_MEMORY, FAILED = "ok", "cannot", "out of memory", "failed"  # how a process ends; see worker
RATES, ENGINE = "rates", "engine"
LEVELS = (RATES, "op", "block", "step", ENGINE, "optimizer")
COUNT = "count"  # of operators, on no device: `step_model`
MODEL_LEVELS = ("block", "step")
ALL_MODEL_LEVELS = ("op", *MODEL_LEVELS)
COUNTED_LEVELS = (*ALL_MODEL_LEVELS, COUNT)


@dataclass(frozen=True)
class Configuration:
    """One row of the comparison.

    Attributes:
        name: on the command line and in the results.
        about: what it is, for the table.
        levels: where it is measured.
        coat: the `coat:` block; None is a baseline.
        checkpointing: torch's recomputation of every block (baselines; COAT's is in its block).
        compiled: "blocks" compiles each block by itself, "model" the whole transformer, "" nothing.
        compile_mode: of torch.compile; "" is its default.
        quantizer: a key of `levels.QUANTIZERS`, which converts linears; "" none.
        adapters: dtype of the LoRA, "fp32" or "bf16".
        autocast: bf16 autocast around the forward pass.
        optimizer: the name of a row of that level.
        needs: packages, as they are imported.
        gpu_only: it does not exist on a CPU.
        full: the transformer itself is trained, each weight updated in backward.
    """

    name: str
    about: str
    levels: tuple[str, ...] = MODEL_LEVELS
    coat: Mapping[str, Any] | None = None
    checkpointing: bool = False
    compiled: str = ""
    compile_mode: str = ""
    quantizer: str = ""
    adapters: str = "fp32"
    autocast: bool = True
    optimizer: str = "adamw_fused"
    needs: tuple[str, ...] = ()
    gpu_only: bool = False
    full: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether every block is recomputed in backward."""
        return self.checkpointing or (self.coat or {}).get("memory", {}).get("checkpointing") == "all"

    @property
    def fp8_linears(self) -> bool:
        """Whether the linears multiply in FP8 where the card does."""
        if self.coat is not None:
            return bool(self.coat.get("activation", {}).get("use_fp8", True))
        return self.quantizer.startswith("torchao")

    @property
    def may_be_missing(self) -> bool:
        """Whether an error means that others' code cannot run on this machine, rather than that ours is broken."""
        return bool(self.needs or (self.compiled and self.coat is None) or RATES in self.levels)

    @property
    def runs_our_kernels(self) -> bool:
        """Whether what it times are kernels of ours, which must not have been replaced by their references."""
        return self.coat is not None or self.name == COAT_OPTIMIZER

    @property
    def replays(self) -> bool:
        """Whether torch.compile records CUDA graphs, which must be given the start of each step."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def captures(self) -> bool:
        """Whether a whole step is one CUDA graph of ours."""
        return bool((self.coat or {}).get("speed", {}) == REPLAYED)

    @property
    def weights(self) -> tuple[Any, ...]:
        """What a built model is like: rows in which it is the same can take turns with one model."""
        coat = None if self.coat is None else {k: v for k, v in self.coat.items() if k not in ("memory", "speed")}
        return self.quantizer, self.adapters, repr(coat)


KEPT = {"checkpointing": "none", "transposed_weights": "never"}
COPIED = {"checkpointing": "none", "transposed_weights": "always"}
RECOMPUTED = {"checkpointing": "all"}
AS_WRITTEN = {"measure": "never", "cuda_graphs": "never"}
REPLAYED = {"measure": "never", "cuda_graphs": "auto"}

PER_TENSOR = {"linear_granularity": "per_tensor"}
FP8_WGRAD = {"wgrad_format": "e4m3"}
ON_HOST = {"offload": "cpu"}


def _coat(
    name: str, about: str, levels: tuple[str, ...] = MODEL_LEVELS, speed: Mapping[str, Any] = AS_WRITTEN, **coat: Any
) -> Configuration:
    block = {**coat, "speed": speed, "fallback": "error"}
    return Configuration(
        *(name, about, levels),
        coat=block,
        autocast=False,
        optimizer=COAT_OPTIMIZER,
        gpu_only=speed is REPLAYED,
    )


CONFIGURATIONS = (
    Configuration("bf16_checkpointed", "bf16, every block recomputed", checkpointing=True),
    Configuration("bf16", "bf16", (*ALL_MODEL_LEVELS, ENGINE)),
    Configuration(
        "bf16_compiled_checkpointed",
        "bf16, blocks compiled, every block recomputed",
        checkpointing=True,
        compiled="blocks",
    ),
    Configuration("bf16_compiled", "bf16, blocks compiled", compiled="blocks"),
    Configuration("bf16_compiled_model", "bf16, whole model compiled", ("step",), compiled="model"),
    Configuration(
        "bf16_cudagraphs",
        "bf16, blocks compiled and recorded as CUDA graphs (reduce-overhead)",
        compiled="blocks",
        compile_mode="reduce-overhead",
        gpu_only=True,
    ),
    Configuration(
        "bf16_max_autotune",
        "bf16, blocks compiled by max-autotune, with CUDA graphs",
        compiled="blocks",
        compile_mode="max-autotune",
        gpu_only=True,
    ),
    Configuration(
        "bf16_adapters",
        "bf16 in the LoRA too, blocks compiled",
        compiled="blocks",
        adapters="bf16",
        autocast=False,
    ),
    Configuration(
        "toolkit_default",
        "optimum-quanto qfloat8 weights, every block recomputed, bitsandbytes AdamW8bit: ai-toolkit's default",
        checkpointing=True,
        quantizer="quanto",
        autocast=False,
        optimizer="adamw8bit",
        needs=("optimum.quanto", "bitsandbytes"),
    ),
    Configuration(
        "toolkit_convrot8",
        "ai-toolkit's convrot8 (int8 GEMM forward), every block recomputed, bitsandbytes AdamW8bit",
        checkpointing=True,
        quantizer="convrot8",
        autocast=False,
        optimizer="adamw8bit",
        needs=("bitsandbytes",),
    ),
    Configuration(
        "torchao_float8", "torchao float8 training", ALL_MODEL_LEVELS, quantizer="torchao", needs=("torchao",)
    ),
    Configuration(
        "torchao_float8_compiled",
        "torchao float8 training, blocks compiled",
        compiled="blocks",
        quantizer="torchao",
        needs=("torchao",),
    ),
    Configuration(
        "torchao_rowwise",
        "torchao float8 training, scaled per row",
        ALL_MODEL_LEVELS,
        quantizer="torchao_rowwise",
        needs=("torchao",),
    ),
    Configuration(
        "torchao_rowwise_compiled",
        "torchao float8 training, scaled per row, blocks compiled",
        compiled="blocks",
        quantizer="torchao_rowwise",
        needs=("torchao",),
    ),
    _coat("coat", "COAT, fused flow, nothing recomputed", COUNTED_LEVELS, memory=KEPT),
    _coat("coat_recomputed", "COAT, every block recomputed", (*MODEL_LEVELS, ENGINE), memory=RECOMPUTED),
    _coat("coat_per_tensor", "COAT, one scale for each tensor", COUNTED_LEVELS, memory=KEPT, activation=PER_TENSOR),
    _coat("coat_weight_only", "COAT, FP8 weights only", ALL_MODEL_LEVELS, memory=KEPT, activation={"use_fp8": False}),
    _coat("coat_nvfp4", "COAT, weights in 4.5 bits", (*MODEL_LEVELS, ENGINE), memory=KEPT, weight={"format": "nvfp4"}),
    _coat(
        "coat_int8",
        "COAT, weights and inputs in INT8",
        (*MODEL_LEVELS, ENGINE),
        memory=KEPT,
        weight={"format": "int8"},
        activation={"format": "int8", "grad_format": "int8"},
    ),
    _coat("coat_streamed", "COAT, weights in host memory", (ENGINE,), memory={**KEPT, "stream_blocks": "all"}),
    _coat("coat_transposed", "COAT, with transposed weights", (*MODEL_LEVELS, ENGINE, COUNT), memory=COPIED),
    _coat("coat_cudagraphs", "COAT, the step as a CUDA graph", ("step", ENGINE), memory=COPIED, speed=REPLAYED),
    _coat("coat_picked", "COAT, what its start-up measurement picks", ("step", ENGINE), memory=COPIED, speed={}),
    replace(_coat("full", "full fine-tuning", (ENGINE,), memory=KEPT), full=True),
    replace(
        _coat("full_wgrad", "full fine-tuning, wgrad in e4m3", (ENGINE,), memory=KEPT, activation=FP8_WGRAD), full=True
    ),
    replace(
        _coat("full_offload", "full fine-tuning, moments in host memory", (ENGINE,), memory=KEPT, optimizer=ON_HOST),
        full=True,
    ),
    Configuration("gemm_bf16", "bf16 matrix products of a step", (RATES,)),
    Configuration("gemm_fp8", "FP8 matrix products, one scale for each tensor", (RATES,)),
    Configuration("gemm_fp8_per_row", "FP8 matrix products, one scale for each row", (RATES,)),
    Configuration("attention", "attention by the kernel that torch chooses", (RATES,)),
    Configuration("attention_cudnn", "attention by cuDNN", (RATES,), gpu_only=True),
    Configuration("attention_flash", "attention by torch's FlashAttention 2", (RATES,), gpu_only=True),
    Configuration("attention_efficient", "attention by torch's kernel from xFormers", (RATES,), gpu_only=True),
    Configuration(
        "attention_fa3", "attention by FlashAttention 3", (RATES,), needs=("flash_attn_interface",), gpu_only=True
    ),
    Configuration(
        "attention_fa4", "attention by FlashAttention 4", (RATES,), needs=("flash_attn.cute",), gpu_only=True
    ),
    Configuration("copy", "a large copy", (RATES,)),
    Configuration("launches", "one of many small kernels in a CUDA graph", (RATES,), gpu_only=True),
    Configuration("adamw_fused", "torch AdamW, fused, fp32 moments", ("optimizer",)),
    Configuration("adamw8bit", "bitsandbytes AdamW8bit", ("optimizer",), needs=("bitsandbytes",)),
    Configuration("adamw_fp8_torchao", "torchao AdamWFp8", ("optimizer",), needs=("torchao",)),
    Configuration(COAT_OPTIMIZER, "COAT FP8AdamW, e4m3 moments, expansion", ("optimizer",)),
)


def named(level: str) -> dict[str, Configuration]:
    """The rows measured at `level`, by name, in the table's order."""
    return {row.name: row for row in CONFIGURATIONS if level in row.levels}


def rivals(level: str, name: str) -> dict[str, str]:
    """What a row is compared with: column title to the name of the baseline at the same level."""
    if level == RATES:
        return {}
    if level in ("op", ENGINE):
        return {} if named(level)[name].full else {"bf16": "bf16"}
    if level == "optimizer":
        return {"torch fused": "adamw_fused"}
    compiled = "bf16_compiled_checkpointed" if named(level)[name].recomputes else "bf16_compiled"
    return {"bf16 + compile": compiled, "ai-toolkit": "toolkit_default"}


@dataclass(frozen=True)
class Case:
    """What one process measures: one configuration at one size (ops and optimizers: at all their sizes)."""

    level: str
    configuration: str
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class BenchOptions:
    """A benchmark run.

    Attributes:
        levels: of `configurations.LEVELS`.
        resolutions: pixels along a side.
        batches: images of a step or a block; linears see one.
        rounds: how often each case is measured, each time in a new process.
        configurations: names to keep; none keeps all.
        geometry: of the transformer and its LoRA.
        device: "cpu", "cuda" or "cuda:1".
        repeats: timed calls in a process; None takes the level's own.
        timeout_s: of one process.
    """

    levels: tuple[str, ...] = LEVELS
    resolutions: tuple[int, ...] = (512, 768, 1024)
    batches: tuple[int, ...] = (1, 4)
    rounds: int = 3
    configurations: tuple[str, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    device: str = "cpu"
    repeats: int | None = None
    timeout_s: float = 1800.0

    def cases(self) -> list[Case]:
        """Every case, sizes outermost so that rivals are measured next to each other."""
        found = []
        for level in self.levels:
            names = [name for name in named(level) if not self.configurations or name in self.configurations]
            found += [Case(level, name, sizes) for sizes in self._sizes(level) for name in names]
        return found

    def _sizes(self, level: str) -> list[tuple[tuple[int, int], ...]]:
        if level == "optimizer":
            return [()]
        if level in ("op", RATES):
            return [tuple((resolution, 1) for resolution in self.resolutions)]
        return [((resolution, batch),) for batch in self.batches for resolution in self.resolutions]
