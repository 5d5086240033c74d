"""Time the host needs for a training step of FLUX.1-dev's 57 blocks: `python scripts/bench_host.py [--rounds N]`.

Forward and backward pass on a CPU at a width of 64, with 8 + 8 tokens, so that the tensors cost nothing, and with the
operators of `coat_core` replaced by their fakes, which only allocate what the kernels would write. What is left is
Python, autograd and torch's dispatcher: what stands between two launches on a GPU, where launching takes longer (5 µs
of the driver each) and Triton's launchers run besides. Prints the median of CPU time over rounds, after two warm-ups.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from coat_core.kernels import dispatch, scaled_mm
from coat_flux.blocks.apply import apply_coat
from coat_flux.blocks.lora import attach_lora
from coat_flux.blocks.runner import BlockRunner
from coat_flux.config.coat import COATConfig
from coat_flux.mini_flux.geometry import make_flux_dev_geometry
from coat_flux.trainers.standalone.network import add_lora, lora_targets

TEXT = IMAGE = 8
"""Tokens of each stream."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = make_model()
    library = torch.library.Library("coat", "IMPL")
    for name, (op, _) in dispatch.launchers.items():
        if getattr(op, "_abstract_fn", None) is not None:  # the optimizer's step changes its arguments
            library.impl(name.removeprefix("coat::"), op._abstract_fn, "CPU")
    library.impl("fp8_mm", scaled_mm.scaled_mm._abstract_fn, "CPU")
    passes = {"forward": [], "backward": []}  # type: dict[str, list[float]]
    for _ in range(rounds + 2):
        begin = time.process_time()
        (prediction,) = model(**inputs(model), return_dict=False)
        middle = time.process_time()
        prediction.float().sum().backward()
        passes["forward"].append(middle - begin)
        passes["backward"].append(time.process_time() - middle)
        model.zero_grad()
    for name, seconds in passes.items():
        print(f"{name}: {1e3 * statistics.median(seconds[2:]):.1f} ms (lowest {1e3 * min(seconds[2:]):.1f})")
    print(f"together: {1e3 * sum(statistics.median(seconds[2:]) for seconds in passes.values()):.1f} ms")
    return 0


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
