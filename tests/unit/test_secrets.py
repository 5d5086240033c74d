"""Values of environment variables are used, and stored nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coat_flux.config.job import JobConfig
from tests.architecture.sources import ROOT


def test_a_variable_is_used_and_kept_unexpanded_for_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_STEPS", "7")
    text = (ROOT / "configs" / "flux_clothing_tiny.yaml").read_text(encoding="utf-8")
    text = text.replace("steps: 250", "steps: ${MY_STEPS}").replace(
        "trigger_word: dngrs", 'trigger_word: "${MY_TOKEN}"'
    )
    text = text[: text.index("\nmeta:")] + "\nmeta:\n  author: '[name] ${MY_TOKEN}'\n"
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    job = JobConfig.from_file(path, name="mine")
    assert (job.train.steps, job.trigger_word) == (7, "hf_secret")
    assert job.meta == {"author": "mine ${MY_TOKEN}"}
    assert job.written["config"]["name"] == "mine"
    stored = yaml.safe_dump(job.written)
    assert "hf_secret" not in stored
    assert "${MY_TOKEN}" in stored
    assert job.written["config"]["process"][0]["train"]["steps"] == "${MY_STEPS}"
    again = tmp_path / "config.yaml"
    again.write_text(stored, encoding="utf-8")
    assert JobConfig.from_file(again).trigger_word == job.trigger_word
