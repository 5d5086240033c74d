"""Precision of casts: measured against sums by hand, by kind and layer, the guard's verdict, and advice on the page."""

import dataclasses
import importlib
import math
import pkgutil

import pytest
import torch
from torch import Tensor, nn

from coat_core import FP8AdamW, FP8Linear, FP8QuantizationConfig, ops, replace_linear_with_fp8
from coat_core.casts import GRADIENT, INPUT, declarations
from coat_core.config import FP8LinearConfig
from coat_core.granularity import PER_GROUP, PER_ROW, PER_TENSOR, Granularity
from coat_core.ops.gelu import mlp_activation
from coat_core.ops.norm import norm_modulate_quantize
from coat_core.ops.quantize import quantize as quantize_op
from coat_core.optim.state import read_state, storages
from coat_core.quantize import quantize, sqnr_db
from coat_flux.blocks.cast_loss import SAMPLE, measure_cast, note_weight
from coat_flux.blocks.models import layer_of
from coat_flux.config.coat import GuardOptions
from coat_flux.pages.report import below_median, standing_out, summaries
from coat_flux.watch import casts
from tests import tolerances
from tests.helpers.flux import IMAGE_SIDE, TEXT_TOKENS, coat_flux_model, loss_of, predict
from tests.helpers.step_watch import step_watch

GROUP_16 = Granularity("per_group", 16)
LAYER = "transformer_blocks.{}.attn.to_q"


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor, fmt: str = "e4m3", granularity: Granularity = PER_TENSOR) -> casts.CastPrecision:
    return casts.row_of(1, "", INPUT, [(measure_cast(x, *quantize(x, fmt, granularity)).tolist(), x.numel())])


def losses_of(x: Tensor, fmt: str, granularity: Granularity) -> tuple[float, float]:
    """(saturation, underflow) of one cast, as the probe sees it."""
    with casts.CastProbe(None, {}) as probe:
        quantize_op(x, fmt, granularity)
    (row,) = probe.rows(1)
    assert row.kind == casts.SAVED
    return row.saturation, row.underflow


def by_kind(probe: casts.CastProbe) -> dict[str, list[casts.CastPrecision]]:
    rows = probe.rows(1)
    return {kind: [row for row in rows if row.kind == kind] for kind in {row.kind for row in rows}}


# -- one cast --------------------------------------------------------------------------------------------------------
def test_an_outlier_does_not_hide_what_it_drives_to_zero():
    x = gaussian(64, 512)
    for fmt in ("e4m3", "e5m2"):
        whole = sqnr_db(x, quantize(x, fmt, GROUP_16).dequantize())
        assert measured(x, fmt, GROUP_16).sqnr_db == pytest.approx(whole, abs=tolerances.LOCAL_SQNR_DB)
    x = gaussian(4, 256)
    for size in (1e-30, 1e-10, 1e20):
        assert measured(x * size).sqnr_db == pytest.approx(measured(x).sqnr_db, abs=tolerances.LOCAL_SQNR_DB)
    x[:, 3] = 1e6
    assert sqnr_db(x, quantize(x).dequantize()) > 90  # of the whole tensor
    got = measured(x)
    assert got.sqnr_db < 4  # of two segments a row one is lost, but for its largest elements
    assert got.underflow > 0.95
    assert measured(x, "e4m3", PER_GROUP).sqnr_db > 30  # a group of its own: the others are as good as ever


def test_noise_is_that_of_its_definition():
    x = gaussian(3, 300) * torch.tensor([[1.0], [1e-3], [0.0]])
    x_hat = quantize(x, "e5m2").dequantize()
    noise = [
        ((x[row, part] - x_hat[row, part]).norm() / x[row, part].norm()).item() ** 2
        for row in (0, 1)
        for part in (slice(0, 128), slice(128, 256), slice(256, 300))
    ]
    found = 10 ** (-measured(x, "e5m2").sqnr_db / 10)
    assert found == pytest.approx(sum(noise) / 6, rel=tolerances.FP32_SUM_RTOL)


