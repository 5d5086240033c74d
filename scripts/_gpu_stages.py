"""What `gpu_check.py` runs, in order: each stage's rows of the benchmark, or its command, and its time limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")


@dataclass(frozen=True)
class Stage:
    """One thing to find out.

    Attributes:
        name: on the command line and in the file.
        about: in words.
        seconds: its time limit on a GPU.
        level: of `coat_flux.bench`, which measures `rows`; empty where `command` runs.
        rows: names in `bench.configurations`.
        sizes: (resolution, batch) pairs.
        command: arguments of Python; "{spec}" and "{result}" are JSON files it may read and write.
        toy_rows: of a dry run, where they are others: nothing is compiled but one block.
        needed: where it fails, nothing else is run.
    """

    name: str
    about: str
    seconds: float
    level: str = ""
    rows: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((1024, 1), (512, 1))
    command: tuple[str, ...] = ()
    toy_rows: tuple[str, ...] = ()
    needed: bool = False


OPERATORS = (str(Path(__file__).with_name("gpu_check.py")), "--operators")
WORKER = ("-m", "coat_flux.bench.worker", "{spec}", "{result}")
STAGES = (
    Stage("versions", "versions, choices, our kernels' self-test", 180, level="machine", command=WORKER, needed=True),
    Stage(
        "tests",
        "the gpu tests",
        420,
        command=(*PYTEST, "tests/kernels", "tests/integration/test_gpu_step.py"),
    ),
    Stage(
        "rates",
        "matrix products, attention, copy and launch",
        150,
        level="rates",
        rows=(
            *("gemm_bf16", "gemm_fp8", "gemm_fp8_per_row", "attention", "copy", "launches"),
            *("attention_cudnn", "attention_flash", "attention_efficient", "attention_fa3", "attention_fa4"),
        ),
    ),
    Stage("operators", "each kernel of ours", 240, command=(*OPERATORS, "{spec}", "{result}")),
    Stage(
        "blocks",
        "one block of each kind",
        300,
        level="block",
        rows=("coat_transposed", "bf16", "bf16_compiled"),
        toy_rows=("coat_transposed", "bf16", "bf16_compiled"),
    ),
    Stage(
        "fp8",
        "the whole model in FP8",
        300,
        level="step",
        rows=("coat_transposed", "coat_cudagraphs"),
        toy_rows=("coat_transposed", "coat_cudagraphs"),
    ),
    Stage(
        "bf16",
        "the whole model in bf16",
        360,
        level="step",
        rows=("bf16_compiled", "bf16_cudagraphs", "bf16"),
        toy_rows=("bf16_cudagraphs", "bf16"),
    ),
    Stage(
        "peers",
        "others' FP8 and int8, and the strongest bf16",
        600,
        level="step",
        rows=(
            *("toolkit_default", "toolkit_convrot8", "torchao_rowwise_compiled", "torchao_float8_compiled"),
            *("bf16_adapters", "bf16_compiled_checkpointed", "bf16_max_autotune"),
        ),
        toy_rows=("toolkit_default", "toolkit_convrot8", "torchao_rowwise", "torchao_float8"),
    ),
    Stage(
        "engine",
        "steps of the stand-alone trainer",
        300,
        level="engine",
        rows=("coat_transposed", "coat_cudagraphs", "bf16"),
        toy_rows=("coat_transposed", "bf16"),
    ),
    Stage(
        "plan",
        "peak memory of the trainer against its plan",
        420,
        level="engine",
        rows=("coat_streamed", "coat_nvfp4", "coat_int8", "coat_recomputed", "coat_picked"),
        toy_rows=("coat_recomputed",),
        sizes=((768, 1), (512, 4)),
    ),
    Stage(
        "full",
        "full fine-tuning, wgrad in bf16 and in FP8, moments in host memory",
        300,
        level="engine",
        rows=("full", "full_wgrad", "full_offload"),
        sizes=((1024, 1),),
    ),
    Stage("optimizer", "optimizers alone", 120, level="optimizer", rows=("coat_fp8_adamw", "adamw_fused", "adamw8bit")),
)
