"""The check of a whole job: warnings, ai-toolkit's own keys and versions, and the verdict for both trainers."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coat_flux.cli.entry import main
from coat_flux.config.ai_toolkit_keys import BLOCKS, OWN_ROWS, PROCESS, ROWS, SOURCES, VERSION, Toolkit, find_toolkit
from coat_flux.config.check import check_job_dict
from coat_flux.config.coat import DataOptions
from coat_flux.config.findings import ConfigError, Finding
from coat_flux.config.job import JobConfig
from coat_flux.config.options import block_of, config_fields
from tests.reliability.bad_configs import BOTH, Changes, check_job_file, job_with, yaml_of

AI_TOOLKIT = "ai-toolkit"
HERE = ("--no-data", "--elsewhere")


def findings(changes: Changes, trainer: str = "standalone", **keywords: Any) -> list[tuple[str, str, str]]:
    """(severity, key within the process entry, text) of each finding."""
    items = check_job_dict(job_with(changes), file="f.yaml", trainer=trainer, **keywords)
    return [(item.severity, item.key.removeprefix("config.process[0]."), item.text) for item in items]


def test_a_finding_has_file_key_value_rule_and_remedy():
    (item,) = check_job_dict(job_with({"train.steps": 0}), file="f.yaml")
    text = "must be a whole number of at least 1; write 1000, for example"
    assert item == Finding("error", "f.yaml", "config.process[0].train.steps", "0", text)


def test_errors_come_before_warnings_and_what_follows_from_a_mistake_is_no_second_one():
    items = findings({"sample.prompts": ["a shirt"], "train": "fast", "network.linear": "16"})
    assert [item[:2] for item in items] == [
        ("error", "network.linear"),
        ("error", "train"),
        ("warning", "sample.prompts[0]"),
    ]


WARNINGS: list[tuple[tuple[str, ...], Changes, str, str]] = [
    (BOTH, {"sample.prompts": ["[trigger] a", "a red shirt"]}, "sample.prompts[1]", "without the trigger word"),
    (BOTH, {"sample.prompts": ["[trigger] 红裙子在海边"]}, "sample.prompts[0]", "Chinese"),
    (BOTH, {"trigger_word": None, "sample.prompts": ["[trigger] a"]}, "sample.prompts[0]", "no trigger word"),
    (BOTH, {"train.lr": 0.0101}, "train.lr", "diverge"),
    (BOTH, {"train.lr": 1.9e-6}, "train.lr", "hardly learns"),
    (BOTH, {"train.lr": ...}, "train.lr", "which is the default"),
    (("standalone",), {"train.optimizer": "prodigy", "train.optimizer_params": {}, "coat": {}}, "train.lr", "it is 1"),
    ((AI_TOOLKIT,), {"train.optimizer": "prodigy", "coat": {}}, "train.optimizer", "not as COAT"),
    ((AI_TOOLKIT,), {"model.is_flux": ..., "model.quantize": False}, "model.is_flux", "Stable Diffusion 1"),
    ((AI_TOOLKIT,), {"type": "concept_slider"}, "type", "not checked here"),
]


@pytest.mark.parametrize(("trainers", "changes", "key", "says"), WARNINGS)
def test_what_only_surprises_is_a_warning(trainers, changes, key, says):
    for trainer in trainers:
        items = [item for item in findings(changes, trainer) if item[1] == key]
        assert [item[0] for item in items] == ["warning"]
        assert says in items[0][2]


@pytest.mark.parametrize(
    "changes",
    [
        {"train.lr": 0.01, "train.lr_scheduler": "constant", "train.lr_scheduler_params": {}},
        {"train.lr": 2e-6, "trigger_word": None, "sample.prompts": ["a shirt"]},
        {"sample.prompts": ["[trigger] été в"]},
        {"train.min_denoising_steps": 999, "network.rank": 16},
        {"datasets.1.resolution": 32, "coat.speed.attention": "cudnn"},
    ],
)
def test_what_is_just_right_has_no_finding(changes):
    assert [findings(changes, trainer) for trainer in BOTH] == [[], []]


def test_what_runs_in_ai_toolkit_alone_is_no_error():
    sdxl = {"model": {"name_or_path": "sdxl", "is_xl": True}, "train.noise_scheduler": "ddpm", "sample.sampler": "ddpm"}
    kontext = {"model.is_flux": False, "model.arch": "flux_kontext", "datasets.0.control_path": "."}
    slider = {"type": "concept_slider", "training_folder": ..., "datasets": "x", "train": 5}
    for changes in ({"datasets.0.control_path": "."}, kontext, sdxl, slider):
        assert "error" not in [severity for severity, *_ in findings(changes, AI_TOOLKIT)], changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"type": "sd_trainer", "coat": None}, "write type: coat_flux_trainer"),
        ({"coat": {"enabled": False}, "train.optimizer": "adamw"}, "coat.enabled: true"),
        ({"embedding": {"trigger": "x", "tokens": 4}}, "a network (a LoRA) and nothing else"),
    ],
)
def test_several_processes_train_a_network_in_our_process(changes, says):
    texts = [text for _, key, text in findings(changes, AI_TOOLKIT, num_processes=2) if key == "num_processes"]
    assert [says is not None and says in text for text in texts] == ([] if says is None else [True])


def test_a_validation_block_is_checked_in_both_and_measured_in_our_process_alone():
    wrong: list[tuple[dict[str, Any], str]] = [({"hold_out": 2, "every": 0}, "every")]
    wrong += [({"hold_out": value}, "hold_out") for value in (0, "a.jpg", [], True)]
    for block, key in wrong:
        for trainer in BOTH:
            assert [item[:2] for item in findings({"validation": block}, trainer)] == [("error", f"validation.{key}")]
    for block in ({"every": 10}, None):
        assert [item[:2] for item in findings({"validation": block})] == [("error", "validation.hold_out")]
    held_out = {"validation": {"hold_out": 2}}
    assert findings(held_out, AI_TOOLKIT) == findings({"validation": {"hold_out": ["a.jpg"]}}) == []
    assert ("error", "validation") in [item[:2] for item in findings({"type": "sd_trainer", **held_out}, AI_TOOLKIT)]
    controls = findings({**held_out, "datasets.1.control_path": "."}, AI_TOOLKIT)
    assert ["datasets[1]" in text for _, key, text in controls if key == "validation"] == [True]


def checkout(root: Path, *, train: str = "steps", version: str = VERSION) -> Path:
    """A folder with just what is read of ai-toolkit; its source has the key `train`."""
    files = {"version.py": f'VERSION = "{version}"\n', **dict.fromkeys(SOURCES, f"self.x = kwargs.get('{train}', 1)")}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_a_newer_ai_toolkit_may_have_newer_keys_and_one_that_cannot_be_read_leaves_the_table(tmp_path):
    root = checkout(tmp_path, train="new_in_it", version="0.13.0")
    changes = {"train.new_in_it": 5, "train.loss_type": "newest"}
    ((severity, key, text),) = findings(changes, AI_TOOLKIT, toolkit_root=root)
    assert (severity, key) == ("warning", "train.loss_type")
    assert "0.13.0" in text
    assert [item[0] for item in findings(changes, AI_TOOLKIT)] == ["error", "error"]
    root = checkout(tmp_path, train="save_every")  # a key of another block
    assert [item[0] for item in findings({"train.save_every": 5}, AI_TOOLKIT, toolkit_root=root)] == ["error"]
    (root / SOURCES[-1]).unlink()
    assert "cannot be read" in Toolkit(root).problem
    items = findings({"train.stpes": 1}, AI_TOOLKIT, toolkit_root=root)
    assert [item[:2] for item in items] == [("error", "train.stpes"), ("warning", "ai-toolkit")]


def test_ai_toolkit_is_found_by_option_variable_and_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_toolkit() is None
    given, variable, here = (checkout(tmp_path / name) for name in ("given", "variable", "here"))
    monkeypatch.chdir(here)
    assert find_toolkit() == here
    monkeypatch.setenv("AI_TOOLKIT_ROOT", str(variable))
    assert (find_toolkit(), find_toolkit(given)) == (variable, given)
    with pytest.raises(ConfigError, match="nowhere"):
        find_toolkit(tmp_path / "nowhere")


def toolkit_blocks(cls: type = JobConfig, block: str = PROCESS) -> Iterator[tuple[type, str]]:
    """The dataclasses of ai-toolkit's blocks, with the blocks' names in the table."""
    yield cls, block
    for key, item in config_fields(cls).items():
        inner = block_of(item) or item.metadata.get("blocks")
        if inner is not None and key in BLOCKS[block]:
            yield from toolkit_blocks(inner, BLOCKS[block][key]["inner"])


def test_supported_keys_are_those_the_stand_alone_trainer_declares_with_ai_toolkit_s_defaults():
    supported = {(row["block"], row["key"]) for row in ROWS if row["stand-alone"] == "supported"}
    read = {(row["block"], row["key"]) for row in ROWS}
    declared = {(block, key) for cls, block in toolkit_blocks() for key in config_fields(cls)}
    assert supported == declared & read
    assert declared - read == {(block, key) for block, rows in OWN_ROWS.items() for key in rows}
    sections = {block: config_fields(cls) for cls, block in toolkit_blocks()}
    different = {}
    for row in ROWS:
        item = sections.get(row["block"], {}).get(row["key"])
        if item is None or "option" not in item.metadata or not row["default"]:
            continue
        ours, theirs = item.metadata["option"].default, json.loads(row["default"])
        if ours != theirs and (ours or theirs):
            different[f"{row['block']}.{row['key']}"] = (theirs, ours)
    assert different == {
        "NetworkConfig.alpha": (1.0, None),  # ignored on FLUX: alpha is the rank
        "NetworkConfig.linear": (None, 4),  # ai-toolkit's 4 stands in an else branch
        "DatasetConfig.resolution": (512, (512,)),
        "TrainConfig.noise_scheduler": ("ddpm", "flowmatch"),  # which ai-toolkit cannot train FLUX with
        "SampleConfig.sampler": ("ddpm", "flowmatch"),
    }


@pytest.mark.aitk
def test_the_checkout_reads_the_keys_of_the_table_and_its_config_classes_no_other_ones():
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    if Toolkit(root).version != VERSION:
        pytest.skip(f"the checkout is {Toolkit(root).version}")
    classes = re.split(r"^class (\w+)", (root / SOURCES[0]).read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block, text in zip(classes[1::2], classes[2::2], strict=True):
        if block in BLOCKS:
            assert set(re.findall(r"kwargs\.get\(\s*[\"'](\w+)[\"']", text)) == BLOCKS[block].keys(), block
    source = "\n".join((root / file).read_text(encoding="utf-8") for file in SOURCES)
    assert all(re.search(rf"\b{key}\b", source) for key in BLOCKS["network_kwargs"])


@pytest.mark.aitk
def test_ai_toolkit_s_own_flux_examples_have_no_error():
    root = Path(os.environ["AI_TOOLKIT_ROOT"])
    examples = sorted((root / "config" / "examples").glob("train_lora_flux*.yaml"))
    assert examples
    for path in examples:
        items = check_job_file(path, trainer=AI_TOOLKIT, toolkit_root=root)
        errors = [item.line() for item in items if item.severity == "error"]
        assert [line for line in errors if "control_path='/path/to/control/folder': no such folder" not in line] == []


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `check` on the valid job with changes; returns (exit code, stdout lines, stderr lines)."""
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(changes: Changes, *options: str) -> tuple[int, list[str], list[str]]:
        (tmp_path / "job.yaml").write_text(yaml_of(job_with(changes)), encoding="utf-8")
        code = main(["check", "job.yaml", *options])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def test_one_extra_line_is_about_the_other_trainer(command):
    alone, name = "the stand-alone trainer", f"ai-toolkit {VERSION}"
    run = f"'run' would train 1500 steps into {Path('output') / 'run'}"
    last = f"job.yaml: no error found for {name}; {run}"
    assert command({}, *HERE) == (0, [f"{name}: would run it too", f"job.yaml: no error found for {alone}; {run}"], [])
    assert command({}, *HERE, "--host", "ai-toolkit") == (0, [last], [])
    code, out, err = command({"train.do_cfg": True}, *HERE)
    assert (code, out[0], out[2:], err) == (0, f"{alone}: would not run it:", [last], [])
    assert "train.do_cfg=true" in out[1]
    code, out, err = command({"train.do_cfg": True}, *HERE, "--host", "standalone")
    assert (code, out, len(err)) == (2, [f"{name}: would run it"], 1)
    code, out, err = command({"train.stpes": 1}, *HERE)
    assert (code, out, len(err)) == (2, [f"{name}: would not run it either, for the same reasons"], 1)


