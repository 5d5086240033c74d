"""The acceptance line of the optimizer, on moments of a real (small, short) LoRA training of a real FLUX class."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coat_core.config import PAPER_EXPANSION, FP8QuantizationConfig
from coat_core.optim.state import MOMENTS, convert_state, read_state, storages
from coat_flux.config.job_sections import NetworkSection, TrainSection
from coat_flux.trainers.standalone.flow_matching import Objective
from coat_flux.trainers.standalone.network import add_lora
from tests.helpers.flux import tiny_flux
from tests.tolerances import EXPANSION_GAIN, INTEGER_FORMATS_GAIN

STEPS = [1, 30]
Moments = dict[str, tuple[Tensor, Tensor]]  # exp_avg and exp_avg_sq of each parameter, fp32
Method = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # m, v -> both as they come back


def stored(**options: object) -> Method:
    """As FP8AdamW with these options stores the moments of one parameter."""
    exact = storages(FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False))
    asked = storages(FP8QuantizationConfig(**options))
    return lambda m, v: read_state(convert_state({"exp_avg": m, "exp_avg_sq": v}, exact, asked), asked)


def dynamic_8bit(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As bitsandbytes' AdamW8bit does: signed map for m, unsigned for v, blocks of 256."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes to compare with")
    back = []
    for x, signed in ((m, True), (v, False)):
        code = functional.create_dynamic_map(signed=signed)
        codes = functional.quantize_blockwise(x.contiguous(), code=code, blocksize=256)
        back.append(functional.dequantize_blockwise(*codes).view_as(x))
    return back[0], back[1]


PLAIN = stored(use_dynamic_range_expansion=False)
EXPANDED = stored()
PAPER = stored(expansion=PAPER_EXPANSION)
INTEGERS = stored(m1_format="int8_ratio", m2_format="uint8_log")


def measure(moments: Moments, method: Method) -> tuple[float, float]:
    """Return the mean squared error of AdamW's direction m/(sqrt(v) + ε), and the share of nonzero v that are lost."""
    error, count, lost, nonzero = 0.0, 0, 0, 0
    for m, v in moments.values():
        m_hat, v_hat = method(m, v)
        exact, found = (a.double() / (b.double().sqrt() + 1e-8) for a, b in ((m, v), (m_hat, v_hat)))
        error += (exact - found).square().sum().item()
        count += m.numel()
        nonzero += int((v != 0).sum())
        lost += int(((v != 0) & (v_hat == 0)).sum())
    return error / count, lost / max(nonzero, 1)


def depth_of(key: str) -> str:
    """Where in the transformer a parameter is, such as "transformer_blocks.0"."""
    return re.search(r"(single_)?transformer_blocks\.\d+", key)[0]


@pytest.fixture(scope="module")
def captures() -> dict[int, Moments]:
    """Moments of a LoRA's training with fp32 AdamW on smooth latents, at each of `STEPS`."""
    torch.manual_seed(0)
    model = tiny_flux(torch.float32)
    named = add_lora(model, NetworkSection(linear=16, dropout=0.0), 0)
    clean = torch.nn.functional.interpolate(torch.randn(8, 16, 3, 3), size=(8, 8), mode="bilinear")
    embeds, pooled = torch.randn(8, 6, 64), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, weight_decay=1e-4)
    objective = Objective(model, TrainSection(), None, 0, torch.float32)
    captured: dict[int, Moments] = {}
    for step in range(1, max(STEPS) + 1):
        chosen = torch.randperm(8)[:2]
        optimizer.zero_grad()
        objective(
            {"latents": clean[chosen], "prompt_embeds": embeds[chosen], "pooled": pooled[chosen]}, step
        ).backward()
        optimizer.step()
        if step in STEPS:
            states = {name: optimizer.state[param] for name, param in named.items()}
            captured[step] = {name: tuple(state[key].clone() for key in MOMENTS) for name, state in states.items()}
    nonzero = {(name, moment.any().item()) for name, moments in captured[1].items() for moment in moments}
    assert nonzero == {(name, "lora_A" not in name) for name in named}
    return captured


@pytest.mark.parametrize("step", STEPS)
def test_expansion_lowers_the_error_of_the_update_and_keeps_exp_avg_sq(step, captures):
    plain, lost_by_plain = measure(captures[step], PLAIN)
    expanded, lost = measure(captures[step], EXPANDED)
    assert lost == 0.0
    assert expanded * EXPANSION_GAIN < plain
    assert expanded < measure(captures[step], PAPER)[0]
    assert step > 1 or lost_by_plain > 0


@pytest.mark.parametrize("step", STEPS)
def test_integer_formats_are_better_than_expansion_at_every_depth(step, captures):
    """At the bytes of the codes, and with half of the numbers per block."""
    moments = captures[step]
    for depth in {depth_of(key) for key in moments}:
        here = {key: both for key, both in moments.items() if depth_of(key) == depth}
        ours, lost = measure(here, INTEGERS)
        assert lost == 0.0
        assert ours * INTEGER_FORMATS_GAIN[step > 2] <= measure(here, EXPANDED)[0]


def test_not_above_bitsandbytes(captures):
    theirs = measure(captures[30], dynamic_8bit)[0]
    assert measure(captures[30], INTEGERS)[0] < theirs
    assert measure(captures[30], EXPANDED)[0] <= theirs
