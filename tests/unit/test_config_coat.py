"""The `coat:` block as a whole: unknown keys, all findings at once, combinations, and what the numerics get."""

from __future__ import annotations

import pytest

from coat_core.config import FP8LinearConfig, FP8QuantizationConfig
from coat_flux.config.coat import OPTIONS, COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.options import REMOVED


def findings(block: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        COATConfig.from_dict(block, file="f.yaml")
    return list(caught.value.findings)


@pytest.mark.parametrize("block", [None, {}, {"optimizer": None, "memory": {}}])
def test_an_empty_block_has_every_default(block):
    assert COATConfig.from_dict(block) == COATConfig()


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"optimiser": {}}, "f.yaml: coat.optimiser: unknown key; did you mean 'optimizer'?"),
        ({"Enabled": True}, "f.yaml: coat.Enabled: unknown key; did you mean 'enabled'?"),
        (
            {"optimizer": {"use_fp8_m3": True}},
            "f.yaml: coat.optimizer.use_fp8_m3: unknown key; did you mean 'use_fp8_m2'?",
        ),
        (
            {"memory": {"log_memory_stat": True}},
            "f.yaml: coat.memory.log_memory_stat: unknown key; did you mean 'log_memory_stats'?",
        ),
        ({"block_size": 64}, "f.yaml: coat.block_size: unknown key; did you mean 'optimizer: {block_size: …}'?"),
        (
            {"optimizer.block_size": 64},
            "f.yaml: coat.optimizer.block_size: unknown key; did you mean 'optimizer: {block_size: …}'?",
        ),
        (
            {"weight": {"zzz": 1}},
            "f.yaml: coat.weight.zzz: unknown key; known here: format, granularity, use_fp8",
        ),
        ({1: 2}, "f.yaml: coat.1: unknown key; known here: "),
        ({None: 2}, "f.yaml: coat.None: unknown key; known here: "),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(block, line):
    (found,) = findings(block)
    assert found.startswith(line)


def test_every_mistake_is_reported_not_only_the_first():
    found = findings(
        {
            "enabled": "false",
            "optimiser": {},
            "optimizer": {"block_size": 24, "m1_format": "fp8"},
            "activation": {"group_size": 100, "include": "*"},
            "memory": {"checkpointing": "some", "log_every": 0},
        }
    )
    assert [line.split(": ")[1].split("=")[0] for line in found] == [
        "coat.enabled",
        "coat.optimiser",
        "coat.optimizer.block_size",
        "coat.optimizer.m1_format",
        "coat.activation.group_size",
        "coat.activation.include",
        "coat.memory.checkpointing",
        "coat.memory.log_every",
    ]


def test_a_disabled_block_is_checked_all_the_same():
    assert findings({"enabled": False, "weight": {"format": "fp6"}}) == [
        "f.yaml: coat.weight.format='fp6': must be one of e4m3, e5m2, nvfp4, int8; write e4m3, for example"
    ]


def test_options_that_went_are_named():
    options = {"activation.linear_granularity=per_group", "memory.checkpointing=every_n", "memory.every_n"}
    options |= {"weight.cache", "speed.compile", "speed.attention=fa3", "speed.attention=fa4"}
    assert options <= REMOVED.keys()


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_is_named_with_what_replaces_it(name):
    key, _, value = name.partition("=")
    section, option = key.split(".")
    (line,) = findings({section: {option: value or True}})
    assert line.startswith(f"f.yaml: coat.{key}=")
    assert line.endswith(REMOVED[name])
    assert "; write " in line or "; remove" in line


