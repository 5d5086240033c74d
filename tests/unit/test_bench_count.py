"""How many launches a step takes, held; and what the step model makes of them."""

import functools
import json
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from coat_flux.bench import limits
from coat_flux.bench.count import MODULATION, OUTSIDE, UPDATE, Recorder, count_step
from coat_flux.bench.runner import COUNT, named
from coat_flux.cli import main
from coat_flux.config.coat import COATConfig
from coat_flux.plan.speed import MODELLED, Card
from tests.helpers.kernel_cases import launcher_modules

pytestmark = pytest.mark.triton

# Launches of one block, and of what a step does once. A change that adds some fails here; one that saves some lowers
# the number. `coat-flux bench --level count --verbose` lists them.
HELD = {
    "double forward": 34,
    "double backward": 77,
    "single forward": 11,
    "single backward": 25,
    OUTSIDE: 140,
    MODULATION: 99,
    UPDATE: 108,  # two of them draw for moments that are rounded at random
}
HELD_STEP = 3_825
HELD_MS = 80.9  # at 512 px on an H200, modelled
HELD_MS_BY_BYTES = 74.8  # the same without instructions
PRODUCTS = {"double": 8, "single": 2}  # FP8 GEMMs of a block in each direction


@functools.cache
def counted(name: str) -> Recorder:
    return count_step(COATConfig.from_dict(dict(named(COUNT)[name].coat or {})), limits.Geometry(), 512)


@pytest.fixture
def step() -> Recorder:
    return counted("coat_transposed")


def test_a_step_has_no_more_launches_than_before(step):
    found: Counter[str] = Counter()
    for launch in step.launches:
        found[launch.region] += launch.count
    assert set(HELD) < set(found)
    more = {region: (found[region], held) for region, held in HELD.items() if found[region] > held}
    assert not more, f"launches (found, held): {more}"
    assert sum(count * step.times.get(region, 1) for region, count in found.items()) <= HELD_STEP


def test_int8_takes_the_launches_and_bytes_of_fp8(step):
    config = COATConfig.from_dict(dict(named(COUNT)["coat_transposed"].coat or {})).with_weights_in("int8")
    sums = []
    for each in (step, count_step(config, limits.Geometry(), 512)):
        times = [each.times.get(launch.region, 1) for launch in each.launches]
        launches = sum(launch.count * n for launch, n in zip(each.launches, times, strict=True))
        size = sum(launch.bytes * n for launch, n in zip(each.launches, times, strict=True))
        sums.append((launches, size, sum(x.flops for x in each.launches if x.kind in ("fp8", "int8"))))
    (launches, size, flops), in_int8 = sums
    assert in_int8[0] <= 1.05 * launches
    assert in_int8[1] <= 1.01 * size
    assert in_int8[2] == flops


def test_a_step_is_modelled_to_take_no_longer(step):
    card = MODELLED["h200"]
    ms = by_bytes = 0.0
    for x in step.launches:
        times = step.times.get(x.region, 1)
        without = limits.kernel_ms(card, x.bytes, x.flops, x.kind, x.shape, x.count)
        by_bytes += without * times
        ms += max(without, limits.issue(card, x.launched)[0] if x.launched is not None else 0.0) * times
    assert ms <= HELD_MS
    assert by_bytes <= HELD_MS_BY_BYTES


@pytest.mark.parametrize("name", named(COUNT))
def test_every_kernel_of_a_step_has_its_instructions(name):
    """If not: `python scripts/compile_kernels.py --instructions extensions/coat_flux/bench/instructions.tsv`."""
    launches = [(x.part, x.launched) for x in counted(name).launches if x.launched is not None]
    assert len({part for part, _ in launches}) > 15
    assert {part for part, launched in launches if limits.key_of(launched) not in limits.ROWS} == set()
    fewest = min(limits.issue(MODELLED["h200"], launched)[1] for _, launched in launches)
    assert fewest >= 4, "a program has four warps"


def test_instructions_are_of_the_kernels_as_they_are():
    """If not: `python scripts/compile_kernels.py --instructions extensions/coat_flux/bench/instructions.tsv`."""
    kernels = {name: value for module in launcher_modules() for name, value in vars(module).items()}
    digests = {name: limits.source_digest(kernels[name]) for name in {name for name, _ in limits.ROWS}}
    assert {name for (name, _), row in limits.ROWS.items() if row["source"] != digests[name]} == set()


