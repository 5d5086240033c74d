"""Bytes one FLUX block keeps for backward: `python scripts/bench_memory.py [--heads 24]`.

Builds one double and one single block at FLUX.1's head size with random weights and a rank-16 LoRA (fp32, PEFT) on
every linear that sees tokens, runs them forward in bf16 without autocast, as the trainer does, and counts every
allocation still alive afterwards (torch's profiler: sum of allocations minus frees), less the block's outputs.
Prints bytes per token and hidden element as a Markdown table. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

HEAD_DIM = 128  # FLUX.1's
RANK = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16, nothing recomputed": {"enabled": False},
    "FP8, attention in bf16": {"memory": {"checkpointing": "none"}, "activation": {"attention": "bf16"}},
    "FP8": {"memory": {"checkpointing": "none"}},
    "recomputed from an FP8 input": {"memory": {"checkpointing": "all"}},
}


def make_model(heads: int) -> nn.Module:
    """Return a FLUX transformer with one double and one single block."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=256,
        pooled_projection_dim=64,
        guidance_embeds=True,
        in_channels=64,
    )
    return model.to(torch.bfloat16).requires_grad_(False)


def prepare(model: nn.Module, setting: dict[str, Any]) -> nn.Module:
    """Return a copy of the model with COAT as set and an fp32 LoRA."""
    from peft import LoraConfig

    from coat_flux.config import COATConfig
    from coat_flux.flux import apply_coat
    from coat_flux.lora import attach_lora

    model, config = copy.deepcopy(model), COATConfig.from_dict(setting)
    apply_coat(model, config)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name and ".norm" not in name
    ]
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    attach_lora(model, config)
    return model.train()


def kept_bytes(run: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """Return what `run` allocated and did not free, without its outputs."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = run()
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    alive = sum(event.nbytes() for event in events if event.name() == "[memory]")
    storages = {out.untyped_storage().data_ptr(): out.untyped_storage().nbytes() for out in outputs}
    return alive - sum(storages.values())


def measure(model: nn.Module, text_tokens: int, image_tokens: int) -> list[float]:
    """Return bytes per token and hidden element of the double and the single block."""
    hidden, tokens = model.inner_dim, text_tokens + image_tokens
    image = torch.randn(1, image_tokens, hidden, dtype=torch.bfloat16).requires_grad_()
    text = torch.randn(1, text_tokens, hidden, dtype=torch.bfloat16).requires_grad_()
    modulation = torch.randn(1, hidden, dtype=torch.bfloat16)
    rotary = model.pos_embed(torch.zeros(tokens, 3))
    call = getattr(model, "_gradient_checkpointing_func", None) or (lambda block, *args: block(*args))
    blocks = (model.transformer_blocks[0], model.single_transformer_blocks[0])
    return [
        kept_bytes(lambda block=block: call(block, image, text, modulation, rotary)) / (tokens * hidden)
        for block in blocks
    ]


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4, help="attention heads of 128; FLUX.1 has 24 (default: 4)")
    parser.add_argument("--text-tokens", type=int, default=128)
    parser.add_argument("--image-tokens", type=int, default=384)
    options = parser.parse_args()
    model = make_model(options.heads)
    print(
        f"torch {torch.__version__}, {options.heads} heads x {HEAD_DIM}, rank {RANK} fp32, bytes per token x hidden\n"
    )
    print("| setting | double block | single block |\n|---|---|---|")
    for name, setting in SETTINGS.items():
        double, single = measure(prepare(model, setting), options.text_tokens, options.image_tokens)
        print(f"| {name} | {double:.1f} | {single:.1f} |", flush=True)


if __name__ == "__main__":
    main()
