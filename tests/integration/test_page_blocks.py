"""Blocks of Python and YAML in the pages are run or loaded, and their figures are those of `coat-flux plan` today."""

import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from coat_flux.config.check import check_job_dict
from coat_flux.config.job import JobConfig
from coat_flux.config.job_file import parse
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from tests.helpers.engine_job import engine_job, train
from tests.helpers.flux import tiny_flux

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted(ROOT.glob("README*.md"))}
PAGES |= {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
SMALLER = {  # runs of seconds in place of hours; the second study of a page has the runs of the first
    "steps=1000": "steps=1",
    "seeds=5": "seeds=2",
    ', hold_out=16, folder="output/ablation"': "",
    "(1, 2, 3)": "(7, 8)",
}


def _blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", PAGES[page], re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


@pytest.fixture(scope="module")
def workplace(place: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A folder with what the pages name, at toy sizes, and the names that a reader has by then."""
    folder = tmp_path_factory.mktemp("reader")
    job = engine_job("my_run", **place, coat={}, train={"batch_size": 2})
    for name in ("black-forest-labs", "configs", "output/flux_full_80gb"):
        (folder / name).mkdir(parents=True)
    (folder / "configs" / "my_run.yaml").write_text(yaml.safe_dump(job), "utf-8")
    (folder / "black-forest-labs" / "FLUX.1-dev").symlink_to(place["model"])
    (folder / "output" / "flux_clothing_coat").symlink_to(train("flux_clothing_coat", place, train={"steps": 1}).parent)
    (folder / "output" / "flux_full_80gb" / "flux_full_80gb").symlink_to(place["model"])  # a save has its layout
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield {"model": tiny_flux(), "lora_parameters": [torch.nn.Parameter(torch.zeros(4, 64))]}


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")])
def test_python_runs(page, workplace):
    names = dict(workplace)
    for block in _blocks(page, "python"):
        for written, small in SMALLER.items():
            block = block.replace(written, small)
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "yaml")])
def test_yaml_is_a_fragment_of_a_job(page, place):
    for block in _blocks(page, "yaml"):
        job = engine_job("mine", **place, coat={})
        job["config"]["process"][0] |= parse(block, page)
        assert [finding.line() for finding in check_job_dict(job)] == []


# -- figures ----------------------------------------------------------------------------------------------------------
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


def test_the_table_of_configs_has_what_plan_predicts(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = ROW.findall(PAGES["README.md"])
    assert rows == ROW.findall(PAGES["README_zh.md"])
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
    assert sentence.format(**plans) in " ".join(PAGES[name].split())


def test_the_download_is_the_model_s_parts(monkeypatch):
    monkeypatch.chdir(ROOT)
    elements = facts_of("flux_clothing_coat").model.elements
    parts = [2 * elements[part] / 1e9 for part in ("transformer", "text_encoder_2", "text_encoder", "vae")]
    cells = " | ".join(f"{gb:.1f}" for gb in parts)
    for name in ("README.md", "README_zh.md"):
        assert f"| GB | {cells} |" in PAGES[name]
        assert f"{sum(parts):.1f} GB" in PAGES[name]