def test_whoever_is_meant_judges(command, tmp_path):
    """ai-toolkit inside its folder or with --ai-toolkit; else one that is here and takes the job."""
    only_aitk, only_alone = {"datasets.0.flip_y": True}, {"device": "cuda:1"}
    with_aitk = (*HERE, "--ai-toolkit", str(checkout(tmp_path / "aitk")))
    assert command(only_aitk, *with_aitk)[0] == command(only_alone, *HERE)[0] == command(only_aitk, *HERE)[0] == 0
    assert command(only_alone, *with_aitk)[0] == command(only_aitk, *HERE, "--host", "standalone")[0] == 2
    code, _, err = command(only_aitk, "--no-data")  # there is no ai-toolkit here
    assert code == 2
    assert any("datasets[0].flip_y=true" in line for line in err)
    checkout(tmp_path)  # the working directory
    assert command(only_alone, *HERE)[0] == 2
    assert command(only_aitk, *HERE)[0] == 0


def test_the_data_is_checked_unless_it_is_not_wanted(command, monkeypatch):
    calls: list[Any] = []

    def inspect(datasets: Any, trigger_word: Any, photos: DataOptions, *, reads_t5: bool) -> Any:
        calls.append(([entry.folder_path for entry in datasets], trigger_word, photos, reads_t5))
        return SimpleNamespace(errors=["photos: nothing there; add photos"], warnings=["small"], photos={})

    monkeypatch.setattr("coat_flux.data.preflight.DataReport", inspect)
    code, out, err = command({"coat.data.background": "grey"}, "--elsewhere")
    assert calls == [(["photos", "details"], "coatwear", DataOptions(background="grey"), True)]
    assert (code, err, out[0]) == (2, ["error: photos: nothing there; add photos"], "warning: small")
    code, _, err = command({})  # a missing model does not keep it from looking
    assert (code, len(err), len(calls)) == (2, 3, 2)
    assert command({"train.stpes": 1})[0] == 2
    assert command({}, *HERE)[0] == 0
    assert len(calls) == 2