def test_special_values():
    assert math.isnan(measured(torch.zeros(4, 128)).sqnr_db)
    assert measured(torch.full((4, 128), 448.0)).sqnr_db == math.inf
    x = gaussian(4, 256)
    x[0, 0], x[1, 1] = math.inf, math.nan
    got = measured(x)
    assert got.sqnr_db == pytest.approx(measured(gaussian(4, 256)).sqnr_db, abs=0.5)
    assert got.saturation == 1 / 1024


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, PER_GROUP], ids=lambda g: g.name)
def test_what_is_saturated_and_what_is_lost(granularity):
    for fmt in ("e4m3", "e5m2"):
        assert losses_of(gaussian(64, 256), fmt, granularity)[0] == 0.0
        assert losses_of(torch.full((8, 256), -3.3), fmt, granularity) == (0.0, 0.0)  # every code is at the end
        assert losses_of(torch.zeros(8, 256), fmt, granularity) == (0.0, 0.0)
    assert losses_of(torch.full((8, 256), 3e-42), "e5m2", granularity) == (0.0, 0.0)
    assert losses_of(torch.full((8, 256), 1e-45), "e5m2", granularity) == (0.0, 1.0)  # no scale is so small
    infinite = torch.ones(4, 256)
    infinite[1, :64] = math.inf
    infinite[2, :64] = -math.inf
    assert losses_of(infinite, "e4m3", granularity) == (0.125, 0.0)


def test_one_outlier_casts_the_rest_to_zero():
    x = torch.ones(4, 256)
    x[0, 0] = 1e6
    x[3] = 0.0  # zeros are not lost
    assert losses_of(x, "e4m3", PER_TENSOR) == (0.0, pytest.approx(767 / 768))
    assert losses_of(x, "e4m3", PER_ROW) == (0.0, pytest.approx(255 / 768))
    assert losses_of(x, "e4m3", PER_GROUP) == (0.0, pytest.approx(127 / 768))
    assert losses_of(x, "e5m2", PER_TENSOR) == (0.0, 0.0)


def test_large_tensors_are_sampled_evenly():
    x = torch.ones(2, 2 * SAMPLE // 512, 512, dtype=torch.bfloat16)  # 4 times what is looked at
    x[:, ::2] = math.inf
    for granularity in (PER_TENSOR, PER_ROW, PER_GROUP):
        assert losses_of(x, "e4m3", granularity) == (1.0, 0.0)  # every fourth row is among the even ones


# -- by kind and layer -----------------------------------------------------------------------------------------------
def test_rows_name_every_layer_that_reads_a_cast():
    config = FP8LinearConfig(input_granularity="per_tensor")
    model = nn.ModuleDict({name: FP8Linear(32, 32, config=config) for name in ("to_q", "to_k", "out")})
    x = gaussian(8, 32).requires_grad_()
    with casts.CastProbe(model, {}) as probe:
        y = model["to_q"](x) + model["to_k"](x)
        model["out"](y * torch.where(torch.arange(32) == 0, 1e7, 1.0)).sum().backward()
    rows = {(row.layer, row.kind): row for row in probe.rows(5)}
    assert set(rows) == {(layer, kind) for layer in model for kind in ("input", "gradient")}
    assert rows["to_q", "input"][3:] == rows["to_k", "input"][3:]  # one cast of one x
    assert rows["out", "input"].underflow > 0.9
    assert {row.step for row in rows.values()} == {5}
    assert rows["to_q", "input"].elements == 8 * 32


def test_every_linear_of_a_block_has_a_row_of_its_input_and_gradient():
    """With two images a block's output projections multiply copies of rows of the attention's joint codes."""
    batch = 2
    model, _, _ = coat_flux_model({"memory": {"checkpointing": "none"}, "speed": {"measure": "never"}})
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(predict(model, batch=batch)).backward()  # the first pass compares two flows
        with casts.CastProbe(model, {}) as probe:
            loss_of(predict(model, batch=batch)).backward()
    linears = {
        name.removesuffix(".base_layer") for name, module in model.named_modules() if isinstance(module, FP8Linear)
    }
    blocks = {name for name in linears if ".norm" not in name}  # modulations multiply single vectors in bf16
    rows = by_kind(probe)
    assert {row.layer for row in rows[INPUT]} == {row.layer for row in rows[GRADIENT]} == blocks
    tokens = IMAGE_SIDE**2 + TEXT_TOKENS
    joint = {row.elements for row in rows[INPUT] if row.layer.endswith(("to_out.0", "to_add_out"))}
    assert joint == {batch * tokens * model.inner_dim}


def test_a_weight_is_not_taken_for_what_was_in_its_memory_before():
    model = nn.ModuleDict({name: FP8Linear(32, 32) for name in ("to_q", "out")})
    with casts.CastProbe(model, {}) as probe:
        y = model["to_q"](gaussian(8, 32))
        address = model["out"].weight_codes.untyped_storage().data_ptr()
        (earlier,) = probe._casts
        probe._latest[address], probe._weights[address] = earlier, ["other"]
        model["out"](y)
    assert {row.layer for row in probe.rows(1)} == {"to_q", "out"}


@pytest.mark.parametrize(("wgrad", "cache"), [("bf16", False), ("e4m3", True)])
def test_rows_of_trained_weights(wgrad, cache):
    config = FP8LinearConfig(wgrad_format=wgrad, cache_weight=cache)
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("to_q", "out")})
    replace_linear_with_fp8(model, config, trainable=True)
    for seed in range(2):  # the second step finds codes that were made before it
        x = gaussian(16, 32, seed=seed).requires_grad_() * 1  # an input would be cast again in backward
        with casts.CastProbe(model, {}) as probe:
            model["out"](model["to_q"](x)).sum().backward()
        rows = {(row.layer, row.kind): row.elements for row in probe.rows(5)}
        of_gradients = 16 * 32 * (1 if wgrad == "bf16" else 2)
        for layer in model:
            assert (rows.pop((layer, "input")), rows.pop((layer, "gradient"))) == (16 * 32, of_gradients)
        assert not rows


