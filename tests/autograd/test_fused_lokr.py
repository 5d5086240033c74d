"""ai-toolkit's LoKr in fused blocks: its two products give what the whole Kronecker matrix gives, and keep nothing."""

from typing import Any

import pytest
import torch

from coat_core.activation import Saving
from coat_core.config import FP8LinearConfig
from coat_flux.blocks.fused.chooser import fused_block
from coat_flux.blocks.fused.linears import NotFusable
from coat_flux.blocks.lora import LokrLinear
from tests.helpers.families import FAMILIES, FLUX1, Made, linears, made, results
from tests.helpers.fused_blocks import assert_as_own_code, assert_gradients_near, kept_per_element
from tests.helpers.toolkit_lora import ROOT_VARIABLE
from tests.tolerances import FUSED_BF16_RTOL, FUSED_FP32_RTOL, FUSED_NORMED_BF16_RTOL

PER_ROW = FP8LinearConfig(weight_granularity="per_row", input_granularity="per_row")
INT8 = FP8LinearConfig(
    weight_format="int8", input_format="int8", grad_format="int8", weight_granularity="per_row",
    input_granularity="per_row",
)  # fmt: skip
FULL, ROOT = {"factor": 8, "rank": None}, {"factor": -1, "rank": None}
LOW, BOTH = {"factor": 4, "rank": 2}, {"factor": 4, "rank": 2, "both": True}
IMAGE_TOKENS = 4096
LARGEST_KEPT = {"flux double": 12.5, "flux single": 10.4}  # bytes per token and hidden element, those of a LoRA


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """ai-toolkit's own LoKr: tests/integration/test_aitk_models.py."""
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


def with_lokr(name: str, dtype: torch.dtype = torch.float32, lokr: dict[str, Any] = FULL, **options: Any) -> Made:
    return made(name, dtype, adapters="toolkit", lokr=lokr, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_kronecker_matrix(name):
    in_bf16 = FUSED_NORMED_BF16_RTOL if name.startswith("z-image") else FUSED_BF16_RTOL
    cases = [(FULL, torch.float32, FUSED_FP32_RTOL), (FULL, torch.bfloat16, in_bf16)]
    if name in FLUX1:
        cases += [(lokr, torch.float32, FUSED_FP32_RTOL) for lokr in (ROOT, LOW, BOTH)]
    for lokr, dtype, rtol in cases:
        assert_as_own_code(with_lokr(name, dtype, lokr), rtol, lokr, dtype)


@pytest.mark.parametrize("rank", [None, 2])
def test_the_stand_alone_trainers_lokr(rank):
    of = made("flux single", adapters="none")
    draw = torch.Generator().manual_seed(1)
    for name in linears(of.block):
        of.block.set_submodule(name, LokrLinear(of.block.get_submodule(name), 8, rank, torch.device("cpu"), draw))
    for name, parameter in of.block.named_parameters():
        if "lokr" in name:
            of.leaves[name] = torch.nn.init.normal_(parameter, std=0.1, generator=draw)
    assert_as_own_code(of, FUSED_FP32_RTOL)


@pytest.mark.parametrize("strengths", [[0.5, 0.5], [1.0, -0.25], 2.0], ids=str)
def test_strengths_are_their_mean_as_in_ai_toolkit(strengths):
    of = with_lokr("flux single", lokr=LOW)
    of.network.multiplier = strengths
    assert_as_own_code(of, FUSED_FP32_RTOL)


@pytest.mark.parametrize("fp8", [PER_ROW, INT8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("name", FLUX1)
def test_with_codes_gradients_are_within_a_loras_bounds(name, fp8):
    exact, coded = (with_lokr(name, torch.bfloat16, hidden=256, tokens=(32, 96), fp8=each) for each in (None, fp8))
    expected, found = results(exact.block, exact), results(fused_block(coded.block, Saving()), coded)
    assert_gradients_near({key: wanted for key, wanted in expected.items() if "lokr" in key}, found)


@pytest.mark.parametrize("lokr", [FULL, ROOT, {"factor": 8, "rank": 16}], ids=str)
@pytest.mark.parametrize("name", FLUX1)
def test_kept_bytes_at_real_width_are_at_most_a_loras(name, lokr):
    of = with_lokr(name, torch.bfloat16, lokr, hidden=3072, tokens=(512, IMAGE_TOKENS), fp8=PER_ROW, device="meta")
    assert kept_per_element(of, (512 + IMAGE_TOKENS) * 3072) <= LARGEST_KEPT[name]


def test_what_its_own_forward_does_beyond_is_not_fused():
    of = with_lokr("flux single")
    of.network.multiplier = [[1.0, 0.5]]
    with pytest.raises(NotFusable, match="LoKr strengths"):
        fused_block(of.block)
    of.network.multiplier = 1.0
    of.network.unet_loras[0].rank_dropout = 0.1
    with pytest.raises(NotFusable, match="dropout"):
        fused_block(of.block)