IN_INT8 = {"weight": {"format": "int8"}, "activation": {"format": "int8"}}
IN_NVFP4 = {"format": "nvfp4"}
EXCLUDED = [  # a block, the key that is refused, a word of its remedy
    ({"memory": {"checkpointing": "none", "budget_gb": 24}}, "memory.budget_gb=24.0", "checkpointing: auto"),
    ({"memory": {"stream_blocks": 2}, "weight": {"use_fp8": False}}, "memory.stream_blocks=2", "use_fp8: true"),
    ({"memory": {"stream_blocks": 2, "transposed_weights": "always"}}, "memory.transposed_weights='always'", "auto"),
    ({"weight": {**IN_NVFP4, "granularity": "per_row"}}, "weight.granularity='per_row'", "remove it"),
    ({"weight": {**IN_NVFP4, "use_fp8": False}}, "weight.format='nvfp4'", "weight.use_fp8: true"),
    ({"weight": IN_NVFP4, "memory": {"transposed_weights": "always"}}, "memory.transposed_weights='always'", "never"),
    ({"activation": {"format": "nvfp4"}}, "activation.format='nvfp4'", "e4m3"),
    ({"weight": {"format": "int8"}}, "activation.format='e4m3'", "write int8"),
    ({"activation": {"format": "int8"}}, "activation.format='int8'", "write int8 there too"),
    ({"activation": {"grad_format": "int8"}}, "activation.grad_format='int8'", "write e5m2"),
    (
        {**IN_INT8, "activation": {"format": "int8", "grad_format": "e5m2"}},
        "activation.grad_format='e5m2'",
        "write one",
    ),
    (
        {**IN_INT8, "activation": {"format": "int8", "linear_granularity": "per_tensor"}},
        "activation.linear_granularity='per_tensor'",
        "write per_row",
    ),
    ({**IN_INT8, "weight": {"format": "int8", "granularity": "per_tensor"}}, "weight.granularity=", "remove it"),
    ({**IN_INT8, "weight": {"format": "int8", "use_fp8": False}}, "weight.format='int8'", "weight.use_fp8: true"),
    ({**IN_INT8, "activation": {"format": "int8", "wgrad_format": "e4m3"}}, "activation.wgrad_format=", "write bf16"),
    ({"activation": {"use_fp8": False, "min_sqnr_db": 20}}, "activation.min_sqnr_db=20.0", "write null"),
    ({"resume": {"allow": ["data", "sead"]}}, "resume.allow='sead'", "'seed'"),
]


@pytest.mark.parametrize(("block", "key", "remedy"), EXCLUDED)
def test_what_excludes_each_other_is_refused(block, key, remedy):
    (line,) = findings(block)
    assert line.startswith(f"f.yaml: coat.{key}")
    assert remedy in line.rpartition("; ")[2]


def test_products_in_int8_have_gradients_in_int8_unless_bf16_is_asked_for():
    linear = COATConfig.from_dict(IN_INT8).linear_config()
    assert (linear.weight_format, linear.input_format, linear.grad_format) == ("int8", "int8", "int8")
    asked = {"weight": {"format": "int8"}, "activation": {"format": "int8", "grad_format": "bf16"}}
    assert COATConfig.from_dict(asked).linear_config().grad_format == "bf16"
    stored = {"weight": {"format": "int8"}, "activation": {"use_fp8": False}}
    assert not COATConfig.from_dict(stored).linear_config().use_fp8_gemm


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"enabled": False, "fallback": "error", "activation": {"exclude": ["a.*"]}},
        {"memory": {"checkpointing": "all"}},
        {"memory": {"budget_gb": 15.5}},
        {"weight": {"format": "nvfp4"}},
        {"weight": {"format": "int8"}, "activation": {"format": "int8", "grad_format": "bf16"}},
    ],
)
def test_to_dict_holds_every_option_and_reads_back(block):
    config = COATConfig.from_dict(block)
    tree = config.to_dict()
    assert COATConfig.from_dict(tree) == config
    assert set(tree) == {option.key.split(".")[0] for option in OPTIONS}
    assert tree["activation"]["include"] == ["*"]
    assert len(tree["optimizer"]) == 10


def test_the_optimizer_gets_the_block_s_values():
    block = {"optimizer": {"m2_format": "e5m2", "block_size": 64, "stochastic_rounding": True}}
    config, adamw = COATConfig.from_dict(block).optimizer_config()
    assert config == FP8QuantizationConfig(m2_format="e5m2", block_size=64, stochastic_rounding=True)
    assert adamw == {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "offload": "none"}


