"""The start-up pick of a GEMM: never coarser than asked, the fastest measured, within its budget, remembered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import pytest
import torch
from torch import nn

from coat_core import FP8Linear
from coat_flux.blocks import measure as cache
from coat_flux.blocks import measure as pick
from coat_flux.blocks.measure import GemmPick
from coat_flux.config.coat import COATConfig

HIDDEN = 32
MS = {"per_tensor": 3.0, "per_row": 2.0, "bf16": 5.0}


class Double(nn.Module):
    """A block with one FP8 linear and one that the config leaves in bf16."""

    def __init__(self, config: COATConfig) -> None:
        super().__init__()
        plain = COATConfig.from_dict({"activation": {"use_fp8": False}}).linear_config()
        self.linear = FP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN), config.linear_config())
        self.excluded = FP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN), plain)
        self.lora = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return text * self.lora, self.excluded(self.linear(hidden))


class Single(Double):
    pass


class OfOneStream(Double):
    """As the single blocks of a model that hands them other arguments."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return self.excluded(self.linear(both)) * self.lora


@pytest.fixture(autouse=True)
def _cache(tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def config_of(**coat: Any) -> COATConfig:
    return COATConfig.from_dict({"speed": {"measure": "always"}, **coat})


class Bench:
    """Blocks whose time is a table's: the clock is replaced, the passes run."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: COATConfig,
        pass_s: float = 0.1,
    ) -> None:
        self.blocks = {"a.0": Double(config), "b.0": Single(config), "b.1": Single(config)}
        self.runs: list[tuple[type, str]] = []
        self.now = 0.0
        self.args = (torch.randn(1, 6, HIDDEN), torch.randn(1, 4, HIDDEN))
        self.pick = GemmPick(self.blocks, config, self.form_of)
        self._pass_s = pass_s
        monkeypatch.setattr(pick, "timed", self.timed)
        monkeypatch.setattr(pick.time, "monotonic", lambda: self.now)

    def gemm(self) -> str:
        own = self.blocks["a.0"].linear.config
        return own.input_granularity if own.use_fp8_gemm else "bf16"

    def form_of(self, block: nn.Module) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs.append((type(block), self.gemm()))
            self.now += self._pass_s
            return block(*args)

        return run

    def timed(self, once: Callable[[], None], device: torch.device) -> float:
        once()
        return MS[self.runs[-1][1]]


def test_candidates_are_at_least_as_precise_as_asked() -> None:
    def gemms(**activation: Any) -> list[str]:
        return list(pick.candidates(config_of(activation=activation)))

    assert gemms() == ["per_row", "bf16"]
    assert gemms(linear_granularity="per_tensor") == ["per_tensor", "per_row", "bf16"]
    assert gemms(use_fp8=False) == ["bf16"]


def test_a_resumed_gemm_is_taken_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, config_of())
    bench.pick.keep("bf16")
    assert (bench.pick.choose(bench.args).name, bench.gemm(), bench.runs) == ("bf16", "bf16", [])


def test_the_fastest_is_taken_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, config_of(activation={"linear_granularity": "per_tensor"}))
    picked = bench.pick.choose(bench.args)
    assert picked.name == bench.gemm() == "per_row"
    assert picked.milliseconds == {"per_tensor": 9.0, "per_row": 6.0, "bf16": 15.0}
    assert picked.describe("", 1).startswith(" 6.0 ms (fastest, measured in")
    assert "per_tensor 9.0 ms" in picked.describe("", 1)


def test_excluded_linears_stay_in_bf16_and_fp8_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    bench = Bench(monkeypatch, config)
    for gemm in ("bf16", "per_row", "per_tensor"):
        bench.pick.set(gemm)
        assert bench.gemm() == gemm
        assert all(not block.excluded.config.use_fp8_gemm for block in bench.blocks.values())


def test_nothing_of_the_run_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, config_of())
    before, state = [x.clone() for x in bench.args], torch.get_rng_state()
    bench.pick.choose(bench.args)
    assert all(torch.equal(x, copy) and not x.requires_grad for x, copy in zip(bench.args, before, strict=True))
    assert all(p.grad is None for block in bench.blocks.values() for p in block.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_blocks_that_take_other_arguments_than_the_first_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, config_of())
    bench.blocks["c.0"] = OfOneStream(config_of())
    bench.pick = GemmPick(bench.blocks, config_of(), bench.form_of)
    assert bench.pick.choose(bench.args).milliseconds
    assert {kind for kind, _ in bench.runs} == {Double, Single}


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of two seconds: one candidate uses up the budget."""
    bench = Bench(monkeypatch, config_of(), pass_s=4.0)
    picked = bench.pick.choose(bench.args)
    assert list(picked.milliseconds) == ["per_row"]
    assert picked.name == "per_row"


def test_the_second_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Bench(monkeypatch, config_of())
    expected = first.pick.choose(first.args)
    second = Bench(monkeypatch, config_of())
    picked = second.pick.choose(second.args)
    assert (picked.name, picked.milliseconds, second.runs) == (expected.name, expected.milliseconds, [])
    assert "measured earlier" in picked.describe("", 1)
    other = Bench(monkeypatch, config_of())
    other.pick.choose((torch.randn(1, 8, HIDDEN), other.args[1]))
    assert other.runs, "another shape is measured"


@pytest.mark.parametrize("content", ["", '{"x": 3}'])
def test_a_broken_cache_costs_a_measurement(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    cache.cache_file().parent.mkdir(parents=True)
    cache.cache_file().write_text(content)
    bench = Bench(monkeypatch, config_of())
    assert bench.pick.choose(bench.args).name == "per_row"
    assert len(json.loads(cache.cache_file().read_text())) == 1


@pytest.mark.parametrize(
    ("coat", "why"),
    [
        ({"speed": {"measure": "never"}}, "speed.measure: never"),
        ({"speed": {"measure": "auto"}}, "nothing is measured on a cpu"),
        ({"activation": {"use_fp8": False}, "speed": {"measure": "always"}}, "the only one"),
    ],
)
def test_as_written_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, coat: dict[str, Any], why: str) -> None:
    bench = Bench(monkeypatch, COATConfig.from_dict(coat))
    picked = bench.pick.choose(bench.args)
    assert (bench.runs, picked.milliseconds) == ([], {})
    assert why in picked.describe("", 1)


def test_a_cached_answer_of_another_config_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    coats = ({}, {"activation": {"linear_granularity": "per_tensor"}}, {"weight": {"granularity": "per_row"}})
    benches = [Bench(monkeypatch, config_of(**coat)) for coat in coats]
    keys = [
        cache.key_of(bench.args, bench.blocks.values(), config_of(**coat))
        for bench, coat in zip(benches, coats, strict=True)
    ]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
