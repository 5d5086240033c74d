"""GPUs by memory and name, and an estimate from below of a step's time on one: matrix products and attention alone.

    forward     Σ 2·K·N per token and linear, 4·L·d per token and block for attention over L tokens, plus adapters
    backward    one product for dx per linear, another in bf16 for the gradient of a trained one, 2.5 times attention's
                forward, two products per adapter
    recompute   the forward pass of the recomputed blocks again
    streamed    codes are copied while blocks multiply: a pass takes the longer of the two
    offloaded   moments are copied both ways at once, with `train.fused_backward` in the last backward pass, else after

Linears in FP8 or INT8 run at the card's rate of that, all else at its bf16 rate, both at the fraction of the peak that
large matrix products reach. Casts, norms, launches, optimizer, encoders and data are not counted: real steps are
slower, most so at small resolutions.

Sources: NVIDIA's datasheets and architecture papers (dense rates, fp32 accumulation); the RTX 4070 Ti and 4080 scaled
from the RTX 4090 by cores and clock.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..base.errors import UserError
from ..blocks.decide import BlockPlan
from ..blocks.formats import PIXELS_PER_TOKEN
from ..blocks.held import room_of
from ..blocks.sizes import BACKWARD_OF_ATTENTION, LINEARS, Block, Tokens
from ..config.coat import AUTO, COATConfig
from ..config.findings import closest
from ..config.job import JobConfig
from ..config.options import FORMATS, INT8
from .job import JobFacts
from .predict import Prediction


@dataclass(frozen=True)
class Card:
    """A GPU memory size in 1e9 bytes, and the rates of one GPU that has it."""

    gb: float
    name: str = ""  # empty if no GPU is meant
    bf16_tflops: float = 0.0  # dense matrix products with fp32 accumulation, 1e12 operations a second
    fp8_tflops: float = 0.0  # 0 if the GPU has none
    copied_gb: float = 25.0  # 1e9 bytes a second from pinned CPU memory: four fifths of its PCIe link's rate
    gb_per_second: float = 0.0  # memory traffic; 0 if not needed
    multiprocessors: float = 0  # likewise
    capability: tuple[int, int] = (8, 9)  # compute capability
    int8_tflops: float = 0.0  # 0 if unknown
    clock_ghz: float = 0.0  # boost; 0 if not needed

    @property
    def weight_format(self) -> str:
        """What `weight.format: auto` takes by these peaks; a run times both."""
        return INT8 if self.capability < FIRST_FP8 or self.int8_tflops > self.fp8_tflops else FORMATS[0]

    @property
    def peaks(self) -> str:
        """Of products in 8 bits, in brackets; "" if unknown."""
        return f" (peaks: INT8 {self.int8_tflops:g}, FP8 {self.fp8_tflops:g} TFLOP/s)" if self.int8_tflops else ""

    @property
    def room(self) -> float:
        """Bytes that a run may use."""
        return room_of(self.gb * 1e9)


FIRST_FP8, FIRST_BF16 = (8, 9), (8, 0)  # compute capabilities that multiply them
GEFORCE = ((8, 6), (8, 9), (12, 0))  # of consumer cards: INT8 at twice the rate of FP8 with fp32 sums
MOST_GB = 1000  # above it a bare number is a card's name
_NO_NAME = re.compile(r"nvidia|geforce|rtx|quadro|tesla|generation|blackwell|gpu|vram|sxm\d?|pcie|nvl|hbm\w*|[^a-z0-9]")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?gi?b?\b")

BF16_FRACTION, FP8_FRACTION = 0.70, 0.65  # of peak, published for large matrix products on H100

KNOWN: dict[str, Card] = {}  # by name without maker and series; of several sizes the smallest, "A100 80GB" says more
CARDS: list[Card] = []  # the usual ones, which have a size each
DEVICES: dict[str, Card] = {}  # by torch's name, of those whose rates are published
MODELLED: dict[str, Card] = {}  # by short name ("h200", "rtx4090"), of those that `bench.limits.kernel_ms` can model
with Path(__file__).with_name("cards.tsv").open(encoding="utf-8", newline="") as table:
    for row in csv.DictReader(table, delimiter="\t"):
        name, usual, device, capability = (row.pop(key) for key in ("name", "usual", "device", "capability"))
        major, _, minor = capability.partition(".")
        rates = {key: float(value or 0) for key, value in row.items()}
        card = Card(name=name, capability=(int(major), int(minor)), **rates)
        KNOWN[_NO_NAME.sub("", name.casefold())] = card
        if usual:
            CARDS.append(card)
        if device:
            DEVICES[device] = card
        if card.multiprocessors:
            MODELLED[name.lower().replace(" ", "")] = card


def find_card(text: str) -> Card:
    """Parse memory in GB, a name or both, such as `24GB` or `A100 80GB`; raises UserError."""
    low = text.casefold().strip()
    size, name = _SIZE.search(low), _NO_NAME.sub("", _SIZE.sub("", low))
    if re.fullmatch(r"\d+(\.\d+)?", low) and name not in KNOWN:
        size, name = re.match(r"(.+)", low), ""
    card = KNOWN.get(name, Card(0))
    gb = float(size[1]) if size else card.gb
    if (name and name not in KNOWN) or not 0 < gb < MOST_GB:
        near = closest(name, KNOWN) if name else None
        remedy = f"did you mean {near}?" if near else "write a name, such as 4090"
        raise UserError(f"--gpu {text!r}: must be a card's memory in GB, above 0, such as 24, or its name; {remedy}")
    if not name:
        return next((card for card in CARDS if card.gb == gb), Card(gb))
    return replace(card, gb=gb)


def on_card(job: JobConfig, card: Card) -> JobConfig:
    """The job with the format that its weights take on this card: by `auto`, or by `fallback: int8` without FP8."""
    coat = job.coat
    falls_back = coat.fallback == INT8 and coat.weight.format in FORMATS and card.capability < FIRST_FP8
    multiplies = coat.enabled and coat.weight.use_fp8 and coat.activation.use_fp8
    changes = multiplies and (falls_back or coat.weight.format == AUTO)
    return replace(job, coat=coat.with_weights_in(card.weight_format)) if changes else job


def gain_of_auto(coat: COATConfig, card: Card | None) -> str:
    """What `weight.format: auto` may do in place of e4m3, by a card's peaks; "" if no better, or unknown."""
    multiplies = coat.enabled and coat.weight.use_fp8 and coat.activation.use_fp8
    if card is None or not multiplies or coat.weight.format != FORMATS[0] or not card.int8_tflops > card.fp8_tflops > 0:
        return ""
    return f"weight.format: auto may take int8, which is faster here{card.peaks}"


