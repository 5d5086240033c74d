"""The figures of the English pages are those of `coat-flux plan` today; test_readme_commands.py has the Chinese."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coat_flux.config.job import JobConfig
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| `configs/(\w+)\.yaml` \| (\d+) GB[^|]* \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)


@functools.cache
def facts_of(config: str, weight: str | None = None, checkpointing: str | None = None) -> JobFacts:
    job = JobConfig.load(ROOT / "configs" / f"{config}.yaml")
    if weight is not None:
        job = replace(job, coat=replace(job.coat, weight=replace(job.coat.weight, format=weight)))
    if checkpointing is not None:
        job = replace(job, coat=replace(job.coat, memory=replace(job.coat.memory, checkpointing=checkpointing)))
    return JobFacts(job)


@functools.cache
def planned(config: str, gb: int | None = None, **changes: str) -> SimpleNamespace:
    """As the pages write them: GB of the card, blocks recomputed, GB of CPU memory and of disk."""
    prediction = predict(facts_of(config, **changes), None if gb is None else gb * 1e9)
    return SimpleNamespace(
        peak=f"{prediction.peak / 1e9:.1f}",
        about=f"{prediction.peak / 1e9:.0f}",
        n=str(len(prediction.recomputed)),
        ram=f"{prediction.ram_bytes / 1e9:.1f}",
        disk=f"{prediction.disk_bytes / 1e9:.1f}",
    )


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_table_of_configs_has_what_plan_predicts(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = ROW.findall(page("README.md"))
    assert rows == ROW.findall(page("README_zh.md"))
    configs = {path.stem for path in (ROOT / "configs").glob("flux_*.yaml")}
    assert {config for config, *_ in rows} == configs - {"flux_clothing_tiny"}
    for config, gb, peak, recomputed, ram, disk in rows:
        plan = planned(config, int(gb))
        assert (peak, recomputed, ram, disk) == (plan.peak, plan.n, plan.ram, plan.disk), config
        assert float(peak) < int(gb)


SENTENCES = [
    ("README.md", "at {coat.peak} GB with {coat.n} of 57 blocks recomputed ({free.peak} GB with none)"),
    ("README.md", "{s8.peak} GB ({s8.n} of 57 blocks recomputed) or {s12.peak} GB ({s12.n}), with {s12.ram} GB of CPU"),
    ("README.md", "in 4.5 bits, at {n16.peak} GB ({n16.n})"),
    ("README.md", "is planned at {b80.peak} GB"),
    ("README.md", "Its bf16 runs need {bf16.peak} GB, so a 24 GB card"),
    ("docs/memory.md", "{nvfp4.peak} GB without recomputation (e4m3: {free.peak}); {nvfp4_16.n} of 57 blocks"),
    ("docs/memory.md", "{s12.ram} GB of CPU memory instead of {coat.ram}"),
    ("docs/training.md", "{full.about} GB, or {full48.about} GB with the moments in CPU memory"),
    ("docs/training.md", "has {full48.about} GB for FLUX.1-dev, and {all.about} GB, for a 32 GB card"),
    ("docs/verify.md", "in bf16 takes {bf16.peak} GB with every block recomputed: a 32 GB card"),
]


@pytest.mark.parametrize(("name", "sentence"), SENTENCES)
def test_sentences_have_what_plan_predicts(name, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = {
        "coat": planned("flux_clothing_coat", 24),
        "free": planned("flux_clothing_coat"),
        "n16": planned("flux_clothing_coat_16gb", 16),
        "s12": planned("flux_clothing_coat_12gb", 12),
        "s8": planned("flux_clothing_coat_8gb", 8),
        "b80": planned("flux_clothing_coat_80gb", 80),
        "bf16": planned("flux_clothing_bf16_baseline", 32),
        "nvfp4": planned("flux_clothing_coat", weight="nvfp4"),
        "nvfp4_16": planned("flux_clothing_coat", 16, weight="nvfp4"),
        "full": planned("flux_full_80gb", 80),
        "full48": planned("flux_full_48gb", 48),
        "all": planned("flux_full_48gb", 32, checkpointing="all"),
    }
    assert sentence.format(**plans) in " ".join(page(name).split())


def test_the_download_is_the_model_s_parts(monkeypatch):
    monkeypatch.chdir(ROOT)
    elements = facts_of("flux_clothing_coat").model.elements
    parts = [2 * elements[part] / 1e9 for part in ("transformer", "text_encoder_2", "text_encoder", "vae")]
    cells = " | ".join(f"{gb:.1f}" for gb in parts)
    for name in ("README.md", "README_zh.md"):
        assert f"| GB | {cells} |" in page(name)
        assert f"{sum(parts):.1f} GB" in page(name)