def test_optimizer_params_override_the_block_and_pass_adamw_s_arguments_on():
    config = COATConfig.from_dict({"optimizer": {"m1_format": "e4m3", "block_size": 64}})
    params = {"m1_format": "e5m2", "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0, "offload": "cpu"}
    fp8, adamw = config.optimizer_config(params)
    assert fp8 == FP8QuantizationConfig(m1_format="e5m2", block_size=64)
    assert adamw == {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0, "offload": "cpu"}


@pytest.mark.parametrize(
    ("block", "params", "expected"),
    [
        ({"use_fp8": False}, {}, (False, False)),
        ({"use_fp8": False, "use_fp8_m1": True}, {}, (False, False)),
        ({"use_fp8_m1": False}, {}, (False, True)),
        ({"use_fp8_m1": False, "use_fp8_m2": False}, {}, (False, False)),
        ({}, {"use_fp8": False}, (False, False)),
        ({"use_fp8": False}, {"use_fp8": True, "use_fp8_m2": False}, (True, False)),
    ],
)
def test_use_fp8_is_the_master_switch(block, params, expected):
    fp8, _ = COATConfig.from_dict({"optimizer": block}).optimizer_config(params)
    assert (fp8.use_fp8_m1, fp8.use_fp8_m2) == expected


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"beta": [0.9, 0.9]}, "f.yaml: train.optimizer_params.beta: unknown key; did you mean 'betas'?"),
        (
            {"betas": 0.9},
            "train.optimizer_params.betas=0.9: must be a list of two numbers, each of at least 0 and below 1",
        ),
        ({"betas": [0.9, 1.0]}, "must be a list of two numbers, each of at least 0 and below 1"),
        ({"betas": [0.9, "x"]}, "must be a list of two numbers"),
        ({"weight_decay": "1e-4"}, "weight_decay='1e-4': must be a number of at least 0; write 1e-4 without quotes"),
        ({"eps": 0}, "eps=0: must be a number above 0"),
        ({"block_size": 24}, "block_size=24: must be a whole number from 16 to 4096"),
        ([], "must be a block of keys"),
    ],
)
def test_optimizer_params_are_checked_as_strictly(params, line):
    with pytest.raises(ConfigError) as caught:
        COATConfig().optimizer_config(params, file="f.yaml")
    (found,) = caught.value.findings
    assert line in found


def test_the_linear_gets_weight_and_activation_options():
    block = {
        "weight": {"format": "e5m2", "granularity": "per_row"},
        "activation": {
            "use_fp8": False,
            "format": "e5m2",
            "grad_format": "bf16",
            "linear_granularity": "per_tensor",
        },
        "fallback": "error",
    }
    assert COATConfig.from_dict(block).linear_config() == FP8LinearConfig(
        weight_format="e5m2",
        weight_granularity="per_row",
        input_format="e5m2",
        grad_format="bf16",
        input_granularity="per_tensor",
        use_fp8_gemm=False,
        fallback="error",
    )
    assert COATConfig().linear_config() == FP8LinearConfig()


@pytest.mark.parametrize(
    ("activation", "keys"),
    [
        ({}, "activation.grad_format"),
        ({"format": "e5m2", "grad_format": "e4m3"}, "activation.format"),
        ({"format": "e5m2"}, "activation.format and activation.grad_format"),
    ],
)
def test_a_product_that_no_gpu_has_is_refused(activation, keys):
    (found,) = findings({"weight": {"format": "e5m2"}, "activation": activation})
    assert found.startswith("f.yaml: coat.weight.format='e5m2': no GPU multiplies e5m2 by e5m2")
    assert found.endswith(f"write e4m3, or {keys}: e4m3")


@pytest.mark.parametrize(
    "block",
    [
        {"activation": {"format": "e5m2"}},
        {"weight": {"format": "e5m2"}, "activation": {"grad_format": "e4m3"}},
        {"weight": {"format": "e5m2"}, "activation": {"grad_format": "bf16"}},
        {"weight": {"format": "e5m2"}, "activation": {"use_fp8": False}},
    ],
)
def test_every_other_product_of_e5m2_is_allowed(block):
    assert COATConfig.from_dict(block).to_dict()