def test_fused_operators_are_seen_and_those_that_quantize_nothing_are_not():
    mlp = torch.full((1, 2, 64), -30.0)  # GELU gives -0
    mlp[0, 0, 0] = math.inf
    args, rest = (None, mlp, None, None), ("none", 16, torch.float32)
    with casts.CastProbe(None, {}) as probe:
        mlp_activation(*args, "e4m3", "none", *rest)
    assert probe.rows(1) == []
    with casts.CastProbe(None, {}) as probe:
        mlp_activation(*args, "e4m3", "per_row", *rest)
    (row,) = by_kind(probe)[INPUT]
    assert row.saturation == 1 / 128
    x = torch.ones(1, 4, 64)
    x[0, 1] = math.inf
    with casts.CastProbe(None, {}) as probe:  # two casts
        norm_modulate_quantize(x, torch.zeros(1, 64), torch.zeros(1, 64), 1e-6, "e4m3", "per_row", "e4m3", 16)
    kinds = by_kind(probe)
    assert {kind: len(rows) for kind, rows in kinds.items()} == {INPUT: 1, casts.SAVED: 1}
    assert kinds[casts.SAVED][0].saturation == 0.25  # x itself; of n that row is nan


def test_every_operator_that_makes_codes_declares_what_it_casts():
    for found in pkgutil.iter_modules(ops.__path__):
        if found.name.endswith("_kernel"):
            importlib.import_module(f"coat_core.ops.{found.name.removesuffix('_kernel')}")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("coat::")]
    schemas = {name: getattr(torch.ops.coat, name.removeprefix("coat::")).default._schema for name in names}
    formats = {"fmt", "saved_format"}
    making = {name for name, schema in schemas.items() if formats & {given.name for given in schema.arguments}}
    others = ("fp8_mm", "int8_mm", "weight_only_linear", "decode_nvfp4", "quantize_int8", "fp8_adamw_step")
    assert set(declarations) == making | {f"coat::{name}" for name in others}


@pytest.mark.parametrize("granularity", ["per_tensor", "per_row"])
def test_weights_are_measured_when_they_are_stored(granularity):
    config = FP8LinearConfig(weight_granularity=granularity)
    linear = nn.Linear(256, 64)
    weight = linear.weight.detach().clone()
    weight[0, 0] = 1e6
    linear.weight.data.copy_(weight)
    model = nn.ModuleDict({"a": linear, "b": nn.Linear(8, 8)})
    note_weight(FP8Linear.from_linear(linear, config), weight, config)
    (row,) = casts.weight_rows(model)
    assert (row.step, row.layer, row.kind, row.elements) == (0, "a", "weight", 256 * 64)
    assert row.underflow == pytest.approx(1 if granularity == "per_tensor" else 1 / 64, abs=0.01)
    assert (row.sqnr_db > 17) == (granularity == "per_row")


