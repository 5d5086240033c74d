"""A fused block of FLUX.1 as autograd sees it; other families, and what is kept: test_fused_families.py."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_core.activation import Saving
from coat_core.granularity import Granularity, Storage
from coat_flux.blocks.fused.chooser import disagreement, fused_block
from coat_flux.blocks.fused.forms import join
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.families import BATCH, FLUX1, IMAGE, TEXT, Made, made, results
from tests.helpers.fused_blocks import assert_as_own_code
from tests.tolerances import FUSED_BF16_RTOL, FUSED_FP32_RTOL

HIDDEN = 64
PACKING = Saving(Storage(granularity=Granularity("per_group", 32)))
STREAMS = ("text", "image")
BUT_MODULATION = ("attn.", "ff", "proj")


def in_bf16(kind: str) -> Made:
    return made(kind, torch.bfloat16, trains=STREAMS)


@pytest.mark.parametrize("kind", FLUX1)
@pytest.mark.parametrize(
    ("adapted", "trains"), [(BUT_MODULATION, ()), (("attn.to_q", "attn.to_out"), STREAMS)], ids=str
)
def test_gradients_of_some_adapters_are_autograds(kind, adapted, trains):
    of = made(kind, trains=trains, adapted=adapted)
    assert len(of.leaves) >= 2 + len(trains)
    assert_as_own_code(of, FUSED_FP32_RTOL)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", FLUX1)
def test_adapters_in_fp32_on_a_block_in_bf16(kind, autocast):
    of = in_bf16(kind)
    for name, leaf in of.leaves.items():
        if "lora" in name:
            leaf.data = leaf.data.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_as_own_code(of, FUSED_BF16_RTOL)


@pytest.mark.parametrize("kind", FLUX1)
@pytest.mark.parametrize("attention_as", ["fp8", "bf16"])
def test_forward_values_are_diffusers_to_the_bit(kind, attention_as):
    """Whatever is kept: with FP8 weights and GEMMs too."""
    of = made(kind, torch.bfloat16, fp8=COATConfig().linear_config(), adapters="none")
    fused = fused_block(of.block, Saving(attention=attention_as))
    for found, expected in zip(fused(*of.args), of.block(*of.args), strict=True):
        assert_bitwise(found, expected)


@pytest.mark.parametrize("kind", FLUX1)
def test_a_second_backward_pass_and_accumulation(kind):
    of = in_bf16(kind)
    text, hidden = fused_block(of.block, PACKING)(*of.args)
    loss = text.float().square().mean() + hidden.float().square().mean()
    parameters = [p for p in of.block.parameters() if p.requires_grad]
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in parameters]
    loss.backward()
    for parameter, gradient in zip(parameters, once, strict=True):
        assert_bitwise(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("kind", FLUX1)
def test_inside_torchs_checkpoint(kind):
    of = in_bf16(kind)
    fused = fused_block(of.block, PACKING)
    found = results(lambda *inputs: checkpoint(fused, *inputs, use_reentrant=False), of)
    assert_all_bitwise(found, results(fused, of))


def test_adapters_that_are_switched_off_are_left_out():
    of = made("flux single")
    for module in of.block.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    for one, other in zip(fused_block(of.block, PACKING)(*of.args), of.block(*of.args), strict=True):
        assert_bitwise(one, other)


def test_only_streams_that_are_neighbours_are_not_copied():
    text, image = torch.randn(BATCH, TEXT, HIDDEN), torch.randn(BATCH, IMAGE, HIDDEN)
    whole = torch.randn(BATCH, IMAGE + TEXT, HIDDEN)
    wide = torch.randn(BATCH, TEXT + IMAGE, 2 * HIDDEN)[..., :HIDDEN]
    longer = torch.randn(BATCH, TEXT + IMAGE + 1, HIDDEN)
    pairs = [
        (whole[:, :TEXT], whole[:, TEXT:]),
        (text, image),  # of two tensors
        (whole[:, IMAGE:], whole[:, :IMAGE]),  # in the other order
        (wide[:, :TEXT], wide[:, TEXT:]),  # rows with something between them
        (longer[:, :TEXT], longer[:, TEXT:-1]),  # with a row after each image
        (longer[:, :TEXT], longer[:, TEXT + 1 :]),  # not next to each other
    ]
    for number, (first, second) in enumerate(pairs):
        joined = join(first, second)
        assert torch.equal(joined, torch.cat([first, second], dim=1))
        assert (joined.data_ptr() == first.data_ptr()) == (number == 0)


def test_a_block_in_fp16_is_not_fused():
    of = made("flux double")
    form = fused_block(of.block)
    assert disagreement(form, of.block, of.args) == ""
    assert "fp16" in disagreement(form, of.block, (of.args[0].half(), *of.args[1:]))
