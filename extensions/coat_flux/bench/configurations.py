"""The compared configurations and sizes; a new one is a row in `CONFIGURATIONS`.

Rows of a model train the same LoRA, each as its trainer runs it: bf16 and torchao under bf16 autocast, as accelerate's
scripts do, COAT and ai-toolkit's recipes without. Rows of the level "trainer" are for `scripts/gpu_check.py`. Nothing
heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.names import COAT_OPTIMIZER
from .limits import Geometry

OK, CANNOT, OUT_OF_MEMORY, FAILED = "ok", "cannot", "out of memory", "failed"  # how a process ends; see worker
STEP, TRAINER, OPTIMIZER = "step", "trainer", "optimizer"
LEVELS = (STEP, OPTIMIZER)
COUNT = "count"  # of operators, on no device: `count.py`
CALLS = {STEP: (3, 10), TRAINER: (5, 20), OPTIMIZER: (5, 20)}  # (warm-up, timed), on a GPU
CPU_CALLS = (1, 3)


@dataclass(frozen=True)
class Configuration:
    """One row of the comparison; without a `coat:` block it is a baseline."""

    name: str
    about: str
    levels: tuple[str, ...] = (STEP,)
    coat: Mapping[str, Any] | None = None
    checkpointing: bool = False  # torch's recomputation of every block (baselines; COAT's is in its block)
    compile_mode: str = ""  # torch.compile's, for each block separately; "" compiles nothing
    quantizer: str = ""  # of `worker.quantize_linears`
    adapters: str = "fp32"
    autocast: bool = True
    optimizer: str = "adamw_fused"
    needs: tuple[str, ...] = ()  # packages
    full: bool = False  # the transformer itself is trained, each weight updated in backward
    captures: bool = False  # a whole step is one CUDA graph of ours

    @property
    def recomputes(self) -> bool:
        """Whether every block is recomputed in backward."""
        return self.checkpointing or (self.coat or {}).get("memory", {}).get("checkpointing") == "all"

    @property
    def fp8_linears(self) -> bool:
        """Whether linears multiply in FP8 if the card can."""
        if self.coat is not None:
            return bool(self.coat.get("activation", {}).get("use_fp8", True))
        return self.quantizer.startswith("torchao")


KEPT = {"checkpointing": "none", "transposed_weights": "never"}
COPIED = {"checkpointing": "none", "transposed_weights": "always"}
RECOMPUTED = {"checkpointing": "all"}
EAGER = {"measure": "never", "cuda_graphs": "never", "kernels": "all"}
REPLAYED = {"measure": "never", "cuda_graphs": "auto", "kernels": "all"}
INT8 = {"weight": {"format": "int8"}, "activation": {"format": "int8", "grad_format": "int8"}}
TORCHAO: dict[str, Any] = {"quantizer": "torchao", "needs": ("torchao",)}
ROWWISE = {**TORCHAO, "quantizer": "torchao_rowwise"}
TOOLKIT: dict[str, Any] = {"checkpointing": True, "autocast": False, "optimizer": "adamw8bit"}


def _coat(
    name: str, about: str, *levels: str, speed: Mapping[str, Any] = EAGER, full: bool = False, **coat: Any
) -> Configuration:
    return Configuration(
        name,
        about,
        levels,
        coat={"memory": KEPT, **coat, "speed": speed, "fallback": "error"},
        autocast=False,
        optimizer=COAT_OPTIMIZER,
        full=full,
        captures=speed is REPLAYED,
    )


CONFIGURATIONS = (
    Configuration("bf16_checkpointed", "bf16, every block recomputed", checkpointing=True),
    Configuration("bf16", "bf16", (STEP, TRAINER)),
    Configuration(
        "bf16_compiled_checkpointed",
        "bf16, blocks compiled, every block recomputed",
        checkpointing=True,
        compile_mode="default",
    ),
    Configuration("bf16_compiled", "bf16, blocks compiled", compile_mode="default"),
    Configuration(
        "bf16_cudagraphs",
        "bf16, blocks compiled and recorded as CUDA graphs (reduce-overhead)",
        compile_mode="reduce-overhead",
    ),
    Configuration(
        "bf16_max_autotune",
        "bf16, blocks compiled by max-autotune, with CUDA graphs",
        compile_mode="max-autotune",
    ),
    Configuration(
        "bf16_adapters",
        "bf16 in the LoRA too, blocks compiled",
        compile_mode="default",
        adapters="bf16",
        autocast=False,
    ),
    Configuration(
        "toolkit_default",
        "optimum-quanto qfloat8 weights, every block recomputed, bitsandbytes AdamW8bit: ai-toolkit's default",
        quantizer="quanto",
        needs=("optimum.quanto", "bitsandbytes"),
        **TOOLKIT,
    ),
    Configuration(
        "toolkit_convrot8",
        "ai-toolkit's convrot8 (int8 GEMM forward), every block recomputed, bitsandbytes AdamW8bit",
        quantizer="convrot8",
        needs=("bitsandbytes",),
        **TOOLKIT,
    ),
    Configuration("torchao_float8", "torchao float8 training", **TORCHAO),
    Configuration(
        "torchao_float8_compiled", "torchao float8 training, blocks compiled", compile_mode="default", **TORCHAO
    ),
    Configuration("torchao_rowwise", "torchao float8 training, scaled per row", **ROWWISE),
    Configuration(
        "torchao_rowwise_compiled",
        "torchao float8 training, scaled per row, blocks compiled",
        compile_mode="default",
        **ROWWISE,
    ),
    _coat("coat", "COAT, fused flow, nothing recomputed", STEP, TRAINER, COUNT),
    _coat("coat_recomputed", "COAT, every block recomputed", STEP, TRAINER, memory=RECOMPUTED),
    _coat(
        "coat_per_tensor",
        "COAT, one scale for each tensor",
        STEP,
        COUNT,
        activation={"linear_granularity": "per_tensor"},
    ),
    _coat("coat_weight_only", "COAT, FP8 weights only", STEP, activation={"use_fp8": False}),
    _coat("coat_nvfp4", "COAT, weights in 4.5 bits", STEP, TRAINER, weight={"format": "nvfp4"}),
    _coat("coat_int8", "COAT, weights and inputs in INT8", STEP, TRAINER, COUNT, **INT8),
    _coat("coat_streamed", "COAT, weights in CPU memory", TRAINER, memory={**KEPT, "stream_blocks": "all"}),
    _coat("coat_transposed", "COAT, with transposed weights", STEP, TRAINER, COUNT, memory=COPIED),
    _coat("coat_cudagraphs", "COAT, the step as a CUDA graph", STEP, TRAINER, memory=COPIED, speed=REPLAYED),
    _coat("coat_picked", "COAT, what its start-up measurement picks", STEP, TRAINER, memory=COPIED, speed={}),
    _coat("full", "full fine-tuning", TRAINER, full=True),
    _coat("full_wgrad", "full fine-tuning, wgrad in e4m3", TRAINER, full=True, activation={"wgrad_format": "e4m3"}),
    _coat(
        "full_offload",
        "full fine-tuning, moments in CPU memory",
        TRAINER,
        full=True,
        optimizer={"offload": "cpu"},
    ),
    Configuration("adamw_fused", "torch AdamW, fused, fp32 moments", (OPTIMIZER,)),
    Configuration("adamw8bit", "bitsandbytes AdamW8bit", (OPTIMIZER,), needs=("bitsandbytes",)),
    Configuration("adamw_fp8_torchao", "torchao AdamWFp8", (OPTIMIZER,), needs=("torchao",)),
    Configuration(COAT_OPTIMIZER, "COAT FP8AdamW, e4m3 moments, expansion", (OPTIMIZER,)),
)


def named(level: str) -> dict[str, Configuration]:
    """The rows measured at `level`, by name, in the table's order."""
    return {row.name: row for row in CONFIGURATIONS if level in row.levels}


