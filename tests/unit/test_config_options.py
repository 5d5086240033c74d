"""Every row of the option table: what it accepts, where the value lands, and how it refuses."""

from __future__ import annotations

from functools import reduce

import pytest

from coat_core.formats import M1_FORMATS, M2_FORMATS
from coat_flux.config.coat import BY_KEY, OPTIONS, COATConfig, markdown_table
from coat_flux.config.findings import ConfigError
from coat_flux.config.options import Option, OptionError, to_plain

# SPEC section 2, written out once more: key -> default.
SPEC_DEFAULTS = {
    "enabled": True,
    "include": ("*",),
    "exclude": (),
    "optimizer.use_fp8": True,
    "optimizer.use_fp8_m1": True,
    "optimizer.use_fp8_m2": True,
    "optimizer.m1_format": "e4m3",
    "optimizer.m2_format": "e4m3",
    "optimizer.block_size": 128,
    "optimizer.use_dynamic_range_expansion": True,
    "optimizer.stochastic_rounding": False,
    "optimizer.moment_rounding": "stochastic",
    "optimizer.offload": "none",
    "weight.use_fp8": True,
    "weight.format": "e4m3",
    "weight.granularity": "per_tensor",
    "activation.use_fp8": True,
    "activation.format": "e4m3",
    "activation.grad_format": "e5m2",
    "activation.wgrad_format": "bf16",
    "activation.linear_granularity": "per_row",
    "activation.nonlinear_granularity": "per_group",
    "activation.group_size": 128,
    "activation.attention": "fp8",
    "activation.flow": "fused",
    "activation.include": ("*",),
    "activation.exclude": (),
    "activation.min_sqnr_db": None,
    "memory.enable_efficient_checkpoint": True,
    "memory.checkpointing": "auto",
    "memory.budget_gb": None,
    "memory.log_memory_stats": True,
    "memory.transposed_weights": "auto",
    "memory.stream_blocks": 0,
    "memory.log_every": 100,
    "speed.cuda_graphs": "auto",
    "speed.measure": "auto",
    "speed.attention": "auto",
    "data.background": "white",
    "data.transparency": "background",
    "guard.enabled": True,
    "resume.allow": (),
    "fallback": "int8",
}
GOOD = {
    "optimizer.block_size": [16, 48, 128, 4096],
    "include": [["*.attn.*"], []],
    "exclude": [["x"], []],
    "activation.include": [["*"], ["transformer_blocks.*.attn.to_q", "single*"], []],
    "activation.exclude": [["x"], []],
    "activation.min_sqnr_db": [None, 20, 27.5],
    "memory.budget_gb": [None, 24, 0.5, 79.6],
    "memory.stream_blocks": [0, 3, "auto", "all"],
    "memory.log_every": [1, 500],
    "data.background": ["white", "grey", "#f0e1d2"],
    "resume.allow": [[], ["data", "seed", "world_size"]],
}
BAD = {
    "bool": [("true", "must be true or false; "), (1, "must be true or false; "), (None, "has no value")],
    "choice": [(True, "must be one of "), ("zzz", "must be one of "), (None, "has no value, must be one of ")],
    "int": [
        ("128", "write 128 without quotes"),
        (128.0, "write 128"),
        (True, "must be a whole number"),
        (0, "must be a whole number"),
        (float("nan"), "must be a whole number"),
        (None, "has no value"),
    ],
    "float": [("24", "24 without quotes"), (0, "above 0"), (float("inf"), "above 0"), (10**400, "above 0")],
    "colour": [("#fff", "must be a colour"), ([255, 255, 255], "must be a colour"), (None, "has no value")],
    "blocks": [("al", "must be auto, all, or a whole number"), (-1, "of at least 0"), (True, "a whole number")],
    "strings": [("attn.*", "write ['attn.*']"), (["a", 1], "1 is not a string"), ([""], "'' is not a string")],
}


def good_values(option: Option) -> list:
    if option.key in GOOD:
        return GOOD[option.key]
    return [True, False] if option.kind == "bool" else list(option.choices)


def block_with(key: str, value: object) -> dict:
    *parents, leaf = key.split(".")
    block = {leaf: value}
    for parent in reversed(parents):
        block = {parent: block}
    return block


