"""ai-toolkit's keys: the table, what a checkout says, the generator, and what `check` makes of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from coat_flux.config.ai_toolkit_keys import (
    BLOCKS,
    OWN_KINDS,
    PROCESS,
    ROWS,
    TABLE,
    VERSION,
    NoToolkitError,
    read_schema,
    shipped_schema,
    values_of,
)
from coat_flux.config.build import config_fields
from coat_flux.config.check import check_job_file, find_toolkit
from coat_flux.config.job import AI_TOOLKIT_BLOCKS
from scripts.update_ai_toolkit_keys import updated
from tests.unit.test_check import AI_TOOLKIT, checkout, found


def test_an_installed_ai_toolkit_knows_its_own_keys(tmp_path: Path) -> None:
    root = checkout(tmp_path, train="new_in_it", version="0.13.0")
    changes = [("train.new_in_it", 5), ("train.loss_type", "newest")]
    (item,) = found(*changes, trainer=AI_TOOLKIT, toolkit_root=root)
    assert (item.severity, item.key) == ("warning", "config.process[0].train.loss_type")
    assert "yours is 0.13.0" in item.line()
    (wrong,) = found(("train.new_in_it", "5"), trainer=AI_TOOLKIT, toolkit_root=root)
    assert "must be a whole number; write 5 without quotes" in wrong.line()
    assert [item.severity for item in found(*changes, trainer=AI_TOOLKIT)] == ["error", "error"]


def test_caption_dropout_beside_cached_captions_depends_on_the_version(tmp_path: Path) -> None:
    change = ("train.cache_text_embeddings", True)
    assert found(change, trainer=AI_TOOLKIT, toolkit_root=checkout(tmp_path / "new")) == []
    old = checkout(tmp_path / "old", dropout="", version="0.9")
    (item,) = found(change, trainer=AI_TOOLKIT, toolkit_root=old)
    assert item.key == "config.process[0].datasets[0].caption_dropout_rate"
    assert "ai-toolkit 0.9 ignores it with cached text embeddings" in item.line()


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("toolkit/config_modules.py", "class TrainConfig: ...", "has no class"),
        ("toolkit/config_modules.py", "class (", "line 1"),
        ("toolkit/lora_special.py", "", "has no class LoRASpecialNetwork"),
        ("jobs/process/BaseProcess.py", None, "cannot be read"),
    ],
)
def test_a_source_that_changed_leaves_the_shipped_list(tmp_path: Path, file: str, text: str | None, words: str) -> None:
    root = checkout(tmp_path)
    (root / file).unlink() if text is None else (root / file).write_text(text)
    with pytest.raises(NoToolkitError, match=words):
        read_schema(root)
    error, warning = found(("train.stpes", 1), trainer=AI_TOOLKIT, toolkit_root=root)
    assert error.key.endswith("train.stpes")
    assert (warning.severity, warning.key) == ("warning", "ai-toolkit")
    assert words in warning.line()
    assert f"the list of {VERSION} is used" in warning.line()


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
    with pytest.raises(NoToolkitError, match=r"--ai-toolkit=.*nowhere: has no toolkit/config_modules.py; give"):
        find_toolkit(tmp_path / "nowhere")


def test_the_table_says_one_thing_about_each_key() -> None:
    assert len({(row["block"], row["key"]) for row in ROWS}) == len(ROWS) > 400
    for row in ROWS:
        assert None not in row.values(), row
        assert row["block"] in BLOCKS
        nested = re.fullmatch(r"\{(\w+)\}|\[(\w+)\]", row["corrected"])
        assert nested is None or (nested[1] or nested[2]) in BLOCKS, row
        assert row["stand-alone"] in ("", "supported", "unsupported", "no effect"), row
        assert bool(row["reason"]) == (row["stand-alone"] == "no effect"), row
        assert row["kind"] == "-" or _known_kind(row["kind"]), row
        assert row["default"] == json.dumps(json.loads(row["default"])) if row["default"] else True, row
        choices, limits = values_of(row)
        assert set(limits) <= {"minimum", "maximum", "above", "below", "example"}, row
        assert not choices or (row["corrected"] or row["kind"]).startswith("str"), row


def _known_kind(kind: str) -> bool:
    return set(kind.removesuffix("?").split("|")) <= {"any", "int", "number", "str", "bool", "list", "dict"}


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


def test_the_generator_says_what_changed_and_carries_over_what_is_written_by_hand(tmp_path: Path) -> None:
    text, changes = updated(checkout(tmp_path, train="new_in_it", version="0.13.0", gone="TrainConfig.loss_type"))
    rows = [line.split("\t") for line in text.splitlines()]
    assert rows[0][0].startswith("# ai-toolkit 0.13.0 ")
    assert changes[0] == f"version: {VERSION} -> 0.13.0"
    assert "added: TrainConfig.new_in_it (int, default 1)" in changes
    assert "removed: TrainConfig.loss_type" in changes
    assert "changed kind: TrainConfig.steps: int -> any" in changes
    assert ["TrainConfig", "new_in_it", "int", "1", "", "", "unsupported", ""] in rows
    assert ["TrainConfig", "steps", "any", "null", "", "minimum=1", "supported", ""] in rows
    assert [row[6] for row in rows if row[:2] == ["process", "slider"]] == ["unsupported"]


@pytest.mark.aitk
def test_the_table_is_what_the_checkout_says() -> None:
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    schema, shipped = read_schema(root), shipped_schema()
    if schema.version != VERSION:
        pytest.skip(f"the checkout is {schema.version}")
    text, changes = updated(root)
    assert changes == []
    assert text == TABLE.read_text(encoding="utf-8")
    assert schema.classes == shipped.classes
    assert schema.drops_cached_captions == shipped.drops_cached_captions


@pytest.mark.aitk
def test_ai_toolkit_s_own_flux_examples_have_no_error() -> None:
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    examples = sorted((root / "config" / "examples").glob("train_lora_flux*.yaml"))
    assert examples
    for path in examples:
        items = check_job_file(path, trainer=AI_TOOLKIT, toolkit_root=root)
        errors = [item.line() for item in items if item.severity == "error"]
        assert [line for line in errors if "control_path='/path/to/control/folder': no such folder" not in line] == []