# -- AdamW's moments -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m1", "m2", "maximize"), [("e4m3", "e4m3", False), ("int8_ratio", "uint8_log", True)])
def test_moments_are_compared_with_the_update_in_fp32(m1, m2, maximize):
    names = {"transformer.a.lora_A.weight": (3, 128), "transformer.a.lora_B.weight": (100,)}
    params = {name: nn.Parameter(gaussian(*shape)) for name, shape in names.items()}
    exact = [nn.Parameter(param.detach().clone()) for param in params.values()]
    config = FP8QuantizationConfig(m1_format=m1, m2_format=m2)
    optimizer = FP8AdamW(params.values(), lr=1e-3, maximize=maximize, fp8_config=config)
    unquantized = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False)
    reference = FP8AdamW(exact, lr=1e-3, maximize=maximize, fp8_config=unquantized)
    for twin, param in zip(exact, params.values(), strict=True):
        twin.grad = param.grad = gaussian(*param.shape, seed=1)
    with casts.CastProbe(None, params) as probe:
        optimizer.step()
    reference.step()
    rows = {row.kind: row for row in probe.rows(1)}
    assert set(rows) == {"exp_avg", "exp_avg_sq"}
    for kind, row in rows.items():
        noise = 0.0
        for twin, param in zip(exact, params.values(), strict=True):
            expected = reference.state[twin][kind]
            m, v = read_state(optimizer.state[param], storages(config))
            blocks = expected.reshape(-1, min(128, expected.numel()))
            errors = (expected - (m if kind == casts.EXP_AVG else v)).reshape(blocks.shape)
            noise += (errors.square().sum(-1) / blocks.square().sum(-1)).mean().item() * param.numel() / 484
        assert row.sqnr_db == pytest.approx(-10 * math.log10(noise), abs=tolerances.LOCAL_SQNR_DB)
        assert (row.layer, row.elements) == ("a", 484)


@pytest.mark.parametrize("expansion", [True, False])
def test_moments_that_become_zero_are_lost(expansion):
    params = {"a.lora_A.weight": nn.Parameter(torch.ones(100)), "b.lora_B.weight": nn.Parameter(torch.ones(2, 128))}
    config = FP8QuantizationConfig(use_dynamic_range_expansion=expansion)
    optimizer = FP8AdamW(params.values(), lr=1e-3, fp8_config=config)
    params["a.lora_A.weight"].grad = torch.ones(100)
    params["b.lora_B.weight"].grad = torch.full((2, 128), 1e-4)
    params["b.lora_B.weight"].grad[0, :64] = 0.0
    params["b.lora_B.weight"].grad[:, 100] = 1.0  # one each block: g² of the others is 1e-8 of it
    with casts.CastProbe(None, params) as probe:
        optimizer.step()
    kinds = by_kind(probe)
    assert max(row.underflow for row in kinds[casts.EXP_AVG]) == 0.0
    lost = pytest.approx(0.0 if expansion else 190 / 192)
    assert {row.layer: row.underflow for row in kinds[casts.EXP_AVG_SQ]} == {"a": 0.0, "b": lost}
    config = FP8QuantizationConfig(use_fp8_m1=False, use_fp8_m2=False)
    with casts.CastProbe(None, {}) as probe:  # moments in fp32 are not casts
        FP8AdamW(params.values(), fp8_config=config).step()
    assert probe.rows(1) == []


# -- rows, the file, the guard's verdict -----------------------------------------------------------------------------
def test_a_row_has_the_mean_noise_by_elements_and_the_worst_shares():
    taken = [([0.0, 0.2, 0.01], 100), ([0.1, 0.0, 0.0], 300), ([0.0, 0.0, math.nan], 50)]
    row = casts.row_of(7, "a", "input", taken)
    assert row == (7, "a", "input", pytest.approx(-10 * math.log10(0.0025)), 0.2, 0.1, 450)


def test_rows_come_back_from_the_file(tmp_path):
    rows = [casts.CastPrecision(0, "a.b", "weight", 31.25, 0.0, 0.0, 4096)]
    rows += [casts.CastPrecision(2, "", "saved", math.inf, 1e-6, 1.0, 1)]
    rows += [casts.CastPrecision(2, "a.b", "gradient", math.nan, 0.0, 0.0, 3)]
    path = tmp_path / "precision.csv"
    path.write_text("\n".join(",".join(cells) for cells in [casts.COLUMNS, *map(casts.as_cells, rows)]))
    got = casts.read_rows(path)
    assert got[:2] == rows[:2]
    assert [*map(str, got[2])] == [*map(str, rows[2])]
    path.write_text(path.read_text() + "\n3,a,input,x,0,0,1")
    with pytest.raises(ValueError, match=r"precision.csv: line 5"):
        casts.read_rows(path)


def lost(kind: str, layer: str, saturation: float, underflow: float) -> casts.CastPrecision:
    return casts.CastPrecision(1, layer, kind, 30.0, underflow, saturation, 1)


