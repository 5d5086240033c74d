"""`CastProbe` on operators called by hand: what counts as lost, as which kind, in which layer."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8AdamW, FP8Linear, FP8QuantizationConfig, ops
from coat_core.casts import declarations
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_GROUP, PER_ROW, PER_TENSOR, Granularity
from coat_core.metrics import cast_losses
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.norm import norm_modulate_quantize
from coat_core.ops.quantize import quantize
from coat_flux.config.coat import GuardOptions
from coat_flux.watch.casts import (
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT,
    INPUT,
    SAMPLE,
    SAVED,
    CastProbe,
    Measures,
    ObservedCast,
    health_line,
    health_verdict,
)


def losses_of(x: Tensor, fmt: str, granularity: Granularity) -> tuple[float, float]:
    """(saturation, underflow) of one cast, as the probe sees it."""
    with CastProbe(None, {}) as probe:
        quantize(x, fmt, granularity)
    (cast,) = probe.read()
    assert cast.kind == SAVED
    return cast.measures.saturation, cast.measures.underflow


def by_kind(probe: CastProbe) -> dict[str, list[ObservedCast]]:
    casts = probe.read()
    return {kind: [cast for cast in casts if cast.kind == kind] for kind in {cast.kind for cast in casts}}


def lost(kind: str, where: str, saturation: float, underflow: float) -> ObservedCast:
    return ObservedCast(kind, Measures(saturation, underflow, 0.0, 0.0), 1, where)


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, PER_GROUP], ids=lambda g: g.name)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_largest_element_of_a_group_is_not_saturated(fmt: str, granularity: Granularity) -> None:
    normal = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert losses_of(normal, fmt, granularity)[0] == 0.0
    assert losses_of(torch.full((8, 256), -3.3), fmt, granularity) == (0.0, 0.0)  # every code is at the end
    assert losses_of(torch.zeros(8, 256), fmt, granularity) == (0.0, 0.0)
    assert losses_of(torch.full((8, 256), 3e-42), "e5m2", granularity) == (0.0, 1.0)  # no fp32 scale is so small


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, PER_GROUP], ids=lambda g: g.name)
def test_infinities_saturate(granularity: Granularity) -> None:
    x = torch.ones(4, 256)
    x[1, :64] = math.inf
    x[2, :64] = -math.inf
    assert losses_of(x, "e4m3", granularity) == (0.125, 0.0)


def test_one_outlier_casts_the_rest_to_zero() -> None:
    x = torch.ones(4, 256)
    x[0, 0] = 1e6
    x[3] = 0.0  # zeros are not lost
    share = 767 / 768
    assert losses_of(x, "e4m3", PER_TENSOR) == (0.0, pytest.approx(share))
    assert losses_of(x, "e4m3", PER_ROW) == (0.0, pytest.approx(255 / 768))
    assert losses_of(x, "e4m3", PER_GROUP) == (0.0, pytest.approx(127 / 768))
    assert losses_of(x, "e5m2", PER_TENSOR) == (0.0, 0.0)


def test_a_scale_that_does_not_cover_saturates() -> None:
    x = torch.tensor([1.0, 447.9, 448.0, 449.0, 1e9])
    codes = x.clamp(max=448.0).to(torch.float8_e4m3fn)
    assert cast_losses(x, codes, codes.float()).tolist() == [pytest.approx(0.4), 0.0]
    nan = torch.tensor([math.nan, 1.0])
    assert cast_losses(nan, nan.to(torch.float8_e5m2), nan).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, PER_GROUP], ids=lambda g: g.name)
def test_large_tensors_are_sampled_evenly(granularity: Granularity) -> None:
    x = torch.ones(2, 2 * SAMPLE // 512, 512, dtype=torch.bfloat16)  # 4 times what is looked at
    x[:, ::2] = math.inf
    assert losses_of(x, "e4m3", granularity) == (1.0, 0.0)  # every fourth row is among the even ones
    flat = torch.ones(SAMPLE + 100)
    flat[: SAMPLE // 4] = math.inf
    if granularity is not PER_ROW:
        assert losses_of(flat, "e4m3", granularity) == (0.25, 0.0)


def two_linears(weight_granularity: str, input_granularity: str) -> nn.Sequential:
    config = FP8LinearConfig(weight_granularity=weight_granularity, input_granularity=input_granularity)
    linears = [FP8Linear(32, 32, config=config) for _ in range(2)]
    return nn.Sequential(*linears).to(torch.bfloat16)


@pytest.mark.parametrize("weights", ["per_tensor", "per_row"])
@pytest.mark.parametrize("inputs", ["per_tensor", "per_row"])
def test_inputs_and_gradients_are_told_apart_and_the_worst_layer_is_named(weights: str, inputs: str) -> None:
    model = two_linears(weights, inputs)
    x = torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)
    spike = torch.ones(4, 32, dtype=torch.bfloat16)
    spike[:, 5] = 1e6
    with CastProbe(model, {}) as probe:
        y = model[0](x)
        z = model[1](y * 0 + spike)
        (z * torch.randn(4, 32, generator=torch.Generator().manual_seed(1))).sum().backward()
    kinds = by_kind(probe)
    assert {kind: [cast.where for cast in casts] for kind, casts in kinds.items()} == {
        INPUT: ["0", "1"],
        GRADIENT: ["1", "0"],
    }
    assert [cast.measures.saturation for cast in kinds[INPUT]] == [0.0, 0.0]
    assert [cast.measures.underflow for cast in kinds[INPUT]] == [0.0, pytest.approx(31 / 32)]


def test_fused_operators_are_seen_and_those_that_quantize_nothing_are_not() -> None:
    mlp = torch.full((1, 2, 64), -30.0)  # GELU gives -0
    mlp[0, 0, 0] = math.inf
    args, rest = (None, None, mlp, None, None, None), ("none", 16, torch.float32)
    with CastProbe(None, {}) as probe:
        mlp_activation(*args, "e4m3", "none", *rest)
    assert probe.read() == []
    with CastProbe(None, {}) as probe:
        mlp_activation(*args, "e4m3", "per_row", *rest)
    (cast,) = by_kind(probe)[INPUT]
    assert cast.measures.saturation == 1 / 128


def test_an_operator_may_declare_several_casts() -> None:
    x = torch.ones(1, 4, 64)
    x[0, 1] = math.inf
    modulation = torch.zeros(1, 64)
    with CastProbe(None, {}) as probe:
        norm_modulate_quantize(x, modulation, modulation, 1e-6, "e4m3", "per_row", "e4m3", 16)
    kinds = by_kind(probe)
    assert {kind: len(casts) for kind, casts in kinds.items()} == {INPUT: 1, SAVED: 1}
    assert kinds[SAVED][0].measures.saturation == 0.25  # x itself; of n that row is nan


def test_every_operator_that_makes_codes_declares_what_it_casts() -> None:
    for family in ops.FAMILIES:
        importlib.import_module(f"coat_core.ops.{family}")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("coat::")]
    schemas = {name: getattr(torch.ops.coat, name.removeprefix("coat::")).default._schema for name in names}
    formats = {"fmt", "saved_format"}
    making = {name for name, schema in schemas.items() if formats & {given.name for given in schema.arguments}}
    products = {"coat::fp8_mm", "coat::int8_mm", "coat::weight_only_linear"}
    assert set(declarations) == making | products | {
        "coat::decode_nvfp4",
        "coat::quantize_int8",
        "coat::fp8_adamw_step",
    }


@pytest.mark.parametrize("expansion", [True, False])
def test_moments_that_become_zero_are_lost_and_the_parameter_is_named(expansion: bool) -> None:
    params = {"a.lora_A.weight": nn.Parameter(torch.ones(100)), "b.lora_B.weight": nn.Parameter(torch.ones(2, 128))}
    config = FP8QuantizationConfig(use_dynamic_range_expansion=expansion)
    optimizer = FP8AdamW(params.values(), lr=1e-3, fp8_config=config)
    params["a.lora_A.weight"].grad = torch.ones(100)
    params["b.lora_B.weight"].grad = torch.full((2, 128), 1e-4)
    params["b.lora_B.weight"].grad[0, :64] = 0.0
    params["b.lora_B.weight"].grad[:, 100] = 1.0  # one each block: g² of the others is 1e-8 of it
    with CastProbe(None, params) as probe:
        optimizer.step()
    kinds = by_kind(probe)
    assert max(cast.measures.underflow for cast in kinds[EXP_AVG]) == 0.0
    assert {cast.where: cast.measures.underflow for cast in kinds[EXP_AVG_SQ]} == {
        "a.lora_A.weight": 0.0,
        "b.lora_B.weight": pytest.approx(0.0 if expansion else 190 / 192),
    }


def test_moments_in_fp32_are_no_casts() -> None:
    param = nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = FP8AdamW([param], fp8_config=FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False))
    with CastProbe(None, {}) as probe:
        optimizer.step()
    assert probe.read() == []


def test_the_line_has_mean_and_worst() -> None:
    casts = [
        lost(GRADIENT, "block.1", 0.0, 0.0),
        lost(INPUT, "block.0", 0.0, 0.00001),
        lost(INPUT, "block.1", 0.5, 0.25),
    ]
    assert health_line(casts) == (
        "FP8 casts, mean share cast to zero (worst): linear inputs 12.50% (25.00% in block.1), 25.00% saturated "
        "(50.00% in block.1), gradients 0%"
    )
    assert health_line([lost(SAVED, "", 0.0, 0.00001)]).endswith("(worst): saved activations <0.01% (<0.01%)")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lost(INPUT, "b.0", 0.2, 0.0), ["20.0% of the linear inputs of b.0", "limit: 0.05", "exclude: [b.0]"]),
        (lost(INPUT, "b.0", 0.0, 0.95), ["95.0% of the linear inputs of b.0", "limit: 0.9", "per_row"]),
        (lost(GRADIENT, "", 0.0, 1.0), ["100.0% of the gradients", "grad_format: e5m2 or bf16"]),
        (lost(SAVED, "", 0.0, 1.0), ["nonlinear_granularity: per_group", "format: e5m2"]),
        (lost(EXP_AVG_SQ, "x.lora_A", 0.0, 1.0), ["exp_avg_sq of x.lora_A", "use_dynamic_range_expansion: true"]),
    ],
)
def test_the_verdict_names_the_worst_kind_and_the_remedy(loss: ObservedCast, words: list[str]) -> None:
    healthy = [lost(kind, "good", 0.01, 0.5) for kind in (INPUT, GRADIENT, SAVED, EXP_AVG)]
    options = GuardOptions(max_saturation=0.05, max_underflow=0.9)
    assert health_verdict(healthy, options) is None
    verdict = health_verdict([*healthy, loss], options)
    assert verdict is not None
    for word in words:
        assert word in verdict
    assert ("exclude" in verdict) == (loss.kind == INPUT)
    lax = dataclasses.replace(options, max_saturation=1.0, max_underflow=1.0)
    assert health_verdict([*healthy, loss], lax) is None
