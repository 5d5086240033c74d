"""The benchmark's arithmetic and limits against published counts of FLUX.1-dev."""

from __future__ import annotations

import pytest

from coat_flux.bench.flops import Geometry, Work, forward_work, product_work, step_work, token_count
from coat_flux.bench.limits import DEVICE_NAMES, GB_PER_SECOND, Limit, known_limit
from coat_flux.bench.optimizers import lora_shapes
from coat_flux.mini_flux.geometry import make_flux_dev_geometry
from coat_flux.plan.facts import CARDS
from coat_flux.trainers.standalone.network import lora_targets
from tests.tolerances import ANCHOR_TIME_RTOL

FLUX = Geometry()
H200 = Limit(989.4, 1978.9, 4800.0, "test")
# least milliseconds of an H200, batch 1, rank 16: forward, step, step with full recomputation
BF16_MS = {512: (21.9, 46.4, 68.2), 768: (42.6, 94.0, 136.6), 1024: (75.6, 174.2, 249.8)}
FP8_MS = {512: (11.8, 26.3, 38.2), 768: (24.3, 57.2, 81.5), 1024: (45.5, 114.1, 159.6)}


@pytest.mark.parametrize(
    ("resolution", "tokens", "linear", "attention"),
    [(512, 1536, 19.83, 1.65), (768, 2816, 36.35, 5.55), (1024, 4608, 59.49, 14.87)],
)
def test_forward_operations(resolution: int, tokens: int, linear: float, attention: float) -> None:
    work = forward_work(FLUX, resolution, 1)
    assert token_count(resolution) == tokens
    assert work.linear / 1e12 == pytest.approx(linear, abs=0.005)
    assert work.attention / 1e12 == pytest.approx(attention, abs=0.005)
    assert work.linear / tokens == pytest.approx(12.910e9, rel=1e-4)
    assert work.adapters / work.linear == pytest.approx(0.0075, abs=5e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_least_times(resolution: int, fp8: bool) -> None:
    works = (
        forward_work(FLUX, resolution, 1),
        step_work(FLUX, resolution, 1, recomputed=False),
        step_work(FLUX, resolution, 1, recomputed=True),
    )
    found = [H200.milliseconds(work, fp8_linears=fp8) for work in works]
    assert found == pytest.approx((FP8_MS if fp8 else BF16_MS)[resolution], rel=ANCHOR_TIME_RTOL)


def test_blocks_add_up_and_batches_multiply() -> None:
    double, single = (forward_work(size, 768, 1) for size in (FLUX.one_double, FLUX.one_single))
    whole = forward_work(FLUX, 768, 1)
    assert 19 * double.linear + 38 * single.linear == whole.linear
    assert 19 * double.adapters + 38 * single.adapters == whole.adapters
    assert forward_work(FLUX, 768, 4).total == 4 * whole.total
    assert product_work(1536, 3072, 12288) == Work(linear=2.0 * 1536 * 3072 * 12288)


def test_cards_are_matched_by_their_whole_name() -> None:
    found = known_limit("NVIDIA H200")
    assert found is not None
    assert (found.bf16_tflops, found.fp8_tflops, found.gb_per_second) == (989.4, 1978.9, 4800.0)
    assert known_limit("NVIDIA H200 NVL") is None
    assert known_limit("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert set(DEVICE_NAMES.values()) == set(GB_PER_SECOND) <= {card.name for card in CARDS}


def test_lora_shapes_are_those_of_the_models_linears() -> None:
    size = Geometry(1, 1, 2, 4)
    model = make_flux_dev_geometry("meta", num_layers=1, num_single_layers=1, num_attention_heads=2)
    linears = [model.get_submodule(name) for name in lora_targets(model)]
    expected = [shape for one in linears for shape in ((4, one.in_features), (one.out_features, 4))]
    assert sorted(lora_shapes(size)) == sorted(expected)
    shapes = lora_shapes(FLUX)
    assert len(shapes) == 988
    assert sum(a * b for a, b in shapes) / 16 == pytest.approx(5.37e6, rel=1e-3)
