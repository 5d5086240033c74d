"""The check of a whole job: what each trainer is told, what only surprises."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coat_flux.cli.check import add_parsers, run
from coat_flux.config.ai_toolkit_keys import SOURCES, VERSION
from coat_flux.config.check import check_job_dict, check_job_file
from coat_flux.config.findings import Finding
from tests.reliability.bad_config import BadConfig, valid_job

AI_TOOLKIT = "ai-toolkit"


def job(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The valid job with dotted keys of its process entry set."""
    made = valid_job()
    for dotted, value in changes:
        place = made["config"]["process"][0]
        *parents, leaf = dotted.split(".")
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else place.setdefault(parent, {})
        place[leaf] = value
    return made


def found(*changes: tuple[str, Any], **keywords: Any) -> list[Finding]:
    return check_job_dict(job(*changes), file="f.yaml", **keywords)


# -- what a finding is ------------------------------------------------------------------------------------------------


def test_a_finding_has_its_parts_and_is_one_line() -> None:
    (item,) = found(("train.steps", 0))
    assert item == Finding(
        "error",
        "f.yaml",
        "config.process[0].train.steps",
        "0",
        "must be a whole number of at least 1",
        "write 1000, for example",
    )
    assert item.line() == f"f.yaml: {item.key}=0: {item.rule}; {item.remedy}"


def test_errors_come_before_warnings_and_what_follows_from_a_mistake_is_no_second_one() -> None:
    items = found(("sample.prompts", ["a shirt"]), ("train", "fast"), ("network.linear", "16"))
    assert [(item.severity, item.key.removeprefix("config.process[0].")) for item in items] == [
        ("error", "network.linear"),
        ("error", "train"),
        ("warning", "sample.prompts[0]"),
    ]


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"a: [\n")
    (item,) = check_job_file(path, trainer=AI_TOOLKIT)
    assert (item.severity, item.file, item.key) == ("error", str(path), "line 2, column 1")


def test_only_two_hosts_are_known() -> None:
    with pytest.raises(ValueError, match="trainer='comfy': must be one of standalone, ai-toolkit"):
        check_job_dict(job(), trainer="comfy")


@pytest.mark.parametrize("host", ["standalone", AI_TOOLKIT])
def test_an_attention_kernel_needs_a_gpu(host: str) -> None:
    kernel = ("coat.speed.attention", "cudnn")
    (item,) = found(("device", "cpu"), kernel, trainer=host)
    assert (item.severity, item.key) == ("error", "config.process[0].coat.speed.attention")
    assert "device is cpu; write auto" in item.line()
    assert not found(kernel, trainer=host)


# -- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["standalone", AI_TOOLKIT])
@pytest.mark.parametrize(
    ("key", "value", "where", "words"),
    [
        ("sample.prompts", ["[trigger] a", "a red shirt"], "sample.prompts[1]", "without the trigger word 'coatwear'"),
        ("trigger_word", None, "sample.prompts[0]", "no trigger word for [trigger]"),
        ("datasets.1.resolution", 1000, "datasets[1].resolution", "trained at 992×992; write 992 or 1024"),
    ],
)
def test_what_only_surprises_is_a_warning_in_both(host: str, key: str, value: Any, where: str, words: str) -> None:
    (item,) = found((key, value), trainer=host)
    assert (item.severity, item.key) == ("warning", f"config.process[0].{where}")
    assert words in item.line()


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ([("sample.width", 1000)], "sample.width", "FLUX draws 992"),
        ([("model.qtype", "uint4")], "model.qtype", "stay as ai-toolkit quantizes them"),
        (
            [("model", {"name_or_path": "models/flux", "is_flux": True, "quantize": True})],
            "model.qtype",
            "write coat_fp8 for FP8 GEMMs",
        ),
        ([("train.optimizer", "prodigy"), ("coat", {})], "train.optimizer", "not as COAT"),
        ([("type", "concept_slider")], "type", "not checked here"),
    ],
)
def test_ai_toolkit_s_own_surprises(changes: list[tuple[str, Any]], where: str, words: str) -> None:
    (item,) = found(*changes, trainer=AI_TOOLKIT)
    assert (item.severity, item.key) == ("warning", f"config.process[0].{where}")
    assert words in item.line()


PROCESSES = {
    "ours": ([], None),
    "ai-toolkit's own": ([("type", "sd_trainer"), ("coat", None)], "write type: coat_flux_trainer"),
    "ours, left to ai-toolkit": ([("coat", {"enabled": False}), ("train.optimizer", "adamw")], "coat.enabled: true"),
    "more than a network": ([("embedding", {"trigger": "x", "tokens": 4})], "a network (a LoRA) and nothing else"),
}


@pytest.mark.parametrize("kind", PROCESSES)
def test_several_processes_train_a_network_in_our_process(kind: str) -> None:
    changes, words = PROCESSES[kind]
    items = [item for item in found(*changes, trainer=AI_TOOLKIT, num_processes=2) if item.key == "num_processes"]
    assert [words in item.line() for item in items] == ([] if words is None else [True])


def test_entries_are_each_checked() -> None:
    raw = job()
    raw["config"]["process"].append({**raw["config"]["process"][0], "train": {"stpes": 1}})
    errors = [item.key for item in check_job_dict(raw, trainer=AI_TOOLKIT) if item.severity == "error"]
    assert "config.process[1].train.stpes" in errors
    assert not any(key.startswith("config.process[0].train") for key in errors)


def test_keys_of_ai_toolkit_alone_are_legal_there() -> None:
    changes = [("train.do_cfg", True), ("model.vae_path", "v"), ("adapter", {"type": "ip"}), ("sample.format", "png")]
    assert found(*changes, trainer=AI_TOOLKIT) == []
    assert [item.key.removeprefix("config.process[0].") for item in found(*changes)] == [
        "train.do_cfg",
        "model.vae_path",
        "adapter",
    ]


