"""The `coat:` block: what each option accepts and refuses, combinations, and what the numerics get."""

from functools import partial, reduce
from typing import Any

import pytest

from coat_core.config import ExpansionConfig, FP8LinearConfig, FP8QuantizationConfig
from coat_flux.config.coat import BY_KEY, OPTIONS, COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.options import REMOVED

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
    "speed.kernels_left_out": [[], ["gated_sum", "qkv_rope"]],
    "data.background": ["white", "grey", "#f0e1d2"],
    "resume.allow": [[], ["data", "seed", "world_size"]],
}
BAD = {
    "bool": [("true", "true or false"), (1, "true or false"), (None, "has no value")],
    "choice": [(True, "must be one of"), ("zzz", "must be one of"), (None, "has no value")],
    "int": [("128", "without quotes"), (128.0, "a whole number"), (True, "a whole number"), (0, "a whole number")],
    "float": [("24", "without quotes"), (0, "above 0"), (float("inf"), "above 0"), (10**400, "above 0")],
    "colour": [("#fff", "a colour"), ([255, 255, 255], "a colour"), (None, "has no value")],
    "blocks": [("al", "auto, all, or a whole number"), (-1, "of at least 0"), (True, "a whole number")],
    "strings": [("attn.*", "a list of strings"), (["a", 1], "a list of strings"), ([""], "a list of strings")],
}


def block_with(key: str, value: object) -> dict[str, Any]:
    parent, _, leaf = key.rpartition(".")
    return {parent: {leaf: value}} if parent else {leaf: value}


def findings(block: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        COATConfig.from_dict(block, file="f.yaml")
    return str(caught.value).splitlines()


def test_an_empty_block_has_every_default():
    """The defaults themselves are those of docs/options.md, by tests/architecture/test_readme.py."""
    assert all(reduce(getattr, key.split("."), COATConfig()) == option.default for key, option in BY_KEY.items())
    for block in (None, {}, {"optimizer": None, "memory": {}}):
        assert COATConfig.from_dict(block) == COATConfig()
    assert COATConfig.from_dict({"fallback": "error"}).linear_config() == FP8LinearConfig(fallback="error")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_every_allowed_value_lands_in_its_field(option):
    usual = [True, False] if option.kind == "bool" else option.choices
    for value in GOOD.get(option.key, usual):
        block = block_with(option.key, value)
        if (option.key, value) == ("weight.format", "e5m2"):
            block["activation"] = {"grad_format": "e4m3"}  # no GPU multiplies e5m2 by e5m2
        if value == "int8":  # on both sides of a product
            block = {"weight": {"format": "int8"}, "activation": {"format": "int8", **block.get("activation", {})}}
        parsed = reduce(getattr, option.key.split("."), COATConfig.from_dict(block))
        assert parsed == (tuple(value) if isinstance(value, list) else value)
        assert isinstance(parsed, bool) == isinstance(value, bool)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_every_bad_value_is_refused_with_file_key_value_and_remedy(option):
    for value, rule in BAD[option.kind]:
        (line,) = findings(block_with(option.key, value))
        assert line.startswith(f"f.yaml: coat.{option.key}=")
        assert rule in line
        assert "; " in line


def test_a_key_without_a_near_one_names_all_also_of_a_disabled_block():
    lines = findings({"enabled": False, "weight": {"zzz": 1}, "optimizer.block_size": 64, None: 2})
    assert lines[0] == "f.yaml: coat.weight.zzz: unknown key; known here: format, granularity, use_fp8"
    assert lines[1].endswith("did you mean 'optimizer: {block_size: …}'?")
    assert lines[2].startswith("f.yaml: coat.None: unknown key")


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_is_named_with_what_replaces_it(name):
    key, _, value = name.partition("=")
    (line,) = findings(block_with(key, value or True))
    assert line.startswith(f"f.yaml: coat.{key}=")
    assert line.endswith(REMOVED[name])
    assert "; write " in line or "; remove" in line


INT8, NVFP4, E5M2 = {"format": "int8"}, {"weight": {"format": "nvfp4"}}, {"weight": {"format": "e5m2"}}
INTEGER_MOMENTS, EXPANSION = {"m1_format": "int8_ratio", "m2_format": "uint8_log"}, "use_dynamic_range_expansion"
EXCLUDED: list[tuple[dict[str, Any], str, str]] = [  # a block, the key that is refused, a word of its remedy
    ({"memory": {"checkpointing": "none", "budget_gb": 24}}, "memory.budget_gb=24", "checkpointing: auto"),
    ({"memory": {"stream_blocks": 2, "transposed_weights": "always"}}, "memory.transposed_weights='always'", "auto"),
    ({"weight": {"format": "nvfp4", "granularity": "per_row"}}, "weight.granularity='per_row'", "remove it"),
    ({"weight": INT8}, "activation.format: ", "write int8"),
    ({"activation": INT8}, "activation.format='int8'", "write int8 there too"),
    ({"weight": INT8, "activation": {**INT8, "grad_format": "e5m2"}}, "activation.grad_format='e5m2'", "write one"),
    ({"weight": {**INT8, "use_fp8": False}, "activation": INT8}, "weight.format='int8'", "weight.use_fp8: true"),
    ({"activation": {"use_fp8": False, "min_sqnr_db": 20}}, "activation.min_sqnr_db=20", "write null"),
    ({"resume": {"allow": ["data", "sead"]}}, "resume.allow='sead'", "'seed'"),
    ({"speed": {"kernels_left_out": ["gated_sun"]}}, "speed.kernels_left_out='gated_sun'", "'gated_sum'"),
    ({"optimizer": {**INTEGER_MOMENTS, EXPANSION: True}}, "optimizer.use_dynamic_range_expansion=true", "remove it"),
    ({"weight": {"format": "auto"}, "activation": INT8}, "activation.format='int8'", "write int8 there"),
    # no GPU multiplies e5m2 by e5m2
    (E5M2, "weight.format='e5m2'", "or activation.grad_format: e4m3"),
    ({**E5M2, "activation": {"format": "e5m2", "grad_format": "e4m3"}}, "weight.format='e5m2'", "activation.format"),
]


@pytest.mark.parametrize(("block", "key", "remedy"), EXCLUDED)
def test_what_excludes_each_other_is_refused(block, key, remedy):
    (line,) = findings(block)
    assert line.startswith(f"f.yaml: coat.{key}")
    assert remedy in line.rpartition("; ")[2]


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"enabled": False, "fallback": "error", "activation": {"exclude": ["a.*"]}},
        NVFP4,
        {"weight": {"format": "auto"}},
        {"weight": INT8, "activation": {**INT8, "grad_format": "bf16"}},
        {"activation": {"format": "e5m2"}},
        {**E5M2, "activation": {"use_fp8": False}},
        {"optimizer": INTEGER_MOMENTS},
        {"optimizer": {**INTEGER_MOMENTS, EXPANSION: False}},
        {"optimizer": {"m1_format": "int8_ratio", EXPANSION: True}},
    ],
)
def test_to_dict_holds_every_option_and_reads_back(block):
    config = COATConfig.from_dict(block)
    tree = config.to_dict()
    assert COATConfig.from_dict(tree) == config
    assert set(tree) == {option.key.split(".")[0] for option in OPTIONS}
    stored, _ = config.optimizer_config()
    assert (stored.m1_format, stored.m2_format) == (config.optimizer.m1_format, config.optimizer.m2_format)


