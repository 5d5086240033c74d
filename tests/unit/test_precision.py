"""Precision of casts: measured against sums by hand, rows, advice, and what is planted is found."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from coat_core import FP8AdamW, FP8Linear, FP8QuantizationConfig, replace_linear_with_fp8
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_GROUP, PER_ROW, PER_TENSOR, Granularity
from coat_core.metrics import sqnr_db
from coat_core.quantize import quantize
from coat_flux.blocks.cast_loss import Measures, evenly, measure_cast, note_weight
from coat_flux.blocks.lookup import layer_of
from coat_flux.pages.charts import heat_map_png
from coat_flux.pages.precision import as_grid, exclude_yaml, standing_out, summaries, worst
from coat_flux.watch.casts import INPUT, SAVED, CastPrecision, CastProbe, ObservedCast, rows_of
from coat_flux.watch.precision import COLUMNS, KINDS, as_cells, read_rows, weight_rows
from tests import tolerances

GROUP_16 = Granularity("per_group", 16)
LAYER = "transformer_blocks.{}.attn.to_q"


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor, fmt: str = "e4m3", granularity: Granularity = PER_TENSOR) -> Measures:
    return Measures(*measure_cast(x, *quantize(x, fmt, granularity)).tolist())


# -- one cast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, PER_GROUP, GROUP_16], ids=str)
def test_gaussian_values_have_the_sqnr_of_their_format(granularity: Granularity) -> None:
    x = gaussian(64, 512)
    for fmt in ("e4m3", "e5m2"):
        whole = sqnr_db(x, quantize(x, fmt, granularity).dequantize())
        assert measured(x, fmt, granularity).sqnr_db == pytest.approx(whole, abs=tolerances.LOCAL_SQNR_DB)
    difference = measured(x, "e4m3", granularity).sqnr_db - measured(x, "e5m2", granularity).sqnr_db
    assert difference == pytest.approx(6, abs=1)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e20])
def test_the_size_of_the_values_does_not_matter(size: float) -> None:
    x = gaussian(16, 256)
    expected, got = measured(x), measured(x * size)
    assert got.sqnr_db == pytest.approx(expected.sqnr_db, abs=tolerances.LOCAL_SQNR_DB)
    assert got.range_used == pytest.approx(expected.range_used, abs=0.01)


def test_an_outlier_does_not_hide_what_it_drives_to_zero() -> None:
    x = gaussian(4, 256)
    x[:, 3] = 1e6
    assert sqnr_db(x, quantize(x).dequantize()) > 90  # what a whole tensor's SQNR says
    got = measured(x)
    assert got.sqnr_db < 4  # of two segments a row one is lost, but for its largest elements
    assert got.underflow > 0.95
    assert measured(x, "e4m3", PER_GROUP).sqnr_db > 30  # a group of its own: the others are as good as ever


def test_noise_is_that_of_its_definition() -> None:
    x = gaussian(3, 300) * torch.tensor([[1.0], [1e-3], [0.0]])
    x_hat = quantize(x, "e5m2").dequantize()
    noise = [
        ((x[row, part] - x_hat[row, part]).norm() / x[row, part].norm()).item() ** 2
        for row in (0, 1)
        for part in (slice(0, 128), slice(128, 256), slice(256, 300))
    ]
    assert measured(x, "e5m2").noise == pytest.approx(sum(noise) / 6, rel=tolerances.FP32_SUM_RTOL)


def test_special_values() -> None:
    zero = measured(torch.zeros(4, 128))
    assert math.isnan(zero.sqnr_db)
    assert math.isnan(zero.range_used)
    exact = measured(torch.full((4, 128), 448.0))
    assert exact.sqnr_db == math.inf
    assert exact.range_used == 0
    x = gaussian(4, 256)
    x[0, 0], x[1, 1] = math.inf, math.nan
    got = measured(x)
    assert got.sqnr_db == pytest.approx(measured(gaussian(4, 256)).sqnr_db, abs=0.5)
    assert got.saturation == 1 / 1024


def test_range_used_is_in_octaves_of_the_format() -> None:
    x = torch.logspace(0, 10, 1001, base=2.0)[None]  # 10 octaves, 1 % of them below 0.1
    assert measured(x).range_used == pytest.approx(9.9 / 17.8, abs=0.01)
    assert measured(x, "e5m2").range_used == pytest.approx(9.9 / 31.8, abs=0.01)


def test_evenly_spaced_elements_meet_every_column() -> None:
    few = evenly(torch.arange(64 * 1024), 4096)
    assert 1024 < few.numel() <= 4096
    assert len(set((few % 64).tolist())) == 64


# -- by layer --------------------------------------------------------------------------------------------------------


def test_rows_name_every_layer_that_reads_a_cast() -> None:
    config = FP8LinearConfig(input_granularity="per_tensor")
    model = nn.ModuleDict({name: FP8Linear(32, 32, config=config) for name in ("to_q", "to_k", "out")})
    x = gaussian(8, 32).requires_grad_()
    with CastProbe(model, {}) as probe:
        y = model["to_q"](x) + model["to_k"](x)
        model["out"](y * torch.where(torch.arange(32) == 0, 1e7, 1.0)).sum().backward()
    rows = {(row.layer, row.kind): row for row in probe.rows(5)}
    assert set(rows) == {(layer, kind) for layer in model for kind in ("input", "gradient")}
    assert rows["to_q", "input"][3:] == rows["to_k", "input"][3:]  # one cast of one x
    assert rows["out", "input"].underflow > 0.9
    assert {row.step for row in rows.values()} == {5}
    assert rows["to_q", "input"].elements == 8 * 32


def test_a_weight_is_not_taken_for_a_cast_that_was_in_its_memory_before() -> None:
    model = nn.ModuleDict({name: FP8Linear(32, 32) for name in ("to_q", "out")})
    for kind in (INPUT, SAVED):
        with CastProbe(model, {}) as probe:
            y = model["to_q"](gaussian(8, 32))
            (earlier,) = probe._casts
            probe._latest[model["out"].weight_codes.untyped_storage().data_ptr()] = earlier
            earlier.kind = kind
            model["out"](y)
        assert {row.layer for row in probe.rows(1)} == {"to_q", "out"}


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("wgrad", ["bf16", "e4m3"])
def test_rows_of_trained_weights(wgrad: str, cache: bool) -> None:
    config = FP8LinearConfig(wgrad_format=wgrad, cache_weight=cache)
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("to_q", "out")})
    replace_linear_with_fp8(model, config, trainable=True)
    for seed in range(2):  # the second step finds codes that were made before it
        x = gaussian(16, 32, seed=seed).requires_grad_()
        with CastProbe(model, {}) as probe:
            model["out"](model["to_q"](x)).sum().backward()
        rows = {(row.layer, row.kind): row.elements for row in probe.rows(5)}
        of_gradients = 16 * 32 * (1 if wgrad == "bf16" else 2)
        assert rows == {
            (layer, kind): 16 * 32 if kind == "input" else of_gradients
            for layer in model
            for kind in ("input", "gradient")
        }


@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
def test_weights_are_measured_when_they_are_stored(granularity: str) -> None:
    config = FP8LinearConfig(weight_granularity=granularity)
    linear = nn.Linear(256, 64)
    weight = linear.weight.detach().clone()
    weight[0, 0] = 1e6
    linear.weight.data.copy_(weight)
    model = nn.ModuleDict({"a": linear, "b": nn.Linear(8, 8)})
    note_weight(FP8Linear.from_linear(linear, config), weight, config)
    (row,) = weight_rows(model)
    assert (row.step, row.layer, row.kind, row.elements) == (0, "a", "weight", 256 * 64)
    lost = 1 if granularity == "per_tensor" else 1 / 64
    assert row.underflow == pytest.approx(lost, abs=0.01)
    assert (row.sqnr_db > 17) == (granularity == "per_row")


@pytest.mark.parametrize(("m1", "m2"), [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8_ratio", "uint8_log")])
@pytest.mark.parametrize("maximize", [False, True])
def test_moments_are_compared_with_the_update_in_fp32(m1: str, m2: str, maximize: bool) -> None:
    names = {"transformer.a.lora_A.weight": (3, 128), "transformer.a.lora_B.weight": (100,)}
    params = {name: nn.Parameter(gaussian(*shape)) for name, shape in names.items()}
    exact = [nn.Parameter(param.detach().clone()) for param in params.values()]
    config = FP8QuantizationConfig(m1_format=m1, m2_format=m2)
    optimizer = FP8AdamW(params.values(), lr=1e-3, maximize=maximize, fp8_config=config)
    unquantized = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False)
    reference = FP8AdamW(exact, lr=1e-3, maximize=maximize, fp8_config=unquantized)
    for twin, param in zip(exact, params.values(), strict=True):
        twin.grad = param.grad = gaussian(*param.shape, seed=1)
    with CastProbe(None, params) as probe:
        optimizer.step()
    reference.step()
    rows = {row.kind: row for row in probe.rows(1)}
    assert set(rows) == {"exp_avg", "exp_avg_sq"}
    for kind, row in rows.items():
        state = [(reference.state[twin][kind], optimizer) for twin in exact]
        noise = 0.0
        for (expected, _), param in zip(state, params.values(), strict=True):
            blocks = expected.reshape(-1, min(128, expected.numel()))
            errors = (expected - _dequantized(optimizer, param, kind)).reshape(blocks.shape)
            noise += (errors.square().sum(-1) / blocks.square().sum(-1)).mean().item() * param.numel() / 484
        assert row.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=tolerances.LOCAL_SQNR_DB)
        assert (row.layer, row.elements) == ("a", 484)
        assert math.isnan(row.range_used) == (m1 == "int8_ratio")


def _dequantized(optimizer: FP8AdamW, param: nn.Parameter, kind: str) -> Tensor:
    """What the optimizer reads in its next step: an fp32 twin that takes the state over."""
    twin = nn.Parameter(param.detach().clone())
    unquantized = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False)
    index = [p is param for p in optimizer.param_groups[0]["params"]].index(True)
    everything = optimizer.state_dict()
    reader = FP8AdamW([twin], lr=1e-3, fp8_config=unquantized)
    group = {**everything["param_groups"][0], "params": [0]}
    reader.load_state_dict({"state": {0: everything["state"][index]}, "param_groups": [group]})
    return reader.state[twin][kind]


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight", "transformer_blocks.0.attn.to_out.0"),
        ("transformer$$single_transformer_blocks$$3$$proj_out.lora_up.weight", "single_transformer_blocks.3.proj_out"),
        ("something", "something"),
    ],
)
def test_layer_of_a_lora_parameter(parameter: str, layer: str) -> None:
    assert layer_of(parameter) == layer


# -- rows and files --------------------------------------------------------------------------------------------------


def test_casts_of_a_layer_are_one_row_weighted_by_elements() -> None:
    casts = [ObservedCast("input", Measures(0.0, 0.2, 0.01, 0.5), 100, block="a")]
    casts += [ObservedCast("input", Measures(0.1, 0.0, 0.0, math.nan), 300, block="a")]
    (row,) = rows_of(7, casts)
    assert row[:3] == (7, "a", "input")
    assert row.sqnr_db == pytest.approx(-10 * math.log10(0.0025))
    assert row[4:] == (pytest.approx(0.05), pytest.approx(0.075), 0.5, 400)


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    rows = [
        CastPrecision(0, "a.b", "weight", 31.25, 0.0, 0.0, 0.5, 4096),
        CastPrecision(2, "", "saved", math.inf, 1e-6, 1.0, 0.0, 1),
        CastPrecision(2, "a.b", "gradient", math.nan, 0.0, 0.0, math.nan, 3),
    ]
    path = tmp_path / "precision.csv"
    path.write_text("\n".join(",".join(cells) for cells in [COLUMNS, *map(as_cells, rows)]))
    got = read_rows(path)
    assert got[:2] == rows[:2]
    assert [*map(str, got[2])] == [*map(str, rows[2])]
    path.write_text(path.read_text() + "\n3,a,input,x,0,0,0,1")
    with pytest.raises(ValueError, match=r"precision.csv: line 5 is not a row"):
        read_rows(path)


# -- advice ----------------------------------------------------------------------------------------------------------


def run_rows(low: dict[int, float], blocks: int = 4) -> list[CastPrecision]:
    """Two looks at to_q and to_k of some blocks; inputs of to_q of `low` are as bad as it says."""
    rows = []
    for step in (2, 100):
        for block in range(blocks):
            for leaf in ("to_q", "to_k"):
                layer = f"transformer_blocks.{block}.attn.{leaf}"
                value = low.get(block, 31.5) if leaf == "to_q" else 31.0
                rows.append(CastPrecision(step, layer, "input", value + step / 1000, 0.01 * block, 0.0, 0.5, 10))
                rows.append(CastPrecision(step, layer, "gradient", 25.0, 0.0, 0.0, 0.3, 10))
    return rows


def test_the_planted_layer_is_the_worst_and_is_suggested() -> None:
    found = summaries(run_rows({2: 11.0}))
    first = worst(found)[0]
    assert (first.layer, first.kind) == (LAYER.format(2), "input")
    assert first.sqnr_db == pytest.approx(11.051)
    assert first.lowest_db == pytest.approx(11.002)
    assert first.below_median_db == pytest.approx(20, abs=1)
    assert len(worst(found)) == 8
    assert standing_out(found) == [LAYER.format(2)]
    assert standing_out(summaries(run_rows({}))) == []


def test_heat_map_has_a_line_for_each_layer() -> None:
    rows = [*run_rows({1: 0.0}), CastPrecision(2, "", "saved", math.inf, 0.0, 0.0, math.nan, 5)]
    layers, kinds, values = as_grid(summaries(rows))
    assert layers[-1] == "(layer not known)"
    assert kinds == [kind for kind in KINDS if kind in ("input", "gradient", "saved")]
    assert values[0] == [pytest.approx(31.551), 25.0, None]
    assert values[-1] == [None, None, math.inf]
    png = heat_map_png("map", layers, kinds, values, unit="dB", ends=(0.0, 40.0))
    with Image.open(io.BytesIO(png)) as image:
        pixels = image.convert("RGB").getcolors(maxcolors=2**20)
    assert any(red > 2 * blue and count > 100 for count, (red, _, blue) in pixels)  # the planted cell


def test_gradients_of_a_coarser_format_do_not_stand_out_but_lost_ones_do() -> None:
    rows = [*run_rows({}), CastPrecision(2, "x.0.proj", "gradient", 18.0, 0.0, 0.0, 0.3, 10)]
    assert standing_out(summaries(rows)) == ["x.0.proj"]
    other = [*run_rows({}), CastPrecision(2, "x.0.proj", "exp_avg", 1.0, 0.0, 0.0, 0.3, 10)]
    assert standing_out(summaries(other)) == []  # exclude does nothing for moments


def test_yaml_has_a_pattern_only_where_it_matches_nothing_else() -> None:
    known = {row.layer for row in run_rows({})}
    some = [LAYER.format(1), LAYER.format(2)]
    assert yaml.safe_load(exclude_yaml(some, known, ["x.*"])) == {"coat": {"activation": {"exclude": ["x.*", *some]}}}
    every = [LAYER.format(block) for block in range(4)]
    assert yaml.safe_load(exclude_yaml(every, known))["coat"]["activation"]["exclude"] == [LAYER.format("*")]