def checkout(root: Path, *, train: str = "steps", version: str = VERSION) -> Path:
    """A folder with just what is read of ai-toolkit; its source has the key `train`."""
    files = {"version.py": f'VERSION = "{version}"\n', **dict.fromkeys(SOURCES, f"self.x = kwargs.get('{train}', 1)")}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `check` on the valid job with changes; returns (exit code, stdout lines, stderr lines)."""
    import argparse

    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(
        *changes: tuple[str, Any], options: tuple[str, ...] = ("--no-data", "--elsewhere")
    ) -> tuple[int, list[str], list[str]]:
        path = tmp_path / "job.yaml"
        path.write_bytes(BadConfig("job", (), changes=changes).content())
        parser = argparse.ArgumentParser()
        add_parsers(parser.add_subparsers())
        code = run(parser.parse_args(["check", "job.yaml", *options]))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def test_one_extra_line_is_about_the_other_host(command: Any) -> None:
    place = str(Path("output") / "run")
    last = f"job.yaml: no error found; 'run' would train 1500 steps into {place}"
    name = f"ai-toolkit {VERSION}"
    here = ("--no-data", "--elsewhere")
    assert command() == (0, [f"{name}: would run it too", last], [])
    assert command(options=(*here, "--host", "ai-toolkit")) == (0, [last], [])

    code, out, err = command(("train.do_cfg", True))
    assert (code, err) == (0, [])
    assert out[0] == "the stand-alone trainer: would not run it:"
    assert "train.do_cfg=true: not supported by the stand-alone trainer" in out[1]
    assert out[2:] == [last]
    code, out, err = command(("train.do_cfg", True), options=("--host", "standalone", *here))
    assert (code, out, len(err)) == (2, [f"{name}: would run it"], 1)

    code, out, err = command(("train.stpes", 1))
    assert (code, out, len(err)) == (2, [f"{name}: would not run it either, for the same reasons"], 1)

    code, out, err = command(("device", "cuda:1"))
    assert (code, err) == (0, [])
    assert out[0] == f"{name}: would not run it:"
    assert out[1].startswith("  job.yaml: config.process[0].device='cuda:1': ")
    assert out[2:] == [last]


def test_whoever_is_meant_judges(command: Any, tmp_path: Path) -> None:
    """ai-toolkit inside its folder or with --ai-toolkit; else it is enough that one trainer takes the job."""
    only_aitk, only_alone = ("datasets.0.is_reg", True), ("device", "mps")
    with_bar = ("--no-data", "--elsewhere", "--ai-toolkit", str(checkout(tmp_path / "aitk")))
    code, out, err = command(only_aitk, options=with_bar)
    assert (code, err, out[0]) == (0, [], "the stand-alone trainer: would not run it:")
    assert command(("device", "cuda:1"))[0] == 0
    code, out, err = command(("device", "cuda:1"), options=with_bar)
    assert (code, len(err), out) == (2, 1, ["the stand-alone trainer: would run it"])
    checkout(tmp_path)  # the working directory
    assert command(("device", "cuda:1"))[0] == 2
    assert command(only_aitk)[0] == 0
    assert command(only_aitk, options=("--no-data", "--elsewhere", "--host", "standalone"))[0] == 2
    assert command(only_alone)[0] == 0


@pytest.mark.parametrize(
    "changes",
    [
        (("datasets.0.mask_path", "."),),
        (("datasets.0.is_reg", True),),
        (("model.is_flux", False), ("model.arch", "flux_kontext"), ("datasets.0.control_path", ".")),
        (
            ("model", {"name_or_path": "models/sdxl", "is_xl": True}),
            ("train.noise_scheduler", "ddpm"),
            ("sample.sampler", "ddpm"),
        ),
    ],
)
def test_what_runs_in_ai_toolkit_alone_is_no_error(command: Any, changes: tuple[tuple[str, Any], ...]) -> None:
    code, out, err = command(*changes)
    assert (code, err) == (0, [])
    assert "the stand-alone trainer: would not run it:" in out
    assert out[-1].startswith("job.yaml: no error found")


def test_the_data_is_looked_at_unless_told_not_to(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def inspect(datasets: Any, trigger_word: Any, *, background: str, transparency: str, t5_of: str) -> Any:
        assert t5_of == "models/flux"
        seen.append(([entry.folder_path for entry in datasets], trigger_word, background, transparency))
        return SimpleNamespace(errors=["photos: nothing there; add photos"], warnings=["small"])

    monkeypatch.setattr("coat_flux.data.preflight.inspect_datasets", inspect)
    code, out, err = command(("coat.data.background", "grey"), options=("--elsewhere",))
    assert seen == [(["photos", "details"], "coatwear", "grey", "background")]
    assert (code, err) == (2, ["error: photos: nothing there; add photos"])
    assert out[0] == "warning: small"
    code, _, err = command(options=())  # a missing model is no reason not to look
    assert (code, len(err), len(seen)) == (2, 3, 2)
    assert command(("train.stpes", 1), options=())[0] == 2
    assert command()[0] == 0
    assert len(seen) == 2


def test_a_process_of_another_extension_is_only_named(command: Any) -> None:
    changes = (("type", "concept_slider"), ("training_folder", ...), ("datasets", "x"), ("train", 5))
    code, out, err = command(*changes, options=("--host", "ai-toolkit"))
    assert (code, err) == (0, [])
    assert out[0].startswith("warning: job.yaml: config.process[0].type='concept_slider': ")
    assert out[1:] == ["job.yaml: no error found"]
