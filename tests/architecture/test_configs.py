"""Every YAML in configs/ is one a user can run: it parses strictly, and the promised ones are there."""

from __future__ import annotations

import pytest

from coat_flux.config import JobConfig
from tests.architecture.sources import ROOT

CONFIGS = ROOT / "configs"
PROMISED = [
    "flux_clothing_coat.yaml",
    "flux_clothing_coat_16gb.yaml",
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