def test_a_launch_issues_what_its_row_says(monkeypatch):
    def kernel() -> None: ...

    kernel.arg_names = ["x", "K", "BLOCK"]
    launched = kernel, (10, 2), (torch.empty(0), 100), {"BLOCK": 32}
    for card in MODELLED.values():
        assert limits.issue(card, launched) == (limits.LAUNCH_MS, 0)
        row = {"once": "300", "each": "50", "trips": "K/BLOCK", "warps": "4", "resident": "12"}
        with monkeypatch.context() as patch:
            patch.setitem(limits.ROWS, limits.key_of(launched), row)
            a_second = card.multiprocessors * limits.ISSUED * limits.ISSUE_SHARE * card.clock_ghz * 1e9
            expected = (300 + 50 * 4) * 4 * 20 / a_second * 1e3
            assert limits.issue(card, launched) == (pytest.approx(limits.LAUNCH_MS + expected), 12)
    other = kernel, (10, 2), (torch.empty(0), 1), {"BLOCK": 32}  # a 1 is a constant of the machine code
    assert len({limits.key_of(launched), limits.key_of(other), limits.key_of((kernel, (1,), *launched[2:]))}) == 2


def test_every_linear_multiplies_in_fp8_once_in_each_direction(step):
    found = Counter(launch.region for launch in step.launches if launch.part == "_scaled_mm")
    assert found == {region: PRODUCTS[region.split()[-2]] for region in step.times}
    d, rows = limits.Geometry().heads * limits.HEAD_DIM, 1024 + 512
    single = sum(x.flops for x in step.launches if x.part == "_scaled_mm" and x.region == "single forward")
    assert single == 2 * rows * 12 * d * d


def test_the_host_reads_loss_and_norm_and_nothing_else(step):
    assert step.reads == {UPDATE: 1}


def test_a_launch_takes_the_longer_of_memory_and_arithmetic():
    card = Card(
        1, "", 100.0 / limits.RATE_SHARES["bf16"], gb_per_second=1000.0 / limits.BANDWIDTH_SHARE, multiprocessors=132
    )
    assert limits.kernel_ms(card, 2e9, 0.0, "", None) == pytest.approx(2.0 + limits.LAUNCH_MS)
    assert set(MODELLED) == {"h100", "h200", "rtx3090", "rtx4090", "rtx5090"}
    full = (128 * 132, 256, 64)
    assert limits.kernel_ms(card, 1.0, 5e11, "bf16", full) == pytest.approx(5.0 + limits.LAUNCH_MS)
    one_tile_more = (128 * 133, 256, 64)
    ms = limits.kernel_ms(card, 1.0, 5e11 * 133 / 132, "bf16", one_tile_more)
    assert ms == pytest.approx(2 * 5.0 * 3 / 4 / 0.9 + limits.LAUNCH_MS)


def test_the_command_writes_count_json(tmp_path, capsys):
    small = ["--double", "1", "--single", "1", "--heads", "2", "--rank", "4", "--resolution", "64"]
    assert main(["bench", "--level", "count", *small, "--verbose", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| FP8 GEMM |" in shown
    assert "_qkv_rope_fwd_kernel" in shown
    assert "not counted" in shown  # kernels of other widths
    found = json.loads((tmp_path / "count.json").read_text(encoding="utf-8"))["h200"]["64"]
    for name in ("coat", "bf16_compile"):
        row = found[name]
        assert row["launches"] == sum(part["launches"] for part in row["by_category"].values())
        assert row["modelled_ms"] == pytest.approx(sum(part["modelled_ms"] for part in row["by_category"].values()))
        assert row["host_ops"] > 0
    assert found["coat"]["by_kernel"]["_qkv_rope_fwd_kernel"]["resident_warps"] == 0
    once = sum(found["coat"]["by_category"][name]["launches"] for name in (OUTSIDE, UPDATE))
    assert found["coat"]["blocks"]["launches"] == found["coat"]["launches"] - once
    assert found["coat"]["by_category"]["FP8 GEMM"]["launches"] == 2 * (8 + 2)
    assert "FP8 GEMM" not in found["bf16_compile"]["by_category"]
