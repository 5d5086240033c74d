"""Reading job files: the host's rules, and errors that point at the place."""

from __future__ import annotations

import json
import math

import pytest

from coat_flux.config.findings import ConfigError
from coat_flux.config.job_file import load_job_yaml

FRAME = "job: extension\nconfig:\n  name: run\n  process:\n    - type: coat_flux_trainer\n"


def write(tmp_path, text, name="job.yaml", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


def with_value(tmp_path, text):
    return load_job_yaml(write(tmp_path, FRAME + f"      value: {text}\n"))["config"]["process"][0]["value"]


def refusal(path, **keywords):
    with pytest.raises(ConfigError) as caught:
        load_job_yaml(path, **keywords)
    assert all(line.startswith(f"{path}: ") for line in caught.value.findings)
    return "\n".join(caught.value.findings).replace(f"{path}: ", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("5e6", 5e6),
        ("-2e+3", -2e3),
        ("1.5e-4", 1.5e-4),
        ("1.e3", 1000.0),
        ("1.0", 1.0),
        (".5", 0.5),
        ("10", 10),
        ("1_000", 1000),
        ("true", True),
        ("'1e-4'", "1e-4"),
        ("1e", "1e"),
        ("e4m3", "e4m3"),
        ("1e4m3", "1e4m3"),
        ("null", None),
        ("none", "none"),
    ],
)
def test_scalars_follow_the_host_s_float_rule(tmp_path, text, value):
    read = with_value(tmp_path, text)
    assert read == value
    assert type(read) is type(value)


def test_infinity_stays_a_float(tmp_path):
    assert with_value(tmp_path, ".inf") == math.inf


def test_env_and_name_are_replaced_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("COAT_TEST_FOLDER", "/data/photos")
    text = (
        FRAME
        + "      folder: ${COAT_TEST_FOLDER}/a\n      list: ['[name]-1', {k: '[name]'}]\nmeta:\n  name: '[name]'\n"
    )
    job = load_job_yaml(write(tmp_path, text))
    assert job["config"]["process"][0]["folder"] == "/data/photos/a"
    assert job["config"]["process"][0]["list"] == ["run-1", {"k": "run"}]
    assert job["meta"] == {"name": "run"}


def test_a_name_from_the_command_line_replaces_config_name(tmp_path):
    job = load_job_yaml(write(tmp_path, FRAME + "      trigger_word: '[name]'\n"), name="other")
    assert job["config"]["name"] == "other"
    assert job["config"]["process"][0]["trigger_word"] == "other"


def test_a_name_from_the_command_line_makes_config_name_optional(tmp_path):
    path = write(tmp_path, FRAME.replace("  name: run\n", ""))
    assert load_job_yaml(path, name="other")["config"]["name"] == "other"
    assert "config.name=null: must be a string" in refusal(path)


def test_an_unset_variable_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.delenv("COAT_TEST_UNSET", raising=False)
    found = refusal(write(tmp_path, FRAME + "      folder: ${COAT_TEST_UNSET}\n"))
    assert found.startswith("line 6: ${COAT_TEST_UNSET}: this environment variable is not set; set it")


@pytest.mark.parametrize("suffix", [".json", ".jsonc", ".yml", ".YAML"])
def test_json_and_yml_are_read_too(tmp_path, suffix):
    job = {"job": "extension", "config": {"name": "run", "process": [{"type": "sd_trainer", "lr": 1e-4}]}}
    assert load_job_yaml(write(tmp_path, json.dumps(job), f"job{suffix}")) == job


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = write(tmp_path, (FRAME + "      größe: groß\n").replace("\n", "\r\n"), encoding="utf-8-sig")
    assert load_job_yaml(path)["config"]["process"][0] == {"type": "coat_flux_trainer", "größe": "groß"}


def test_merge_keys_and_aliases_are_no_duplicates(tmp_path):
    text = FRAME + "      a: &base {x: 1, y: 2}\n      b: {<<: *base, y: 3}\n      c: *base\n"
    process = load_job_yaml(write(tmp_path, text))["config"]["process"][0]
    assert process["b"] == {"x": 1, "y": 3}
    assert process["c"] == {"x": 1, "y": 2}


def test_files_that_cannot_be_read_say_why(tmp_path):
    assert "no such file in" in refusal(tmp_path / "missing.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "not a file" in refusal(tmp_path / "folder.yaml")
    assert "a job file ends in .yaml, .yml, .json, .jsonc" in refusal(write(tmp_path, FRAME, "job.txt"))
    assert "not UTF-8 text (byte 0); save the file as UTF-8" in refusal(write(tmp_path, FRAME, encoding="utf-16"))