def test_the_optimizer_gets_the_block_s_values_and_optimizer_params_override_them():
    block = {"optimizer": {"m2_format": "e5m2", "block_size": 64, "stochastic_rounding": True}}
    fp8, adamw = COATConfig.from_dict(block).optimizer_config()
    assert fp8 == FP8QuantizationConfig(m2_format="e5m2", block_size=64, stochastic_rounding=True)
    assert adamw == {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "offload": "none"}
    params = {"m1_format": "e5m2", "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0, "offload": "cpu"}
    fp8, adamw = COATConfig.from_dict({"optimizer": {"m1_format": "e4m3", "block_size": 64}}).optimizer_config(params)
    assert fp8 == FP8QuantizationConfig(m1_format="e5m2", block_size=64)
    assert adamw == {"betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.0, "offload": "cpu"}


def test_products_in_int8_have_gradients_in_int8_unless_bf16_is_asked_for():
    for asked, in_force in (({}, "int8"), ({"grad_format": "bf16"}, "bf16")):
        linear = COATConfig.from_dict({"weight": INT8, "activation": {**INT8, **asked}}).linear_config()
        assert (linear.weight_format, linear.input_format, linear.grad_format) == ("int8", "int8", in_force)
        assert linear.weight_has_row_scales
    stored = {"weight": INT8, "activation": {"use_fp8": False}}
    assert not COATConfig.from_dict(stored).linear_config().use_fp8_gemm


IN_INT8 = partial(FP8LinearConfig, weight_format="int8", input_format="int8", grad_format="int8")
# -- coat_core.config --
REFUSED: list[tuple[Any, str, list[Any]]] = [  # of each key values outside its rule
    (FP8QuantizationConfig, "block_size", [0, 8, 24, 4112, -16, 128.0, True, "128", None]),
    (FP8QuantizationConfig, "use_fp8_m1", ["false"]),
    (FP8QuantizationConfig, "use_fp8_m2", [1]),
    (FP8QuantizationConfig, "use_dynamic_range_expansion", [None]),
    (FP8QuantizationConfig, "stochastic_rounding", [0]),
    (FP8QuantizationConfig, "m1_format", ["fp8", "uint8_log"]),
    (FP8QuantizationConfig, "m2_format", ["E4M3", "int8_ratio"]),
    (FP8QuantizationConfig, "moment_rounding", ["up"]),
    (FP8LinearConfig, "weight_format", ["int4"]),
    (FP8LinearConfig, "weight_granularity", ["per_group"]),
    (FP8LinearConfig, "input_format", [None, "int8"]),
    (FP8LinearConfig, "grad_format", ["fp16", "int8"]),
    (FP8LinearConfig, "input_granularity", ["block", "per_group"]),
    (FP8LinearConfig, "fallback", ["warn"]),
    (FP8LinearConfig, "use_fp8_gemm", ["yes", 1]),
    (FP8LinearConfig, "cache_weight", [0]),
    (FP8LinearConfig, "wgrad_format", ["fp8"]),
    (IN_INT8, "input_format", ["e4m3"]),
    (IN_INT8, "grad_format", ["e5m2"]),
    (IN_INT8, "input_granularity", ["per_tensor"]),
    (IN_INT8, "wgrad_format", ["e4m3"]),
    (ExpansionConfig, "range_fraction", [0.0, 1.5, float("nan")]),
    (ExpansionConfig, "exponent_step", [-0.1, 0.5]),
    (ExpansionConfig, "exponent_max", [0.5, float("inf")]),
]


@pytest.mark.parametrize(("config", "key", "value"), [(c, k, v) for c, k, values in REFUSED for v in values])
def test_values_outside_their_range_are_refused_by_name(config, key, value):
    with pytest.raises(ValueError, match=f"^{key}={value!r}: must be ".replace("(", r"\(")):
        config(**{key: value})
