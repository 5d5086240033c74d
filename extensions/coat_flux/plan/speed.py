"""An estimate and lower bound of a step's time, from matrix products and attention alone.

    forward     Σ 2·K·N per token and linear, 4·L·d per token and block for attention over L tokens, plus adapters
    backward    one product for dx per linear, another in bf16 for the gradient of a trained one, 2.5 times attention's
                forward, two products per adapter
    recompute   the forward pass of the recomputed blocks again
    streamed    codes are copied while blocks multiply: a pass takes the longer of the two
    offloaded   moments are copied both ways at once, with `train.fused_backward` in the last backward pass, else after

FP8 linears run at the card's FP8 rate, all else at its bf16 rate, both at the fraction of the peak that large matrix
products reach. Casts, norms, launches, optimizer, encoders and data are not counted: real steps are slower, most so at
small resolutions.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..blocks.decide import BlockPlan
from ..blocks.described import LINEARS, Block, modulates
from ..blocks.placement import BACKWARD_OF_ATTENTION, attention, products
from ..blocks.sizes import Tokens
from .facts import Card
from .job import PIXELS_PER_TOKEN, JobFacts
from .predict import Prediction, offloaded_bytes

__all__ = ["BF16_FRACTION", "FP8_FRACTION", "run_seconds", "step_seconds"]

BF16_FRACTION, FP8_FRACTION = 0.70, 0.65  # of peak, published for large matrix products on H100


def step_seconds(facts: JobFacts, plan: BlockPlan, card: Card, tokens: Tokens | None = None) -> float:
    """One optimizer step with all its micro-batches of `tokens`, by default the largest."""
    size = tokens or facts.tokens
    forward = [_forward(facts, block, size, card) for block in facts.blocks]
    backward = sum(_backward(facts, block, size, card) for block in facts.blocks)
    backward += sum(forward[i] for i in plan.recomputed or ())
    copies = sum(facts.given.stream_bytes[i] for i in plan.streamed) / (card.copied_gb * 1e9)
    moments = offloaded_bytes(facts) / (card.copied_gb * 1e9)
    if facts.job.train.fused_backward:
        moments = max(0.0, moments - backward)
    return (max(sum(forward), copies) + max(backward, copies)) * facts.job.train.gradient_accumulation + moments


def run_seconds(facts: JobFacts, prediction: Prediction, card: Card) -> float:
    """All steps at the images' mean size, and all sample images."""
    train, sample = facts.job.train, facts.job.sample
    tokens = replace(facts.tokens, image=round(facts.data.mean_pixels / PIXELS_PER_TOKEN))
    total = train.steps * step_seconds(facts, prediction.plan, card, tokens)
    if facts.sample_tokens is not None:
        times = (train.steps - 1) // sample.sample_every + 1 + (not train.skip_first_sample)
        for item in sample.items():
            size = replace(facts.sample_tokens, image=item.width * item.height // PIXELS_PER_TOKEN)
            forward = sum(_forward(facts, block, size, card) for block in facts.blocks)
            total += times * (item.sample_steps or sample.sample_steps) * forward
    return total


def _rates(facts: JobFacts, card: Card) -> tuple[float, float, float]:
    """Operations per second of linears forward, linears backward and all else."""
    settings, bf16 = facts.settings, card.bf16_tflops * 1e12 * BF16_FRACTION
    fp8 = card.fp8_tflops * 1e12 * FP8_FRACTION
    in_fp8 = settings.fp8_gemms and fp8 > 0 and settings.inputs.name != "per_group"
    backward = in_fp8 and facts.job.coat.activation.grad_format != "bf16"
    return fp8 if in_fp8 else bf16, fp8 if backward else bf16, bf16


def _forward(facts: JobFacts, block: Block, tokens: Tokens, card: Card) -> float:
    linear, _, other = _rates(facts, card)
    return products(block, tokens) / linear + (attention(block, tokens) + _adapters(block, tokens)) / other


def _backward(facts: JobFacts, block: Block, tokens: Tokens, card: Card) -> float:
    if not block.trained_output:
        return 0.0
    _, linear, other = _rates(facts, card)
    sizes = {name: math.prod(block.shape(name)) for name in LINEARS[block.kind] if not modulates(name)}
    own = sum(size for name, size in sizes.items() if f"{name}.weight" in block.trained)
    rate = linear if facts.job.coat.activation.wgrad_format != "bf16" else other
    gradients = own / sum(sizes.values()) * products(block, tokens) / rate
    attended = BACKWARD_OF_ATTENTION * attention(block, tokens)
    return gradients + products(block, tokens) / linear + (attended + 2 * _adapters(block, tokens)) / other


def _adapters(block: Block, tokens: Tokens) -> float:
    ranked = sum(rank * sum(block.shape(name)) for name, rank in block.ranks if "norm" not in name)
    return 2 * tokens.rows * ranked / block.streams