def value_at(config: COATConfig, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def cases(values_of) -> list:
    return [pytest.param(o.key, v, id=f"{o.key}={v}") for o in OPTIONS for v in values_of(o)]


def test_defaults_are_the_spec_s():
    assert {option.key: option.default for option in OPTIONS} == SPEC_DEFAULTS


def test_the_dataclasses_have_exactly_the_table_s_keys_and_defaults():
    tree = to_plain(COATConfig())
    leaves = {}
    for key, value in tree.items():
        leaves.update({f"{key}.{leaf}": v for leaf, v in value.items()} if isinstance(value, dict) else {key: value})
    assert leaves == {k: list(v) if isinstance(v, tuple) else v for k, v in SPEC_DEFAULTS.items()}


@pytest.mark.parametrize(("key", "value"), cases(good_values))
def test_every_allowed_value_lands_in_its_field(key, value):
    block = block_with(key, value)
    if (key, value) == ("weight.format", "e5m2"):
        block["activation"] = {"grad_format": "e4m3"}  # no GPU multiplies e5m2 by e5m2
    if value == "int8":  # on both sides of a product
        block = {"weight": {"format": "int8"}, "activation": {"format": "int8", **block.get("activation", {})}}
    parsed = value_at(COATConfig.from_dict(block), key)
    assert parsed == (tuple(value) if isinstance(value, list) else value)
    assert not isinstance(value, bool) or parsed is value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [pytest.param(o.key, v, m, id=f"{o.key}={v!s:.20}") for o in OPTIONS for v, m in BAD[o.kind]],
)
def test_every_bad_value_is_refused_with_file_key_value_and_remedy(key, value, message):
    with pytest.raises(ConfigError) as caught:
        COATConfig.from_dict(block_with(key, value), file="run.yaml", key_path="config.process[0].coat")
    (line,) = caught.value.findings
    assert line.startswith(f"run.yaml: config.process[0].coat.{key}=")
    assert message in line
    assert "; " in line


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("optimizer.m1_format", "E4M3", "e4m3"),
        ("optimizer.m2_format", "e5m2fn", "e5m2"),
        ("optimizer.m1_format", "int8-ratio", "int8_ratio"),
        ("optimizer.m2_format", "uint8log", "uint8_log"),
        ("activation.linear_granularity", "per-row", "per_row"),
        ("activation.attention", "FP8", "fp8"),
        ("memory.checkpointing", "al", "all"),
        ("fallback", "Error", "error"),
    ],
)
def test_a_choice_that_is_nearly_right_is_named(key, value, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'\\?"):
        COATConfig.from_dict(block_with(key, value))


@pytest.mark.parametrize("size", [8, 17, 24, 4097, 4112])
def test_block_size_is_a_multiple_of_16_from_16_to_4096(size):
    with pytest.raises(ConfigError, match=f"block_size={size}: must be a whole number from 16 to 4096 and a multiple"):
        COATConfig.from_dict({"optimizer": {"block_size": size}})


def test_a_known_value_that_cannot_be_had_is_refused_with_its_reason():
    option = Option(
        "format", "e4m3", "choice", "", choices=("e4m3", "e3m4"), refused=(("e3m4", "comes later; write e4m3"),)
    )
    assert option.parse("e4m3") == "e4m3"
    with pytest.raises(OptionError, match="comes later; write e4m3"):
        option.parse("e3m4")


def test_the_readme_table_has_one_row_for_each_option_with_its_default_first():
    header, rule, *rows = markdown_table().splitlines()
    assert header == "| key | values (default first) | effect |"
    assert rule == "|---|---|---|"
    assert [row.split("`")[1] for row in rows] == list(BY_KEY)
    shown = {row.split("`")[1]: row.split(" | ")[1] for row in rows}
    assert shown["optimizer.stochastic_rounding"] == "false, true"
    assert shown["activation.grad_format"] == "e5m2, e4m3, int8, bf16"
    assert shown["activation.include"].startswith('["*"];')
    assert shown["memory.budget_gb"].startswith("null;")
    assert shown["optimizer.block_size"] == "128; a whole number from 16 to 4096 and a multiple of 16"


def test_the_moments_formats_are_those_of_the_optimizer():
    assert BY_KEY["optimizer.m1_format"].choices == tuple(M1_FORMATS)
    assert BY_KEY["optimizer.m2_format"].choices == tuple(M2_FORMATS)


INTEGER_MOMENTS = {"m1_format": "int8_ratio", "m2_format": "uint8_log"}


def test_expansion_that_would_have_no_effect_is_refused_where_it_is_written():
    with pytest.raises(ConfigError) as caught:
        COATConfig.from_dict({"optimizer": {**INTEGER_MOMENTS, "use_dynamic_range_expansion": True}}, file="run.yaml")
    assert caught.value.findings == (
        "run.yaml: coat.optimizer.use_dynamic_range_expansion=true: expands blocks of e4m3 and e5m2, not of int8_ratio "
        "and uint8_log; remove it",
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        INTEGER_MOMENTS,
        {**INTEGER_MOMENTS, "use_dynamic_range_expansion": False},
        {"m1_format": "int8_ratio", "use_dynamic_range_expansion": True},
        {"m2_format": "uint8_log"},
    ],
)
def test_integer_formats_are_taken_and_read_back(optimizer):
    config = COATConfig.from_dict({"optimizer": optimizer})
    stored, _ = config.optimizer_config()
    assert (stored.m1_format, stored.m2_format) == (config.optimizer.m1_format, config.optimizer.m2_format)
    assert COATConfig.from_dict(config.to_dict()) == config
