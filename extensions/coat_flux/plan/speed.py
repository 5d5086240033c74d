"""How long a step would take if matrix products and attention were all there is: an estimate, and a lower bound.

    forward     Σ 2·K·N per token and linear, 4·L·d per token and block for attention over L tokens, adapters besides
    backward    one product for dx per frozen linear, 2.5 times attention's forward, two products per adapter
    recompute   the forward pass of the recomputed blocks once more

Linears run at the card's FP8 rate where they multiply in FP8, all else at its bf16 rate, both at a fraction of the peak
that large matrix products reach. Casts, norms, launches, optimizer, encoders and data are not counted: real steps are
slower, most so at small resolutions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..blocks.described import Block
from ..blocks.sizes import Tokens
from .facts import Card
from .job import PIXELS_PER_TOKEN, JobFacts
from .predict import Prediction

__all__ = ["BF16_FRACTION", "FP8_FRACTION", "run_seconds", "step_seconds"]

BF16_FRACTION, FP8_FRACTION = 0.70, 0.65  # of peak, published for large matrix products on H100
BACKWARD_OF_ATTENTION = 2.5


def step_seconds(facts: JobFacts, recomputed: Iterable[int], card: Card, tokens: Tokens | None = None) -> float:
    """One optimizer step, all its micro-batches.

    Args:
        facts: the job.
        recomputed: indices of the blocks that recompute.
        card: whose rates count.
        tokens: of a micro-batch; the largest by default.
    """
    size, chosen = tokens or facts.tokens, set(recomputed)
    passes = sum(
        _forward(facts, block, size, card) * (2 if i in chosen else 1) + _backward(facts, block, size, card)
        for i, block in enumerate(facts.blocks)
    )
    return passes * facts.job.train.gradient_accumulation


def run_seconds(facts: JobFacts, prediction: Prediction, card: Card) -> float:
    """All steps at the images' mean size, and all sample images."""
    train, sample = facts.job.train, facts.job.sample
    tokens = replace(facts.tokens, image=round(facts.data.mean_pixels / PIXELS_PER_TOKEN))
    total = train.steps * step_seconds(facts, prediction.recomputed, card, tokens)
    if facts.sample_tokens is not None:
        times = (train.steps - 1) // sample.sample_every + 1 + (not train.skip_first_sample)
        for item in sample.items():
            size = replace(facts.sample_tokens, image=item.width * item.height // PIXELS_PER_TOKEN)
            forward = sum(_forward(facts, block, size, card) for block in facts.blocks)
            total += times * (item.sample_steps or sample.sample_steps) * forward
    return total


def _rates(facts: JobFacts, card: Card) -> tuple[float, float, float]:
    """Operations a second of linears forward, linears backward and all else."""
    settings, bf16 = facts.settings, card.bf16_tflops * 1e12 * BF16_FRACTION
    fp8 = card.fp8_tflops * 1e12 * FP8_FRACTION
    in_fp8 = settings.fp8_gemms and fp8 > 0 and settings.inputs.name != "per_group"
    backward = in_fp8 and facts.job.coat.activation.grad_format != "bf16"
    return fp8 if in_fp8 else bf16, fp8 if backward else bf16, bf16


def _forward(facts: JobFacts, block: Block, tokens: Tokens, card: Card) -> float:
    linear, _, other = _rates(facts, card)
    return _products(block, tokens) / linear + (_attention(block, tokens) + _adapters(block, tokens)) / other


def _backward(facts: JobFacts, block: Block, tokens: Tokens, card: Card) -> float:
    if not block.trained_output:
        return 0.0
    _, linear, other = _rates(facts, card)
    attention = BACKWARD_OF_ATTENTION * _attention(block, tokens)
    return _products(block, tokens) / linear + (attention + 2 * _adapters(block, tokens)) / other


def _products(block: Block, tokens: Tokens) -> int:
    """A token passes q, k, v, the projection and the MLP once, in any kind of block; modulation is one row."""
    return 2 * tokens.rows * block.weights_per_row


def _attention(block: Block, tokens: Tokens) -> int:
    return 4 * tokens.rows * (tokens.text + tokens.image) * block.hidden


def _adapters(block: Block, tokens: Tokens) -> float:
    ranked = sum(rank * sum(block.shape(name)) for name, rank in block.ranks if "norm" not in name)
    return 2 * tokens.rows * ranked / block.streams
