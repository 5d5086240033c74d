"""Every YAML in configs/ is one a user can run: it parses strictly, and the promised ones are there."""

from __future__ import annotations

import re

import pytest

from coat_flux.config.coat import BY_KEY, COATConfig
from coat_flux.config.job import JobConfig
from tests.architecture.sources import ROOT

CONFIGS = ROOT / "configs"
PROMISED = [
    "flux_clothing_coat.yaml",
    "flux_clothing_coat_3090.yaml",
    "flux_clothing_coat_16gb.yaml",
    "flux_clothing_coat_12gb.yaml",
    "flux_clothing_coat_8gb.yaml",
    "flux_clothing_coat_80gb.yaml",
    "flux_clothing_bf16_baseline.yaml",
    "flux_clothing_tiny.yaml",
]


@pytest.mark.parametrize("name", PROMISED)
def test_promised_config_is_there(name: str) -> None:
    assert (CONFIGS / name).is_file()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_config_parses(path) -> None:
    job = JobConfig.from_file(path)
    assert job.file == str(path)
    assert job.name
    assert job.train.steps > 0


@pytest.mark.parametrize("name", ["flux_clothing_coat.yaml", "flux_clothing_tiny.yaml"])
def test_config_names_every_option(name: str) -> None:
    """They say "every option stands here": so does the one that applies to another `checkpointing`, as a comment."""
    text = (CONFIGS / name).read_text(encoding="utf-8")
    block = text[text.index("      coat:") :]
    missing = [key for key in BY_KEY if not re.search(rf"^ +(# )?{key.split('.')[-1]}:", block, re.MULTILINE)]
    assert missing == []


def test_defaults_in_the_first_config_are_the_defaults() -> None:
    assert JobConfig.from_file(CONFIGS / "flux_clothing_coat.yaml").coat == COATConfig()
