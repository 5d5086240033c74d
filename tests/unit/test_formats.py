"""Which 8 bits a run gets: what is refused decides about itself alone, `auto` takes the faster; products are stubs."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coat_core.linear import function
from coat_flux.blocks import formats
from coat_flux.blocks.formats import FLUX_SIZES, config_for, linear_sizes
from coat_flux.cli.check import print_weights
from coat_flux.config.coat import COATConfig
from coat_flux.doctor import probes
from coat_flux.plan.speed import card_of, find_card, gain_of_auto
from tests.helpers.format_clock import MS, FormatClock

CUDA = torch.device("cuda", 0)
ROW_WISE = "Rowwise scaling is not currently supported on your device"
Refuses = Callable[[torch.dtype, torch.dtype, bool], bool]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card that is not there")
    monkeypatch.setattr(formats, "try_products_of", lambda *_: None)
    card(monkeypatch)


def card(monkeypatch: pytest.MonkeyPatch, refuses: Refuses = lambda a, b, rows: False, int8: bool = True) -> None:
    """A GPU that refuses some FP8 products; `int8`: it multiplies INT8."""

    def reason(device: torch.device, a: torch.dtype, b: torch.dtype, row_wise: bool) -> str | None:
        return ROW_WISE if refuses(a, b, row_wise) else None

    monkeypatch.setattr(function, "unsupported_reason", reason)
    monkeypatch.setattr(function, "int8_unsupported_reason", lambda _: None if int8 else "no INT8")


def row_wise(a: torch.dtype, b: torch.dtype, rows: bool) -> bool:
    return rows


def fp8(a: torch.dtype, b: torch.dtype, rows: bool) -> bool:
    return True


def products(config: COATConfig) -> tuple[str, str, str]:
    linear = config.linear_config()
    return linear.weight_format, linear.weight_granularity, linear.input_granularity


TENSORS = {"activation": {"linear_granularity": "per_tensor"}}


@pytest.mark.parametrize(
    ("coat", "refuses", "int8", "got"),
    [
        (TENSORS, row_wise, True, ("e4m3", "per_tensor", "per_tensor")),
        ({"weight": {"granularity": "per_row"}}, row_wise, True, ("e4m3", "per_tensor", "per_tensor")),
        ({"weight": {"format": "nvfp4"}}, row_wise, True, ("nvfp4", "per_tensor", "per_tensor")),
        (TENSORS, lambda a, b, rows: not rows, True, ("e4m3", "per_tensor", "per_row")),
        ({}, fp8, True, ("int8", "per_tensor", "per_row")),
        ({}, fp8, False, ("e4m3", "per_tensor", "per_row")),  # bf16: the obstacle stays
        ({"fallback": "bf16"}, fp8, True, ("e4m3", "per_tensor", "per_row")),
        ({"fallback": "error"}, row_wise, True, ("e4m3", "per_tensor", "per_row")),
        ({"weight": {"format": "nvfp4"}}, fp8, True, ("nvfp4", "per_tensor", "per_row")),
        ({}, lambda a, b, rows: a == torch.float8_e5m2 and rows, True, ("e4m3", "per_tensor", "per_tensor")),
    ],
)
def test_a_refusal_decides_about_itself(coat, refuses, int8, got, monkeypatch):
    card(monkeypatch, refuses, int8)
    config = config_for(CUDA, COATConfig.from_dict(coat))
    assert products(config) == got
    assert config_for(CUDA, config) == config
    assert config.fallback == coat.get("fallback", "int8")


def test_a_refused_wgrad_costs_a_trained_weight_that_alone(monkeypatch):
    card(monkeypatch, row_wise)
    asked = COATConfig.from_dict({"activation": {"wgrad_format": "e4m3", "linear_granularity": "per_tensor"}})
    activation = config_for(CUDA, asked).activation
    assert (activation.wgrad_format, activation.linear_granularity, activation.format) == ("bf16", "per_tensor", "e4m3")


# --- auto ---
AUTO = COATConfig.from_dict({"weight": {"format": "auto"}})


@pytest.mark.parametrize(("ms", "taken"), [(1.0, "int8"), (3.0, "e4m3")])
def test_auto_takes_the_faster_and_times_once(ms, taken, monkeypatch, caplog):
    clock = FormatClock(monkeypatch, int8=ms)
    with caplog.at_level(logging.INFO):
        config = config_for(CUDA, AUTO, (64, 32, 128))
    assert (config.weight.format, config.chosen.name) == (taken, taken)
    assert config.activation.format == ("int8" if taken == "int8" else "e4m3")
    assert config.chosen.milliseconds == {"e4m3": 2.0, "int8": ms}
    assert clock.timed[:2] == ["e4m3", "int8"]
    (line,) = caplog.messages
    assert all(text in line for text in ("auto is " + taken, "2.00 ms", f"{ms:.2f} ms", "64 x 32 x 128"))
    clock.timed.clear()
    assert config_for(CUDA, AUTO, (64, 32, 128)).chosen.milliseconds == config.chosen.milliseconds
    assert config_for(CUDA, config) == config
    assert not clock.timed
    config_for(CUDA, AUTO, (64, 64, 256))
    assert clock.timed, "other sizes are timed"


def test_timing_ends_in_time(monkeypatch):
    clock, now = FormatClock(monkeypatch), itertools.count(0.0, 1.0)
    monkeypatch.setattr(formats.time, "monotonic", lambda: next(now))
    config_for(CUDA, AUTO)
    assert len(clock.timed) == 2 * 3


@pytest.mark.parametrize(
    ("refuses", "int8", "got", "why"),
    [
        (fp8, True, "int8", "the only one"),
        (lambda *_: False, False, "e4m3", "the only one"),
        (fp8, False, "e4m3", "no product in 8 bits"),
    ],
)
def test_auto_without_a_choice(refuses, int8, got, why, monkeypatch):
    card(monkeypatch, refuses, int8)
    clock = FormatClock(monkeypatch)
    picked = config_for(CUDA, AUTO).chosen
    assert (picked.name, clock.timed) == (got, [])
    assert picked.why.startswith(why)


def test_nothing_is_timed_where_it_may_not_be(monkeypatch):
    clock = FormatClock(monkeypatch)
    never = COATConfig.from_dict({"weight": {"format": "auto"}, "speed": {"measure": "never"}})
    assert config_for(CUDA, never).weight.format == "e4m3"
    assert config_for(torch.device("cpu"), AUTO).weight.format == "e4m3"
    assert config_for(CUDA, AUTO, None).weight.format == "int8"
    assert config_for(CUDA, COATConfig()).chosen is None
    clock.timed.clear()
    for name in ("e4m3", "int8"):
        saved = {"weight_format": name, "weight_ms": {"e4m3": 5.0, "int8": 4.0}}
        picked = config_for(CUDA, AUTO, (128, 64, 256), saved).chosen
        assert (picked.name, picked.milliseconds) == (name, saved["weight_ms"])
        assert "resumed" in picked.why
    assert not clock.timed


def test_the_first_process_decides_for_all(monkeypatch):
    clock, sent = FormatClock(monkeypatch), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: sent.append(box[0]))
    config_for(CUDA, AUTO, FLUX_SIZES)
    clock.timed.clear()
    clock.ms = {"e4m3": 0.1, "int8": 9.0}
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: box.__setitem__(0, sent[0]))
    config = config_for(CUDA, AUTO, (8, 16, 64))
    assert (config.weight.format, config.chosen.milliseconds, clock.timed) == ("int8", MS, [])


def test_e4m3_says_what_auto_would_gain_by_the_cards_peaks(monkeypatch):
    rtx_4090, h200 = find_card("4090"), find_card("H200")
    assert all(number in gain_of_auto(COATConfig(), rtx_4090) for number in ("660.6", "330.3"))
    in_bf16 = COATConfig.from_dict({"activation": {"use_fp8": False}})
    for config, card in ((COATConfig(), h200), (AUTO, rtx_4090), (in_bf16, rtx_4090)):
        assert gain_of_auto(config, card) == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    assert (card_of(CUDA), card_of(torch.device("cpu"))) == (rtx_4090, None)


def test_doctor_and_check_show_both_times(monkeypatch, capsys):
    FormatClock(monkeypatch)
    monkeypatch.setattr(probes, "_gpus", lambda: [CUDA])
    (line,) = probes.weight_format()
    entry = {"network": {"type": "lora"}, "model": {"name_or_path": "black-forest-labs/FLUX.1-dev"}}
    for weight in ("auto", "e4m3"):
        print_weights({**entry, "coat": {"weight": {"format": weight}}}, "job.yaml")
    (printed,) = capsys.readouterr().out.splitlines()
    for text in (line.text, printed):
        assert all(part in text for part in ("auto is int8", "1.00 ms", "e4m3 2.00 ms"))
    coat = {"weight": {"format": "auto"}, "activation": {"use_fp8": False}}
    print_weights({**entry, "device": "cpu", "coat": coat}, "job.yaml")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(probes, "_gpus", list)
    assert [(line.mark, "e4m3 on a CPU" in line.text) for line in probes.weight_format()] == [(probes.ABSENT, True)]


def test_a_timing_that_fails_ends_no_run(monkeypatch):
    monkeypatch.setattr(formats, "_linear", lambda *_: lambda: 1 / 0)
    config = config_for(CUDA, AUTO)
    assert config.weight.format == "e4m3"
    assert "ZeroDivisionError" in config.chosen.why


def test_auto_with_fallback_error_takes_no_other_scaling(monkeypatch):
    card(monkeypatch, row_wise, int8=False)
    asked = replace(AUTO, fallback="error", activation=replace(AUTO.activation, linear_granularity="per_row"))
    assert config_for(CUDA, asked).activation.linear_granularity == "per_row"
    config = config_for(CUDA, replace(asked, fallback="int8"))
    assert config.activation.linear_granularity == "per_tensor"
    assert config.chosen.refused["e4m3 per_row"] == ROW_WISE


def test_the_sizes_are_the_models_and_the_largest_pictures(tmp_path):
    def sizes(model: str, resolution: Any, batch: int = 1) -> tuple[int, int, int]:
        datasets = [{"folder_path": "x", "resolution": resolution}, {"folder_path": "y", "resolution": 64}]
        model_entry = {"name_or_path": model}
        return linear_sizes({"model": model_entry, "datasets": datasets, "train": {"batch_size": batch}})

    assert sizes("black-forest-labs/FLUX.1-dev", [512, 1024]) == (4608, 3072, 12288)
    assert sizes("black-forest-labs/FLUX.1-dev", [1024], 4) == (4608, 3072, 12288)
    assert sizes("of nobody", 512, 2) == (3072, 3072, 12288)
    (tmp_path / "transformer").mkdir()
    text = json.dumps({"num_attention_heads": 3, "attention_head_dim": 24})
    (tmp_path / "transformer" / "config.json").write_text(text)
    assert sizes(str(tmp_path), 64) == (528, 80, 320)


def test_what_is_timed_runs_both_products():
    for name in ("e4m3", "int8"):
        formats._linear(torch.device("cpu"), COATConfig().with_weights_in(name).linear_config(), (32, 64, 256))()
