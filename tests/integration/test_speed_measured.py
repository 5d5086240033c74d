"""The start-up measurement on a real model: it runs, it is told, and training goes on as with that path asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_flux.blocks import measure as pick
from coat_flux.blocks.runner import BlockRunner
from coat_flux.trainers.standalone.network import lora_parameters
from tests.helpers.asserts import assert_bitwise
from tests.helpers.flux import coat_flux_model, flux_inputs

KEPT = {"memory": {"checkpointing": "none"}}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def gradients(coat: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    model, _, _ = coat_flux_model({**KEPT, **coat})
    model(**flux_inputs())[0].float().square().mean().backward()
    return {n: p.grad for n, p in lora_parameters(model).items()}, BlockRunner.of(model)


@pytest.mark.parametrize("fastest", ["per_row", "bf16"])
def test_the_run_goes_on_with_the_path_that_was_fastest(
    fastest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current: list[str] = []
    set_gemm = pick.GemmPick.set
    monkeypatch.setattr(pick.GemmPick, "set", lambda self, gemm: (current.append(gemm), set_gemm(self, gemm)))
    monkeypatch.setattr(pick, "timed", lambda once, device: (once(), 1.0 if current[-1] == fastest else 2.0)[1])
    with caplog.at_level(logging.INFO, logger="coat_flux"):
        asked = {"activation": {"linear_granularity": "per_tensor"}}
        found, blocks = gradients({"speed": {"measure": "always"}, **asked})
    assert blocks.picked.name == fastest
    assert f"execution: {fastest} GEMM 4.0 ms (fastest, measured in" in caplog.text  # four blocks of 1 ms
    exclude = {"exclude": ["*"]} if fastest == "bf16" else {"linear_granularity": fastest}
    expected, _ = gradients({"speed": {"measure": "never"}, "activation": exclude})
    for name, gradient in expected.items():
        assert_bitwise(found[name], gradient)


def test_nothing_is_measured_while_an_image_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = coat_flux_model({**KEPT, "speed": {"measure": "always"}})
    blocks = BlockRunner.of(model)
    with torch.no_grad():
        model(**flux_inputs())
    assert blocks.picked is None
    model(**flux_inputs())
    assert blocks.picked is not None
    assert set(blocks.picked.milliseconds) == {"per_row", "bf16"}
