"""Every block of Python and YAML of the pages is run or loaded, in English and Chinese."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from coat_flux.config.check import check_job_dict
from coat_flux.config.job_file import parse
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