def card_of(device: torch.device) -> Card | None:
    """This GPU, if its rates are published."""
    return DEVICES.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def step_seconds(facts: JobFacts, plan: BlockPlan, card: Card, tokens: Tokens | None = None) -> float:
    """One optimizer step with all its micro-batches of `tokens`, by default the largest."""
    size = tokens or facts.tokens
    passes = [_passes(facts, block, size, card) for block in facts.blocks]
    forward = sum(there for there, _ in passes)
    backward = sum(back for _, back in passes) + sum(passes[i][0] for i in plan.recomputed or ())
    copies = sum(facts.given.stream_bytes[i] for i in plan.streamed) / (card.copied_gb * 1e9)
    moments = facts.offloaded_bytes / (card.copied_gb * 1e9)
    if facts.job.train.fused_backward:
        moments = max(0.0, moments - backward)
    return (max(forward, copies) + max(backward, copies)) * facts.job.train.gradient_accumulation + moments


def run_seconds(facts: JobFacts, prediction: Prediction, card: Card) -> float:
    """All steps at the images' mean size, and all sample images."""
    train, sample = facts.job.train, facts.job.sample
    tokens = replace(facts.tokens, image=round(facts.data.mean_pixels / PIXELS_PER_TOKEN))
    total = train.steps * step_seconds(facts, prediction.plan, card, tokens)
    if facts.sample_tokens is not None:
        times = (train.steps - 1) // sample.sample_every + 1 + (not train.skip_first_sample)
        for item in sample.items():
            size = replace(facts.sample_tokens, image=item.width * item.height // PIXELS_PER_TOKEN)
            forward = sum(_passes(facts, block, size, card)[0] for block in facts.blocks)
            total += times * (item.sample_steps or sample.sample_steps) * forward
    return total


def _rates(facts: JobFacts, card: Card) -> tuple[float, float, float]:
    """Operations per second of linears forward, linears backward and all else."""
    bf16 = card.bf16_tflops * 1e12 * BF16_FRACTION
    in_int8 = facts.settings[-1].weight_format == INT8
    fp8 = (card.int8_tflops if in_int8 else card.fp8_tflops) * 1e12 * FP8_FRACTION
    if not facts.settings[-1].fp8_gemms or not fp8:
        return bf16, bf16, bf16
    if facts.job.coat.activation.grad_format == "bf16":
        return fp8, bf16, bf16
    return fp8, fp8, bf16


def _passes(facts: JobFacts, block: Block, tokens: Tokens, card: Card) -> tuple[float, float]:
    """Seconds of a block's forward and backward pass."""
    linear, linear_back, other = _rates(facts, card)
    products, attention = block.operations(tokens)
    ranked = sum(rank * sum(block.shape(name)) for name, rank in block.ranks if "norm" not in name)
    streams = 2 if block.kind.endswith("double") else 1  # text and image have separate linears
    adapters = 2 * tokens.rows * ranked / streams
    forward = products / linear + (attention + adapters) / other
    if not block.trained_output:
        return forward, 0.0
    trained = 0
    for name in LINEARS[block.kind]:
        if f"{name}.weight" in block.trained and not block.modulates(name):
            trained += math.prod(block.shape(name))
    of_trained = trained * products / max(1, block.weight_elements)
    rate = other if facts.job.coat.activation.wgrad_format == "bf16" else linear_back
    rest = (BACKWARD_OF_ATTENTION * attention + 2 * adapters) / other
    return forward, of_trained / rate + products / linear_back + rest