def test_the_line_has_mean_and_worst_of_each_kind():
    line = casts.health_line(
        [lost(GRADIENT, "b.1", 0.0, 0.0), lost(INPUT, "b.0", 0.0, 1e-5), lost(INPUT, "b.1", 0.5, 0.25)]
    )
    assert "linear inputs 12.50% (25.00% in b.1), 50.00% saturated in b.1, gradients 0.00%" in line


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lost(INPUT, "b.0", 0.2, 0.0), ["20.0% of the linear inputs of b.0", "limit: 0.05", "exclude: [b.0]"]),
        (lost(INPUT, "b.0", 0.0, 0.95), ["95.0% of the linear inputs of b.0", "limit: 0.9", "per_row"]),
        (lost(GRADIENT, "", 0.0, 1.0), ["100.0% of the gradients", "grad_format: e5m2 or bf16"]),
        (lost(casts.SAVED, "b", 0.0, 1.0), ["nonlinear_granularity: per_group", "format: e5m2"]),
        (lost(casts.EXP_AVG_SQ, "x", 0.0, 1.0), ["exp_avg_sq of x", "use_dynamic_range_expansion: true"]),
    ],
)
def test_the_verdict_names_the_worst_kind_and_the_remedy(loss, words):
    healthy = [lost(kind, "good", 0.01, 0.5) for kind in (INPUT, GRADIENT, casts.SAVED, casts.EXP_AVG)]
    options = GuardOptions(max_saturation=0.05, max_underflow=0.9)
    assert casts.health_verdict(healthy, options) is None
    verdict = casts.health_verdict([*healthy, loss], options)
    for word in words:
        assert word in verdict
    assert ("exclude" in verdict) == (loss.kind == INPUT)
    lax = dataclasses.replace(options, max_saturation=1.0, max_underflow=1.0)
    assert casts.health_verdict([*healthy, loss], lax) is None


def test_a_minimum_that_is_met_leaves_every_layer_and_is_remembered():
    watch, log = step_watch("activation: {min_sqnr_db: 20.0}")
    assert watch.pending
    watch.choose_layers(
        [casts.CastPrecision(2, "a", INPUT, 20.0, 0.0, 0.0, 1), casts.CastPrecision(2, "b", GRADIENT, 1.0, 0.0, 0.0, 1)]
    )
    assert not watch.pending
    assert "lowest of 1 layers has 20.0 dB" in log.said[0]
    assert watch.state_dict()["precision"] == {"minimum": 20.0, "left_out": []}
    # with another threshold it is asked again
    for minimum, pending, lines in (("20.0", False, 0), ("21.0", True, 1), ("null", False, 0)):
        resumed, log = step_watch(f"activation: {{min_sqnr_db: {minimum}}}")
        resumed.load_state_dict(watch.state_dict())
        assert resumed.pending is pending
        assert len(log.said) == lines


# -- advice ----------------------------------------------------------------------------------------------------------
def run_rows(low: dict[int, float]) -> list[casts.CastPrecision]:
    """Two looks at to_q and to_k of some blocks; inputs of to_q of `low` are as bad as it says."""
    rows = []
    for step in (2, 100):
        for block in range(4):
            for leaf in ("to_q", "to_k"):
                layer = f"transformer_blocks.{block}.attn.{leaf}"
                value = low.get(block, 31.5) if leaf == "to_q" else 31.0
                rows.append(casts.CastPrecision(step, layer, "input", value + step / 1000, 0.01 * block, 0.0, 10))
                rows.append(casts.CastPrecision(step, layer, "gradient", 25.0, 0.0, 0.0, 10))
    return rows


def test_lost_inputs_and_gradients_stand_out_and_those_of_a_coarser_format_do_not():
    found = summaries(run_rows({2: 11.0}))
    below, first = below_median(found)[0]
    assert (first.layer, first.kind, len(below_median(found))) == (LAYER.format(2), "input", 16)
    assert (first.sqnr_db, first.underflow, below) == (pytest.approx(11.051), 0.02, pytest.approx(20, abs=1))
    for extra, expected in (
        ([], []),
        ([casts.CastPrecision(2, "x.0.proj", "gradient", 18.0, 0.0, 0.0, 10)], ["x.0.proj"]),
        ([casts.CastPrecision(2, "x.0.proj", "exp_avg", 1.0, 0.0, 0.0, 10)], []),  # exclude does nothing for moments
    ):
        assert standing_out(summaries([*run_rows({}), *extra])) == expected
    assert standing_out(found) == [LAYER.format(2)]
    for name in ("transformer.blocks.0.attn.to_q.lora_A.weight", "transformer$$blocks$$0$$attn$$to_q.lora_up.weight"):
        assert layer_of(name) == "blocks.0.attn.to_q"  # of a moment's row
