"""Whatever is written into the `coat:` block, the answer is a config or a ConfigError, never anything else."""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coat_flux.config.coat import OPTIONS, COATConfig
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.config.job_file import load_job_yaml

WORDS = sorted({part for option in OPTIONS for part in option.key.split(".")} | {"optimiser", "", "a.b", "\n"})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([str(choice) for option in OPTIONS for choice in option.choices]),
    st.binary(max_size=3),
    st.dates(),
)
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=6), st.integers(), st.none(), st.booleans())
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


def parsed_or_refused(parse, raw, file=""):
    """What `parse` makes of `raw`, or None for a ConfigError with at least one line, each naming the file."""
    refusal = None
    try:
        return parse(raw)
    except ConfigError as error:
        refusal = error
    assert refusal.findings
    assert all(line.startswith(f"{file}: " if file else "") and "\n" not in line for line in refusal.findings)
    return None


@given(junk)
def test_any_block_is_a_config_or_a_config_error(raw):
    config = parsed_or_refused(COATConfig.from_dict, raw)
    assert config is None or COATConfig.from_dict(config.to_dict()) == config


@given(st.dictionaries(st.sampled_from(["optimizer", "weight", "activation", "memory"]), st.dictionaries(keys, junk)))
def test_any_nested_block_is_a_config_or_a_config_error(raw):
    config = parsed_or_refused(COATConfig.from_dict, raw)
    assert config is None or COATConfig.from_dict(config.to_dict()) == config


@given(junk)
def test_any_optimizer_params_are_taken_or_refused(raw):
    result = parsed_or_refused(COATConfig().optimizer_config, raw)
    assert result is None or set(result[1]) <= {"betas", "eps", "weight_decay", "offload"}


PROCESS_KEYS = ["type", "network", "save", "datasets", "train", "model", "sample", "logging", "coat", "device", "name"]


@given(st.dictionaries(st.sampled_from(PROCESS_KEYS), junk))
@example({"sample": {"prompts": [None], "samples": [{"prompt": 1}]}})
@example({"train": {"lr_scheduler_params": {"factor": {}}}, "network": {"network_kwargs": {"only_if_contains": []}}})
def test_any_process_is_a_job_or_a_config_error(process):
    raw = {"job": "extension", "config": {"name": "run", "process": [process]}}
    assert parsed_or_refused(JobConfig.from_dict, raw) is None or process["type"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(), st.text("ab:-[]{}&*!'\"# \n\t\r1e.", max_size=40)))
def test_any_text_is_a_job_or_a_config_error(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    job = parsed_or_refused(load_job_yaml, path, file=str(path))
    assert job is None or job["config"]["process"]