def rivals(level: str, name: str) -> dict[str, str]:
    """The baselines of a row: column title → name of the baseline at the same level."""
    if level == OPTIMIZER:
        return {"torch fused": "adamw_fused"}
    row = named(level)[name]
    if level == TRAINER:
        return {} if row.full else {"bf16": "bf16"}
    compiled = "bf16_compiled_checkpointed" if row.recomputes else "bf16_compiled"
    return {"bf16 + compile": compiled, "ai-toolkit": "toolkit_default"}


@dataclass(frozen=True)
class BenchOptions:
    """A benchmark run: each case in a new process in every round; without names, all configurations."""

    levels: tuple[str, ...] = LEVELS
    resolutions: tuple[int, ...] = (512, 768, 1024)
    batches: tuple[int, ...] = (1, 4)
    rounds: int = 3
    configurations: tuple[str, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    device: str = "cpu"
    repeats: int | None = None
    timeout_s: float = 1800.0

    def cases(self) -> list[tuple[str, str, tuple[tuple[int, int], ...]]]:
        """Level, configuration and sizes of every process, rivals next to each other."""
        pairs = [((resolution, batch),) for batch in self.batches for resolution in self.resolutions]
        cases = []
        for level in self.levels:
            names = [name for name in named(level) if not self.configurations or name in self.configurations]
            for sizes in [()] if level == OPTIMIZER else pairs:
                cases += [(level, name, sizes) for name in names]
        return cases
