"""Sizes of blocks: what each flow keeps at FLUX.1's width, what no gradient needs, which blocks recompute."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig
from coat_flux.blocks import sizes
from tests.helpers.families import made
from tests.helpers.flux import coat_flux_model, tiny_flux
from tests.helpers.fused_blocks import kept_per_element

TOKENS = sizes.Tokens(1, 512, 4096)
NAMES = {kind: list(linears) for kind, linears in sizes.LINEARS.items()}
PER_ROW = FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row")


def flux_block(kind: str, names: list[str] | None = None, **options) -> sizes.Block:
    """A block of FLUX.1-dev's width with rank 16 on the named linears, by default on all that see tokens."""
    if names is None:
        names = [name for name in NAMES[kind] if not name.startswith("norm")]
    return sizes.Block(kind, 3072, 24, 4 * 3072, tuple((name, 16) for name in names), **options)


@pytest.mark.parametrize(
    ("settings", "double", "single"),
    [
        (sizes.FlowSettings(), 12.475, 10.398),
        (sizes.FlowSettings(saving=Saving(attention="bf16")), 16.350, 14.273),
        (sizes.FlowSettings(flow="generic"), 23.737, 19.611),
    ],
    ids=["fused", "fused, attention bf16", "generic"],
)
def test_kept_at_flux_width(settings, double, single):
    """Bytes per token and hidden element, adapters on the modulation included: RESULTS.md's 12.5 and 10.4."""
    for kind, expected in (("double", double), ("single", single)):
        kept = sizes.block_bytes(flux_block(kind, NAMES[kind]), TOKENS, settings).kept
        assert kept / (TOKENS.rows * 3072) == pytest.approx(expected, abs=0.002)


def test_what_needs_no_gradient_keeps_nothing():
    untrained = flux_block("double", [], trained_input=False)
    forward = sizes.forward_bytes(untrained, TOKENS, sizes.FlowSettings())
    assert sizes.block_bytes(untrained, TOKENS, sizes.FlowSettings()) == sizes.BlockBytes(0, 0, forward, 0, 0)
    assert not untrained.trained_output
    assert flux_block("double", ["ff.net.2"], trained_input=False).trained_output
    for one in ({"trained_input": True}, {"trained_embedding": True}, {"trained": ("attn.norm_q.weight",)}):
        assert replace(untrained, **one).trained_output


def test_recomputed_inputs():
    elements = TOKENS.rows * 3072
    anchors = 2 * 2  # one element in place of each stream
    block = flux_block("double")
    first = flux_block("double", trained_input=False)  # its inputs require no gradient: kept as they are
    exact = sizes.FlowSettings(fp8_checkpoint=False)
    cases = [(block, sizes.FlowSettings(), elements + elements // 128 * 4 + anchors)]
    cases += [(block, exact, 2 * elements), (first, sizes.FlowSettings(), 2 * elements)]
    for each, settings, expected in cases:
        assert sizes.block_bytes(each, TOKENS, settings).recomputed == expected


class Adapter(nn.Module):
    """Takes the place of a linear's forward, as ai-toolkit's do."""

    def forward(self, x):
        return x


def test_read_block_finds_the_adapters_of_peft_and_of_ai_toolkit():
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}})
    block = sizes.read_block(model.single_transformer_blocks[0])
    assert dict(block.ranks) == dict.fromkeys(NAMES["single"], 4)
    own = [p for n, p in model.single_transformer_blocks[0].named_parameters() if ".lora_" in n]
    assert sizes.gradient_bytes(block, 2) == sum(p.nbytes for p in own)
    block, lora = tiny_flux().transformer_blocks[1], Adapter()
    lora.lora_down = nn.Linear(64, 8, bias=False)
    block.attn.to_k.forward = lora.forward
    assert dict(sizes.read_block(block, trained_input=False).ranks) == {"attn.to_k": 8}
    assert sizes.read_block(lora) is None


def test_a_lokr_is_counted_as_a_lora_of_as_many_parameters():
    """Whose h it does not keep: at most 5 % above what its block keeps, down to factor 4."""
    for factor in (-1, 4, 8):
        of = made(
            "flux single", torch.bfloat16, 3072, (512, 4096), PER_ROW, "toolkit", device="meta",
            lokr={"factor": factor, "rank": None},
        )  # fmt: skip
        block = sizes.read_block(of.block)
        parameters = sum(parameter.numel() for parameter in of.network.parameters())
        assert sizes.gradient_bytes(block, 2) == pytest.approx(4 * parameters, rel=0.05, abs=2e5)
        counted = sizes.block_bytes(block, TOKENS, sizes.FlowSettings()).kept
        assert 1 <= counted / kept_per_element(of, elements=1) < 1.05


def test_a_block_with_another_adapter_is_counted_as_one_that_nobody_listed():
    """And trained: next to a LoRA's it keeps more, and those above it have a gradient to hand on."""
    blocks, loha = tiny_flux().requires_grad_(False).transformer_blocks, Adapter()
    loha.hada_w1_a = nn.Parameter(torch.zeros(8, 8))
    blocks[0].attn.to_k.forward = loha.forward
    assert sizes.read_block(blocks[0]) is None
    first, second = sizes.read_blocks(blocks, (), 1000)
    assert isinstance(first, sizes.UnknownBlock)
    assert first.gradients == 8 * 8 * 4
    assert second.trained_input


BLOCKS = [sizes.BlockBytes(100, 10, 20, 60, 3)] * 2 + [sizes.BlockBytes(80, 10, 20, 60, 2)] * 3


def test_largest_moment():
    none = sizes.largest_moment(BLOCKS)
    assert (none.kept, none.workspace, none.gradients) == (440, 20, 0)  # the last block's backward pass
    assert sizes.largest_moment(BLOCKS, accumulates=True).gradients == 12
    assert sizes.largest_moment(BLOCKS, range(5)) == (50, 60, 0)
    first = sizes.largest_moment([sizes.BlockBytes(10, 1, 9, 500, 3), sizes.BlockBytes(10, 1, 9, 500, 7)], [0])
    assert (first.kept, first.workspace, first.gradients) == (1, 500, 7)  # by then the second block's are made


@pytest.mark.parametrize("free", [0, 109, 110, 200, 389, 390, 459, 460])
def test_fewest_recomputed_is_the_fewest(free):
    chosen = sizes.fewest_recomputed(BLOCKS, free)
    fits = sizes.largest_moment(BLOCKS, chosen).total <= free
    assert fits == (free >= 110)
    subsets = [[i for i in range(5) if mask >> i & 1] for mask in range(32)]
    enough = [len(subset) for subset in subsets if sizes.largest_moment(BLOCKS, subset).total <= free]
    assert len(chosen) == min(enough, default=5)
