"""A fused block of FLUX.1, by autograd and with ai-toolkit's LoRA; families, what is kept: test_fused_families.py."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_core.activation import Saving
from coat_core.granularity import Granularity, Storage
from coat_flux.blocks.fused.chooser import disagreement, fused_block
from coat_flux.blocks.fused.forms import join
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.lora import plain_adapters
from coat_flux.config.coat import COATConfig
from tests.helpers.asserts import assert_all_bitwise, assert_bitwise
from tests.helpers.families import BATCH, FLUX1, IMAGE, STRENGTHS, TEXT, Made, made, results, with_strengths
from tests.helpers.fused_blocks import assert_as_own_code
from tests.helpers.toolkit_lora import ROOT_VARIABLE, LoRAModule, Network
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


# -- ai-toolkit's LoRA, with a strength per image ---------------------------------------------------------------------
@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """ai-toolkit's own LoRA: tests/autograd/test_fused_families.py."""
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


@pytest.mark.parametrize("name", FLUX1)
def test_gradients_are_those_of_the_lora_itself(name):
    for dtype, rtol in ((torch.float32, FUSED_FP32_RTOL), (torch.bfloat16, FUSED_BF16_RTOL)):
        for case, (strengths, batch) in STRENGTHS.items():
            assert_as_own_code(with_strengths(name, strengths, batch, dtype), rtol, case, dtype)


@pytest.mark.parametrize(
    ("strengths", "differ"),
    [(1.0, False), ([1.0], False), ([0.5] * 4, False), ([1, 1.0], False), ([1.0, 0.5], True)],
    ids=str,
)
def test_equal_strengths_are_one_number(strengths, differ):
    """And what is compared is the list, since the tensor may be on a GPU: one of another value is not looked at."""
    for name in FLUX1:
        of = with_strengths(name, strengths)
        of.network.torch_multiplier = torch.as_tensor(strengths) if differ else None
        form = fused_block(of.block)
        groups = [*form.groups, *(modulation.linear for modulation in form.modulations)]
        assert {group.strengths is not None for group in groups} == {differ}


def test_strengths_that_do_not_fit_the_batch_are_an_error():
    of = with_strengths("flux single", [1.0, 0.5], batch=3)
    with pytest.raises(ValueError, match="2 LoRA strengths for a batch of 3: must be one per image"):
        fused_block(of.block)(*of.args)
    of.network.torch_multiplier, of.network._multiplier = torch.ones(2, 1), [[1.0], [0.5]]
    with pytest.raises(NotFusable, match=r"LoRA strengths of shape \(2, 1\), not one per image"):
        fused_block(of.block)


def test_a_lora_below_the_trained_one_counts():
    """FLUX.1-schnell is trained with an assistant LoRA, whose modules replaced the linears' forward first."""
    of = with_strengths("flux single")
    linears = [of.block.attn.to_q, of.block.proj_out]
    trained = Network(linears, 2)
    torch.nn.init.normal_(trained.unet_loras[0].lora_up.weight)
    of.leaves |= {f"trained {name}": parameter for name, parameter in trained.named_parameters()}
    assert_as_own_code(of, FUSED_FP32_RTOL)
    assert [len(plain_adapters(linear)[1]) for linear in linears] == [2, 2]
    trained.multiplier = [1.0, 0.5]  # those below have one strength for all
    with pytest.raises(NotFusable, match="LoRAs whose strengths per image are not the same"):
        fused_block(of.block)


def test_a_forward_below_the_lora_is_not_passed_over():
    of = with_strengths("flux single")
    linear = torch.nn.Linear(64, 64).requires_grad_(False)
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    of.block.attn.to_q = linear
    network = Network([linear], 2)
    assert isinstance(network.unet_loras[0], LoRAModule)
    with pytest.raises(NotFusable, match="was replaced by something other than a LoRA"):
        fused_block(of.block)
