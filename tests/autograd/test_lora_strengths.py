"""ai-toolkit's LoRA strengths, one per image: fused blocks compute with them as the LoRA's own forward does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.lora import plain_adapters
from tests.helpers.strengths import CASES, IMAGE, TEXT, strength_differences, strengths_in, toolkit_model
from tests.helpers.toolkit_lora import ROOT_VARIABLE, LoRAModule, Network
from tests.tolerances import FUSED_BF16_RTOL, FUSED_FP32_RTOL

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


def arguments(model: Any, batch: int) -> tuple[Any, ...]:
    shapes = (batch, IMAGE, model.inner_dim), (batch, TEXT, model.inner_dim), (batch, model.inner_dim)
    streams = [torch.randn(shape).to(model.dtype) for shape in shapes]
    return *streams, model.pos_embed(torch.zeros(TEXT + IMAGE, 3)), None


def test_gradients_are_those_of_the_lora_itself() -> None:
    for dtype, rtol in ((torch.float32, FUSED_FP32_RTOL), (torch.bfloat16, FUSED_BF16_RTOL)):
        model, network = toolkit_model(dtype)
        for name, (strengths, batch) in CASES.items():
            found = strength_differences(model, network, strengths, batch)
            assert max(found.values()) < rtol, (name, found)


@pytest.mark.aitk
def test_gradients_are_those_of_ai_toolkits_own_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    root = monkeypatch.undo() or os.environ[ROOT_VARIABLE]
    found = subprocess.run(
        [os.environ["AI_TOOLKIT_PYTHON"], "-m", "tests.helpers.strengths"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    differences = json.loads(found.splitlines()[-1])
    assert differences.keys() == CASES.keys()
    for name, kinds in differences.items():
        assert max(kinds.values()) < FUSED_FP32_RTOL, (name, kinds)


@pytest.mark.parametrize(
    ("strengths", "differ"),
    [(1.0, False), ([1.0], False), ([0.5] * 4, False), ([1, 1.0], False), ([1.0, 0.5], True)],
    ids=str,
)
def test_equal_strengths_are_one_number(strengths: Any, differ: bool) -> None:
    """And what is compared is the list, since the tensor may be on a GPU: one of another value is not looked at."""
    model, network = toolkit_model()
    network._multiplier = strengths
    network.torch_multiplier = torch.as_tensor(strengths) if differ else None
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        assert strengths_in(fused_block(block)) == {differ}


def test_strengths_that_do_not_fit_the_batch_are_an_error() -> None:
    model, network = toolkit_model()
    network.multiplier = [1.0, 0.5]
    args = arguments(model, 3)
    with pytest.raises(ValueError, match="2 LoRA strengths for a batch of 3: must be one per image"):
        fused_block(model.single_transformer_blocks[0])(*args)
    network.torch_multiplier, network._multiplier = torch.ones(2, 1), [[1.0], [0.5]]
    with pytest.raises(NotFusable, match=r"LoRA strengths of shape \(2, 1\), not one per image"):
        fused_block(model.single_transformer_blocks[0])


def test_a_lora_below_the_trained_one_counts() -> None:
    """FLUX.1-schnell is trained with an assistant LoRA, whose modules replaced the linears' forward first."""
    model, _ = toolkit_model()
    block = model.single_transformer_blocks[0]
    linears = [block.attn.to_q, block.proj_out]
    trained = Network(linears, 2)
    torch.nn.init.normal_(trained.unet_loras[0].lora_up.weight)
    args = arguments(model, 2)
    with torch.no_grad():
        for ours, theirs in zip(fused_block(block)(*args), block(*args), strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < FUSED_FP32_RTOL
    assert [len(plain_adapters(linear)[1]) for linear in linears] == [2, 2]
    trained.multiplier = [1.0, 0.5]  # those below have one strength for all
    with pytest.raises(NotFusable, match="LoRAs whose strengths per image are not the same"):
        fused_block(block)


def test_a_forward_below_the_lora_is_not_passed_over() -> None:
    model, _ = toolkit_model()
    block = model.single_transformer_blocks[0]
    linear = torch.nn.Linear(model.inner_dim, model.inner_dim).requires_grad_(False)
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    block.attn.to_q = linear
    network = Network([linear], 2)
    assert isinstance(network.unet_loras[0], LoRAModule)
    with pytest.raises(NotFusable, match="was replaced by something other than a LoRA"):
        fused_block(block)
