"""ai-toolkit's LoRA strengths, one per image: fused blocks compute with them as the LoRA's own forward does."""

import pytest
import torch

from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.lora import plain_adapters
from tests.helpers.families import FLUX1, STRENGTHS, with_strengths
from tests.helpers.fused_blocks import assert_as_own_code
from tests.helpers.toolkit_lora import ROOT_VARIABLE, LoRAModule, Network
from tests.tolerances import FUSED_BF16_RTOL, FUSED_FP32_RTOL


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
