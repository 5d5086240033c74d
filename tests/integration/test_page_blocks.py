"""Blocks of Python and YAML in the pages are run or loaded, and their figures are those of `coat-flux plan` today."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
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
ROW = re.compile(r"(?m)^\| `configs/(\w+)\.yaml` \| (\d+) GB[^|]* \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$")


def facts_of(config: str) -> JobFacts:
    return JobFacts(JobConfig.load(ROOT / "configs" / f"{config}.yaml"))


def test_the_table_of_configs_has_what_plan_predicts(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = ROW.findall(PAGES["README.md"])
    assert rows == ROW.findall(PAGES["README_zh.md"])
    configs = {path.stem for path in (ROOT / "configs").glob("flux_*.yaml")}
    assert {config for config, *_ in rows} == configs - {"flux_clothing_tiny"}
    for config, gb, peak, recomputed, ram, disk in rows:
        plan = predict(facts_of(config), int(gb) * 1e9)
        figures = [f"{size / 1e9:.1f}" for size in (plan.peak, plan.ram_bytes, plan.disk_bytes)]
        assert [peak, ram, disk, recomputed] == [*figures, str(len(plan.recomputed))], config
        assert float(peak) < int(gb)


def test_what_nothing_recomputed_takes_and_the_download_is_the_model_s_parts(monkeypatch):
    monkeypatch.chdir(ROOT)
    facts = facts_of("flux_clothing_coat")
    names = ("transformer", "text_encoder_2", "text_encoder", "vae")
    parts = [2 * facts.model.elements[name] / 1e9 for name in names]
    cells = " | ".join(f"{gb:.1f}" for gb in parts)
    for name in ("README.md", "README_zh.md"):
        assert f"{predict(facts, None).peak / 1e9:.1f} GB" in PAGES[name]
        assert f"| GB | {cells} |" in PAGES[name]
        assert f"{sum(parts):.1f} GB" in PAGES[name]
