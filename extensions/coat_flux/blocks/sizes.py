"""How many bytes a FLUX block keeps for backward, and needs for a moment: the formulas, in one place.

Nothing here is fitted to a measurement: each flow has its list of kept tensors, and a tensor's bytes follow from its
shape and how it is stored. `plan` adds them up over a run; `auto` asks them which blocks must be recomputed.

    eager      diffusers' own code: norms, gates, attention and GELU keep high precision, each adapter its own copy of x
    generic    the same tensors packed to FP8 (`coat_core.activation.packing`), one FP8 x for all adapters that read it
    fused      what `fused/` keeps: x, q, k, v, out, MLP before GELU, and where gates are trained their inputs

A tensor is kept only where a gradient needs it: a block above which nothing is trained keeps nothing of its input, and
without an adapter on the modulation neither scale nor gate has a gradient.

Shapes: rows = batch · tokens; d hidden, F MLP width, r rank. Bytes everywhere.
Source: DESIGN's list of saved tensors; diffusers transformer_flux.py; torch's derivatives of its operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coat_core.activation.packing import SHORTEST_ROW, PackingConfig
from coat_core.granularity import PER_GROUP, PER_TENSOR, Granularity

FLOWS = ("eager", "generic", "fused")
FP32 = 4
RNG_STATE = 5056  # what torch.utils.checkpoint keeps of the CPU's random number generator
SMALLEST_PACKED = PackingConfig.min_elements  # also of fp8_checkpoint


class Stream(NamedTuple):
    """Names of the linears that one stream of tokens runs through, relative to the block."""

    norm: str
    q: str
    k: str
    v: str
    out: str
    up: str
    down: str


TEXT = Stream(
    "norm1_context.linear", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip
IMAGE = Stream(
    "norm1.linear", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"
)  # fmt: skip
SINGLE = Stream("norm.linear", "attn.to_q", "attn.to_k", "attn.to_v", "", "proj_mlp", "proj_out")  # out joins the MLP


@dataclass(frozen=True)
class Block:
    """One transformer block.

    Attributes:
        kind: "double" (text and image streams) or "single" (both as one).
        hidden: d.
        heads: of attention.
        mlp: F.
        ranks: (linear's name in the block, LoRA rank) of each adapter.
        trained_input: whether a gradient goes on to what lies before the block.
        trained_embedding: whether one goes on to the embedding that its modulation is made from.
    """

    kind: str
    hidden: int
    heads: int
    mlp: int
    ranks: tuple[tuple[str, int], ...] = ()
    trained_input: bool = True
    trained_embedding: bool = False

    @property
    def trained_output(self) -> bool:
        """Whether the block's output requires a gradient."""
        return self.trained_input or self.trained_embedding or bool(self.ranks)

    @property
    def widest(self) -> int:
        """Input features of the MLP's second linear, the widest of the block."""
        return self.mlp if self.kind == "double" else self.hidden + self.mlp

    def shape(self, name: str) -> tuple[int, int]:
        """(in, out) features of a linear of the block."""
        d = self.hidden
        if name in (TEXT.norm, IMAGE.norm, SINGLE.norm):
            return d, (3 if self.kind == "single" else 6) * d
        if name in (TEXT.up, IMAGE.up, SINGLE.up):
            return d, self.mlp
        return (self.widest if name in (TEXT.down, IMAGE.down, SINGLE.down) else d), d


@dataclass(frozen=True)
class Tokens:
    """Size of a micro-batch: images, text tokens and image tokens of each."""

    batch: int
    text: int
    image: int

    @property
    def rows(self) -> int:
        """Rows of both streams together."""
        return self.batch * (self.text + self.image)


@dataclass(frozen=True)
class FlowSettings:
    """How blocks keep what they keep.

    Attributes:
        flow: one of `FLOWS`.
        attention: "fp8" or "bf16", of q, k, v and out.
        packing: scaling of packed tensors and of recomputed blocks' inputs.
        inputs: scaling of the FP8 x of adapters in the generic flow and in recomputed blocks.
        fp8_adapters: adapters keep their x in FP8 (`attach_lora`); where the flow is eager, only in recomputed blocks.
        fp8_checkpoint: recomputed blocks keep FP8 inputs.
        value_bytes: of an element of hidden states, 2 for bf16.
        lora_bytes: of an element of an adapter's x and h outside the fused flow: 4 for fp32 adapters without autocast.
        dropout: the adapters have dropout.
        cuda: torch's CUDA operators; on a CPU RMSNorm keeps an fp32 copy and LayerNorm its statistics in bf16.
        fp8_gemms: linears quantize what they multiply.
        fp8_weights: linears hold FP8 codes; where not, GEMMs make them at each use, and the generic flow keeps them.
        kernels: casts and norms run as kernels; where not, they go through whole fp32 tensors.
    """

    flow: str = "fused"
    attention: str = "fp8"
    packing: Granularity = PER_GROUP
    inputs: Granularity = PER_TENSOR
    fp8_adapters: bool = True
    fp8_checkpoint: bool = True
    value_bytes: int = 2
    lora_bytes: int = FP32
    dropout: bool = False
    cuda: bool = True
    fp8_gemms: bool = True
    fp8_weights: bool = True
    kernels: bool = True

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            raise ValueError(f"flow={self.flow!r}: must be one of {', '.join(FLOWS)}")


class KeptTensor(NamedTuple):
    """Something kept for backward: `what` it is, for tables, and its bytes."""

    what: str
    bytes: int


def quantized_bytes(rows: int, width: int, granularity: Granularity) -> int:
    """FP8 codes of [rows, width] and their fp32 scales."""
    scales = 1
    for size in granularity.scale_shape((rows, width)):
        scales *= size
    return rows * width + FP32 * scales


class _Ledger:
    """Writes down what one block keeps, in the way its flow stores it."""

    def __init__(self, block: Block, settings: FlowSettings) -> None:
        self.settings = settings
        self.ranks = dict(block.ranks)
        self.kept: list[KeptTensor] = []

    def exact(self, what: str, size: int) -> None:
        """Something kept as it is."""
        self.kept.append(KeptTensor(what, size))

    def value(self, what: str, rows: int, width: int, itemsize: int = 0) -> None:
        """A token-sized tensor of `itemsize` bytes (0: hidden states' own) that an operator saves."""
        s = self.settings
        exact = rows * width * (itemsize or s.value_bytes)
        if s.flow == "eager" or (what == ATTENTION and s.attention == "bf16"):
            self.exact(what, exact)
        elif s.flow == "fused":
            self.exact(what, quantized_bytes(rows, width, s.packing))
        elif rows * width < SMALLEST_PACKED:
            self.exact(what, exact)
        else:  # packed along its storage
            self.exact(what, quantized_bytes(1, rows * width, s.packing))

    def adapters(self, rows: int, width: int, names: Iterable[str], reached: bool = True) -> None:
        """What the adapters of linears that read the same x [rows, width] keep of it, and their h.

        One FP8 x is shared where the graph shows that the adapters' fp32 copies are the same x: not without a gradient.
        """
        s = self.settings
        ranks = [self.ranks[name] for name in names if name in self.ranks]
        if not ranks:
            return
        if s.flow != "fused":
            shares = s.lora_bytes == s.value_bytes or (s.fp8_adapters and reached)
            copies = 1 if shares and not s.dropout else len(ranks)
            one = quantized_bytes(rows, width, s.inputs) if s.fp8_adapters else rows * width * s.lora_bytes
            self.exact("LoRA inputs", copies * one)
            if s.dropout:  # its mask
                mask = 1 if s.cuda or s.flow == "generic" else s.lora_bytes
                self.exact("LoRA inputs", len(ranks) * rows * width * mask)
        for rank in ranks:
            packs = s.flow == "generic" and rank >= SHORTEST_ROW and rows * rank >= SMALLEST_PACKED
            exact = rows * rank * (s.value_bytes if s.flow == "fused" else s.lora_bytes)
            self.exact("LoRA middles", quantized_bytes(1, rows * rank, s.packing) if packs else exact)

    def layer_norm(self, rows: int, width: int, reaches_input: bool, trained_scale: bool) -> None:
        """LayerNorm(x)·(1 + scale) + shift of x [rows, width]."""
        if self.settings.flow == "fused":
            self.value(NORMS, rows, width)
            return
        if reaches_input:
            self.value(NORMS, rows, width)
            self.exact("statistics", 2 * rows * (FP32 if self.settings.cuda else self.settings.value_bytes))
        if trained_scale:
            self.value(NORMS, rows, width)


NORMS, ATTENTION, MLP, GATES = "inputs of norms", "q, k, v, out", "MLP before GELU", "inputs of gates"


def kept_tensors(block: Block, tokens: Tokens, settings: FlowSettings) -> list[KeptTensor]:
    """What a block that is not recomputed keeps from its forward to its backward pass, without its output."""
    if not block.trained_output:
        return []
    ledger = _Ledger(block, settings)
    if block.kind == "double":
        streams = [(TEXT, tokens.batch * tokens.text), (IMAGE, tokens.batch * tokens.image)]
    else:
        streams = [(SINGLE, tokens.rows)]
    reaches_attention = [_before_attention(ledger, block, names, rows, tokens.batch) for names, rows in streams]
    if any(reaches_attention):
        for _ in range(4):
            ledger.value(ATTENTION, tokens.rows, block.hidden)
        ledger.exact("statistics", FP32 * block.heads * tokens.rows)
    for names, rows in streams:
        _after_attention(ledger, block, names, rows, any(reaches_attention))
    if settings.fp8_gemms and not settings.fp8_weights and settings.flow == "generic":
        ledger.exact("weights cast at each use", len(streams) * block.hidden * (4 * block.hidden + 2 * block.mlp))
    return ledger.kept


def _before_attention(ledger: _Ledger, block: Block, names: Stream, rows: int, batch: int) -> bool:
    """Modulation, first norm and q, k, v; returns whether a gradient reaches any of q, k, v."""
    d, s, ranks = block.hidden, ledger.settings, ledger.ranks
    readers = [names.q, names.k, names.v] + ([names.up] if block.kind == "single" else [])
    modulated = block.trained_embedding or names.norm in ranks
    if names.norm in ranks:
        fused = s.flow == "fused"
        ledger.exact("modulation", batch * d * (s.value_bytes if fused else 1 if s.fp8_adapters else s.lora_bytes))
        ledger.exact("modulation", batch * ranks[names.norm] * (s.value_bytes if fused else s.lora_bytes))
    ledger.exact("modulation", batch * (3 if block.kind == "single" else 6) * d * s.value_bytes)
    reaches_n = block.trained_input or modulated
    if reaches_n or any(name in ranks for name in readers):
        ledger.layer_norm(rows, d, block.trained_input, modulated)
    ledger.adapters(rows, d, readers, reaches_n)
    reached = [reaches_n or name in ranks for name in (names.q, names.k, names.v)]
    if s.flow != "fused":
        for _ in range(sum(reached[:2])):  # QK-RMSNorm
            ledger.value(NORMS, rows, d, s.value_bytes if s.cuda else FP32)
            ledger.exact("statistics", FP32 * block.heads * rows)
    return any(reached)


def _after_attention(ledger: _Ledger, block: Block, names: Stream, rows: int, reaches_attention: bool) -> None:
    """The attention's projection with its gate, the MLP with its own; in a single block one projection for both."""
    d, ranks = block.hidden, ledger.ranks
    modulated, reaches_x = block.trained_embedding or names.norm in ranks, block.trained_input
    if block.kind == "double":
        ledger.adapters(rows, d, [names.out])
        if modulated:
            ledger.value(GATES, rows, d)
        reaches_x = reaches_x or modulated or reaches_attention or names.out in ranks
        if reaches_x or modulated or names.up in ranks:
            ledger.layer_norm(rows, d, reaches_x, modulated)
        ledger.adapters(rows, d, [names.up])
    fused = ledger.settings.flow == "fused"
    if fused and not reaches_attention and (names.out or names.down) in ranks:
        ledger.value(ATTENTION, rows, d)  # for dA of the projection alone
    if reaches_x or modulated or names.up in ranks or (fused and names.down in ranks):
        ledger.value(MLP, rows, block.mlp)
    ledger.adapters(rows, block.widest, [names.down])
    if modulated:
        ledger.value(GATES, rows, d)


def kept_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """Bytes of `kept_tensors`."""
    return sum(tensor.bytes for tensor in kept_tensors(block, tokens, settings))


def recomputed_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """What a recomputed block keeps: its inputs, both streams."""
    total = RNG_STATE
    for rows in (tokens.batch * tokens.text, tokens.batch * tokens.image):
        worth_it = block.trained_input and rows * block.hidden >= SMALLEST_PACKED
        if settings.fp8_checkpoint and worth_it:
            total += quantized_bytes(rows, block.hidden, settings.packing)
        else:
            total += rows * block.hidden * settings.value_bytes
    return total


def workspace_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """The most that a block which is not recomputed needs at one moment beyond what is kept.

    Three moments compete, all at the widest linear or in attention. Lists per token and stream, w the widest input:

        forward     the linear's input, its codes, and beside them the MLP; an fp32 copy for an fp32 adapter
        backward    fused: dx, the MLP and its gradient; else dx and x of an fp32 adapter
        attention   fused: q, k, v and out, q and k normed, gradients of all, and behind it what the MLP's gradient is

    Without kernels casts go through two fp32 tensors, the norms' gradients through seven and GELU's through three.
    """
    d, a, wide, rows = block.hidden, settings.value_bytes, block.widest, _widest_rows(block, tokens)
    lora = 0 if settings.lora_bytes == a else settings.lora_bytes
    hidden = a * d * tokens.rows
    casts, through = (0, 0) if settings.kernels else (2 * FP32, FP32)
    codes = (1 + casts) * wide if settings.fp8_gemms else 0
    if settings.flow != "fused":
        copy = lora * wide if settings.fp8_adapters else 0  # where x is kept in fp32, it is no more than that
        forward = rows * (max(codes, copy) + a * (wide + block.mlp)) + 5 * hidden
        unpacked = max(lora, a, casts) * wide if settings.fp8_adapters else 0
        return max(forward, rows * (max(lora, a) * wide + unpacked) + 2 * hidden)
    shared = 0 if settings.attention == "fp8" else 4 * hidden  # kept as they are: nothing to be made anew
    not_yet = block.mlp + d  # of what the block will have kept
    forward = rows * (codes + a * (wide + block.mlp) - not_yet) + 6 * hidden - shared
    backward = rows * (a * (wide + 2 * block.mlp) + 3 * through * block.mlp) + 4 * hidden
    behind = a * block.mlp if block.kind == "single" else 0
    attention = rows * (7 * through * d + behind) + 12 * hidden - shared
    return max(forward, backward, attention)


def recomputation_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """The same for a block that is recomputed: all that it saves in high precision is there besides."""
    inside = replace(settings, flow="eager", attention="bf16")
    saved = kept_bytes(replace(block, trained_input=True), tokens, inside)
    return saved + workspace_bytes(block, tokens, inside)


def forward_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """The most that a block's forward pass needs where nothing is kept: sampling, and the start of a block.

    At the widest linear: its input with its codes or an fp32 adapter's copy, the MLP, four hidden states. Without
    kernels casts go through two fp32 tensors, and with few tokens the modulation's weight, dequantized, is larger.
    """
    d, a, wide = block.hidden, settings.value_bytes, block.widest
    casts = 0 if settings.kernels else 2 * FP32
    adapter = settings.lora_bytes if block.ranks and settings.flow != "fused" else 0
    copies = max(1 + casts if settings.fp8_gemms else 0, adapter)
    widest = _widest_rows(block, tokens) * (a * (wide + block.mlp) + copies * wide) + 4 * a * d * tokens.rows
    inputs, outputs = block.shape(SINGLE.norm)
    return max(widest, casts * inputs * outputs if settings.fp8_weights else 0)


def _widest_rows(block: Block, tokens: Tokens) -> int:
    return tokens.rows if block.kind == "single" else tokens.batch * max(tokens.text, tokens.image)


def around_bytes(block: Block, tokens: Tokens, settings: FlowSettings) -> int:
    """What the model keeps outside its blocks: the last block's output, rotary tables, final norm and prediction."""
    head_dim, length = block.hidden // block.heads, tokens.text + tokens.image
    return tokens.rows * (block.hidden * settings.value_bytes + 2 * FP32) + 2 * FP32 * head_dim * length


def lora_bytes(block: Block) -> int:
    """Bytes of the block's fp32 adapters; their gradients take as much again."""
    return FP32 * sum(rank * sum(block.shape(name)) for name, rank in block.ranks)


def read_block(module: Any, trained_input: bool = True) -> Block:
    """Describe a real FLUX block, with PEFT's or ai-toolkit's adapters on it.

    Raises:
        ValueError: another class.
    """
    kind = {"FluxTransformerBlock": "double", "FluxSingleTransformerBlock": "single"}.get(type(module).__name__)
    if kind is None:
        raise ValueError(f"a {type(module).__name__}: sizes are known of FLUX.1's blocks only; treat it as unknown")
    names = [*TEXT, *IMAGE] if kind == "double" else [name for name in SINGLE if name]
    ranks = {name: rank for name in names if (rank := _rank(module.get_submodule(name)))}
    up = module.get_submodule(IMAGE.up if kind == "double" else SINGLE.up)
    base = getattr(up, "base_layer", up)
    return Block(kind, base.in_features, module.attn.heads, base.out_features, tuple(ranks.items()), trained_input)


def _rank(linear: Any) -> int:
    """Ranks of the adapters on a linear, added up."""
    downs: Mapping[str, Any] | None = getattr(linear, "lora_A", None)
    if downs is not None:
        return sum(down.weight.shape[0] for down in downs.values())
    owner = getattr(linear.__dict__.get("forward"), "__self__", None)
    down = getattr(owner, "lora_down", None)
    return 0 if down is None else int(down.weight.shape[0])
