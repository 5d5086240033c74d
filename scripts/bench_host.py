"""Time the host needs for a training step of FLUX.1-dev's 57 blocks: `python scripts/bench_host.py [--rounds N]`.

Forward and backward pass on a CPU at a width of 64, with 8 + 8 tokens, with all kernels stubbed: our operators run what
they run on CUDA up to the launch (`coat_core.ops`; without Triton their fakes), and torch's own products,
attention and copies only allocate. What is left is Python, autograd and torch's dispatcher: what stands between two
launches on a GPU. Launching itself takes longer there (5 µs of the driver each, and Triton's own launcher).

Prints the median of CPU time over rounds, after three warm-ups, and what this machine takes for calls that have nothing
of ours in them, so that figures of other days and machines can be compared.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import pkgutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coat_core.ops import dispatch, scaled_mm
from coat_core.ops.operators import Operator
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.fused import linears, modulation
from coat_flux.blocks.fused.gradients import written_gradients
from coat_flux.blocks.gemms import set_transposed
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.mini_flux.geometry import make_flux_dev_geometry
from coat_flux.trainers.standalone.network import add_lora, lora_targets

TEXT = IMAGE = 8
"""Tokens of each stream."""
CALLS = 2000
"""Of each yardstick."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kernels", choices=("launchers", "fakes"))
    given = parser.parse_args()
    kernels = given.kernels or ("launchers" if importlib.util.find_spec("triton") else "fakes")
    torch.set_num_threads(1)
    model = make_model()
    stub_our_operators(kernels)
    library = stub_torch()
    passes = {"forward": [], "backward": []}  # type: dict[str, list[float]]
    with no_launches(kernels), written_gradients():
        for index in range(given.rounds + 3):
            if index == 1:  # a run on a GPU keeps these, where there is memory
                set_transposed([*model.transformer_blocks, *model.single_transformer_blocks], True)
            begin = time.process_time()
            (prediction,) = model(**inputs(model), return_dict=False)
            middle = time.process_time()
            prediction.float().sum().backward()
            passes["forward"].append(middle - begin)
            passes["backward"].append(time.process_time() - middle)
            model.zero_grad()
        with Calls() as calls:
            (prediction,) = model(**inputs(model), return_dict=False)
            prediction.float().sum().backward()
    del library  # with it the stubs end
    for name, seconds in passes.items():
        print(f"{name}: {1e3 * statistics.median(seconds[3:]):.1f} ms (lowest {1e3 * min(seconds[3:]):.1f})")
    together = 1e3 * sum(statistics.median(seconds[3:]) for seconds in passes.values())
    counted = ", ".join(f"{count} operators {whose}" for whose, count in calls.found.items())
    print(f"together: {together:.1f} ms with {kernels}; {counted}")
    print("this machine:", ", ".join(f"{name} {found:.2f} µs" for name, found in yardsticks().items()))
    return 0


def stub_our_operators(kernels: str) -> None:
    """Let our operators run on a CPU what they run on CUDA; with kernels "fakes" what makes empty results."""
    for op in (scaled_mm.scaled_mm, *(op for op, _ in dispatch.launchers.values())):
        if isinstance(op, Operator):  # all but the optimizer's step, which changes its arguments
            kernel = op._abstract_fn if kernels == "fakes" else op.kernels["cuda"]
            op.register_kernel("cpu")(kernel)
    if kernels == "fakes":
        return
    from coat_core import ops
    from coat_core.ops import launch as runtime

    as_on_a_gpu = {  # which has types that a CPU's interpreter has not
        "empty_values": runtime.empty,
        "empty_codes": lambda shape, fmt, device: runtime.empty(shape, fmt.dtype, device),
        "dot_operand": lambda x: x,
    }
    for module in (linears, modulation):  # whose sums a GPU writes in fp32 at once
        vars(module)["product"] = lambda a, b, dtype: a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    for found in pkgutil.iter_modules(ops.__path__):
        names = vars(importlib.import_module(f"{ops.__name__}.{found.name}"))
        names |= {name: function for name, function in as_on_a_gpu.items() if name in names}
    dispatch.triton_obstacle = functools.cache(lambda device: None)
    torch.cuda.current_device = lambda: None  # of a CPU tensor's device, the index
    torch._scaled_mm = lambda a, b, out_dtype, **_: a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def stub_torch() -> torch.library.Library:
    """Let torch's own products, attention and copies on a CPU only allocate."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[1]))

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))

    def attention(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    stubs: dict[str, Callable[..., Any]] = {
        "mm": mm,
        "bmm": bmm,
        "addmm": lambda y, a, b, **_: mm(a, b),
        "addmm_": lambda y, a, b, **_: y,
        "baddbmm": lambda y, a, b, **_: bmm(a, b),
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
        "_foreach_copy_": lambda copies, originals, non_blocking=False: None,  # on a GPU one launch, here hundreds
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they stand in for torch's
        for name, stub in stubs.items():
            library.impl(name, stub, "CPU")
    return library


def no_launches(kernels: str) -> AbstractContextManager[None]:
    """While this is open launchers launch nothing."""
    if kernels == "fakes":
        return nullcontext()
    from coat_core.ops.launch import recorded_launches

    return recorded_launches(lambda kernel, grid, args, options: None)


class Calls(TorchDispatchMode):
    """Counts operators of torch and of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.found["ours" if func.namespace == "coat" else "torch's"] += 1
        return func(*args, **(kwargs or {}))


class _Node(torch.autograd.Function):
    """Nothing, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Hand it on."""
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Hand it back."""
        return grad


def yardsticks() -> dict[str, float]:
    """Microseconds of calls that have nothing of ours in them."""
    x, trained = torch.ones(2), torch.ones(2, requires_grad=True)
    library = torch.library.Library("coat_bench_host", "FRAGMENT")
    library.define("nothing(Tensor x, Tensor y, int n) -> Tensor")
    library.impl("nothing", lambda x, y, n: x, "CompositeExplicitAutograd")
    nothing = torch.ops.coat_bench_host.nothing.default

    def node() -> None:
        y = _Node.apply(trained)
        y.backward(y.detach())

    calls: dict[str, Callable[[], Any]] = {
        "torch.empty": lambda: torch.empty(2),
        "view": lambda: x.view(2),
        "add": lambda: x + x,
        "operator in Python": lambda: nothing(x, x, 1),
        "autograd function": node,
    }
    return {name: microseconds(call) for name, call in calls.items()}


def microseconds(call: Callable[[], Any]) -> float:
    """Median of rounds."""
    rounds = []
    for _ in range(7):
        begin = time.process_time()
        for _ in range(CALLS // 7):
            call()
        rounds.append((time.process_time() - begin) / (CALLS // 7))
    return 1e6 * statistics.median(rounds)


def make_model() -> Any:
    """19 + 38 narrow blocks with COAT and adapters of rank 16, as a run has them."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
    model: Any = make_flux_dev_geometry("cpu", torch.bfloat16, **sizes)
    targets = lora_targets(model)
    apply_coat(model, config := COATConfig.from_dict({"memory": {"checkpointing": "none"}}), device=torch.device("cpu"))
    add_lora(model, targets, 16, seed=0)
    attach_lora(model, config)
    assert BlockRunner.of(model) is not None
    return model.train()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """A micro-batch of one image."""
    config, dtype = model.config, torch.bfloat16
    return {
        "hidden_states": torch.randn(1, IMAGE, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, config.joint_attention_dim, dtype=dtype),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "img_ids": torch.zeros(IMAGE, 3),
        "txt_ids": torch.zeros(TEXT, 3),
        "guidance": torch.ones(1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
