"""Every code block of the pages is run, loaded or parsed, in English and Chinese; so is code inside sentences."""

import argparse
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser

from coat_flux.cli import entry
from coat_flux.config.check import check_job_dict
from coat_flux.config.job_file import parse
from tests.helpers.engine_job import engine_job, train
from tests.helpers.flux import tiny_flux

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted(ROOT.glob("README*.md"))}
PAGES |= {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
# whose options are the shell's, git's, pip's, Python's or ai-toolkit's; the helper has none
NOT_PARSED = ("cd", "git", "hf", "pip", "python -m", "python run.py", "python tests", "source")
SMALLER = {  # runs of seconds in place of hours; the second study of a page has the runs of the first
    "steps=1000": "steps=1",
    "seeds=5": "seeds=2",
    ', hold_out=16, folder="output/ablation"': "",
    "(1, 2, 3)": "(7, 8)",
}


def _blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", PAGES[page], re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def _commands() -> list[str]:
    """Those of the blocks, and those inside sentences, where arguments may be missing."""
    spans = [span for text in PAGES.values() for span in re.findall(r"`((?:coat-flux|python|accelerate) [^`]+)`", text)]
    blocks = "\n".join(block for page in PAGES for block in _blocks(page, "bash"))
    commands = {re.split(r"(?:^|\s)#\s", line)[0].strip() for line in blocks.replace("\\\n", "").splitlines()}
    for span in spans:
        words = re.sub(r"\bN\b", "1", span).split()
        known = [command for command in commands if command.split()[: len(words)] == words]
        commands |= set() if known else {" ".join(words)}
    return sorted(commands - {""})


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


@pytest.mark.parametrize("command", _commands())
def test_a_command_has_its_options(command, monkeypatch):
    words = shlex.split(command)
    if "coat_flux.cli" in words:
        at = words.index("coat_flux.cli") - 1
        launched = launch_command_parser().parse_args(words[2:])
        assert Path(ROOT / launched.config_file).is_file()
        words = ["coat-flux", *words[at + 2 :]]
    if words[0] == "coat-flux":
        assert callable(entry.make_parser().parse_args(words[1:]).run)
    elif words[0] == "python" and words[1].startswith("scripts/"):
        parse = argparse.ArgumentParser.parse_known_args

        def stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
            assert parse(parser, *arguments)[1] == []
            raise InterruptedError  # in place of what the script would do

        monkeypatch.syspath_prepend(ROOT / "scripts")
        monkeypatch.setattr("argparse.ArgumentParser.parse_known_args", stop)
        monkeypatch.setattr("sys.argv", words[1:])
        with pytest.raises(InterruptedError):
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    else:
        assert command.startswith(NOT_PARSED), "neither ours nor in the table"
