"""ai-toolkit's keys: the table, an installed ai-toolkit, and what `check` makes of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from coat_flux.config.ai_toolkit_keys import (
    KINDS,
    NETWORK_KWARGS,
    OWN_KINDS,
    PROCESS,
    ROWS,
    SOURCES,
    VERSION,
    NoToolkitError,
    read_toolkit,
    values_of,
)
from coat_flux.config.check import check_job_file, find_toolkit
from coat_flux.config.job import AI_TOOLKIT_BLOCKS
from coat_flux.config.options import config_fields
from tests.unit.test_check import AI_TOOLKIT, checkout, found


def test_a_newer_ai_toolkit_may_have_newer_keys_and_values(tmp_path: Path) -> None:
    root = checkout(tmp_path, train="new_in_it", version="0.13.0")
    changes = [("train.new_in_it", 5), ("train.loss_type", "newest")]
    (item,) = found(*changes, trainer=AI_TOOLKIT, toolkit_root=root)
    assert (item.severity, item.key) == ("warning", "config.process[0].train.loss_type")
    assert "yours is 0.13.0" in item.line()
    assert [item.severity for item in found(*changes, trainer=AI_TOOLKIT)] == ["error", "error"]
    (misplaced,) = found(
        ("train.save_every", 5), trainer=AI_TOOLKIT, toolkit_root=checkout(tmp_path, train="save_every")
    )
    assert misplaced.severity == "error"


def test_a_source_that_cannot_be_read_leaves_the_table(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / SOURCES[-1]).unlink()
    with pytest.raises(NoToolkitError, match="cannot be read"):
        read_toolkit(root)
    error, warning = found(("train.stpes", 1), trainer=AI_TOOLKIT, toolkit_root=root)
    assert error.key.endswith("train.stpes")
    assert "'steps'" in error.line()
    assert (warning.severity, warning.key) == ("warning", "ai-toolkit")
    assert VERSION in warning.line()


def test_ai_toolkit_is_found_by_option_variable_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_toolkit() is None
    given, variable, here = (checkout(tmp_path / name) for name in ("given", "variable", "here"))
    monkeypatch.chdir(here)
    assert find_toolkit() == here
    monkeypatch.setenv("AI_TOOLKIT_ROOT", str(variable))
    assert find_toolkit() == variable
    assert find_toolkit(given) == given
    with pytest.raises(NoToolkitError, match="nowhere"):
        find_toolkit(tmp_path / "nowhere")


def test_the_table_says_one_thing_about_each_key() -> None:
    assert len({(row["block"], row["key"]) for row in ROWS}) == len(ROWS) > 400
    for row in ROWS:
        assert None not in row.values(), row
        nested = re.fullmatch(r"\{(\w+)\}|\[(\w+)\]", row["kind"])
        single = set(row["kind"].removesuffix("?").split("|"))
        if nested:
            assert (nested[1] or nested[2]) in KINDS, row
        else:
            assert row["kind"] == "-" or single <= {"any", "int", "number", "str", "bool", "list", "dict"}, row
        assert row["stand-alone"] in ("", "supported", "unsupported", "no effect"), row
        assert bool(row["reason"]) == (row["stand-alone"] == "no effect"), row
        assert row["default"] == json.dumps(json.loads(row["default"])) if row["default"] else True, row
        choices, limits = values_of(row)
        assert set(limits) <= {"minimum", "maximum", "above", "below", "example"}, row
        assert not choices or row["kind"].startswith("str"), row


def test_supported_keys_are_those_the_stand_alone_trainer_declares() -> None:
    supported = {(row["block"], row["key"]) for row in ROWS if row["stand-alone"] == "supported"}
    read = {(row["block"], row["key"]) for row in ROWS}
    declared = {(block, key) for cls, block in AI_TOOLKIT_BLOCKS.items() for key in config_fields(cls)}
    assert supported == declared & read
    assert declared - read == {(PROCESS, "coat"), (PROCESS, "validation"), *OWN_KINDS}


def test_defaults_are_ai_toolkit_s() -> None:
    sections = {block: cls for cls, block in AI_TOOLKIT_BLOCKS.items()}
    different = []
    for row in ROWS:
        item = config_fields(sections[row["block"]]).get(row["key"]) if row["block"] in sections else None
        if item is None or "option" not in item.metadata or not row["default"]:
            continue
        ours, theirs = item.metadata["option"].default, json.loads(row["default"])
        if ours != theirs and (ours or theirs):
            different.append((f"{row['block']}.{row['key']}", theirs, ours))
    assert different == [
        ("NetworkConfig.alpha", 1.0, None),  # ignored on FLUX: alpha is the rank
        ("NetworkConfig.linear", None, 4),  # ai-toolkit's 4 stands in an else branch
        ("DatasetConfig.resolution", 512, (512,)),
        ("TrainConfig.noise_scheduler", "ddpm", "flowmatch"),  # which ai-toolkit cannot train FLUX with
        ("SampleConfig.sampler", "ddpm", "flowmatch"),
    ]


@pytest.mark.aitk
def test_the_checkout_reads_the_keys_of_the_table_and_its_config_classes_no_other_ones() -> None:
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    if read_toolkit(root).version != VERSION:
        pytest.skip(f"the checkout is {read_toolkit(root).version}")
    classes = re.split(r"^class (\w+)", (root / SOURCES[0]).read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block, text in zip(classes[1::2], classes[2::2], strict=True):
        if block in KINDS:
            read = set(re.findall(r"kwargs\.get\(\s*[\"'](\w+)[\"']", text))
            assert read == KINDS[block].keys(), block
    source = "\n".join((root / file).read_text(encoding="utf-8") for file in SOURCES)
    assert all(re.search(rf"\b{key}\b", source) for key in KINDS[NETWORK_KWARGS])


@pytest.mark.aitk
def test_ai_toolkit_s_own_flux_examples_have_no_error() -> None:
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    examples = sorted((root / "config" / "examples").glob("train_lora_flux*.yaml"))
    assert examples
    for path in examples:
        items = check_job_file(path, trainer=AI_TOOLKIT, toolkit_root=root)
        errors = [item.line() for item in items if item.severity == "error"]
        assert [line for line in errors if "control_path='/path/to/control/folder': no such folder" not in line] == []
