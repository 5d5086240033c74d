"""Which cases a benchmark has, in which order they run, what becomes of those that do not, and the tests before it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from coat_flux.bench import runner, worker
from coat_flux.bench.configurations import CONFIGURATIONS, COUNT, LEVELS, BenchOptions, Case, named, rivals
from coat_flux.bench.limits import Geometry
from coat_flux.cli.entry import main
from coat_flux.config.coat import COATConfig

ARGUMENTS = ["--double", "1", "--single", "1", "--heads", "2", "--rank", "4", "--device", "cpu"]
TINY = {"double": 1, "single": 1, "heads": 2, "rank": 4}


def spec(level: str, configuration: str, **changes: Any) -> dict[str, Any]:
    plain = {"sizes": [[64, 1]], "geometry": TINY, "device": "cpu", "repeats": 2}
    return {"level": level, "configuration": configuration, **plain, **changes}


def figures(milliseconds: float) -> dict[str, Any]:
    found = {"what": "step", "resolution": 64, "batch": 1, "samples_ms": [milliseconds], "peak_bytes": 7}
    return {"status": "ok", "measurements": [{**found, "figures": {}}], "said": []}


def test_rounds_alternate_in_direction() -> None:
    a, b, c = (Case("step", name) for name in "abc")
    order = [(number, case.configuration) for number, case in runner.schedule([a, b, c], 3)]
    assert order == [(1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "b"), (2, "a"), (3, "a"), (3, "b"), (3, "c")]


def test_cases_put_rivals_next_to_each_other() -> None:
    options = BenchOptions(resolutions=(512, 1024), batches=(1, 4), configurations=("bf16", "coat", "adamw_fused"))
    by_level = {level: [case for case in options.cases() if case.level == level] for level in LEVELS}
    assert [(case.configuration, case.sizes) for case in by_level["step"]] == [
        (name, ((resolution, batch),)) for batch in (1, 4) for resolution in (512, 1024) for name in ("bf16", "coat")
    ]
    assert [case.sizes for case in by_level["op"]] == [((512, 1), (1024, 1))] * 2
    assert [(case.configuration, case.sizes) for case in by_level["optimizer"]] == [("adamw_fused", ())]


def test_every_configuration_is_complete() -> None:
    assert len({row.name for row in CONFIGURATIONS}) == len(CONFIGURATIONS)
    for row in CONFIGURATIONS:
        assert row.optimizer in named("optimizer")
        assert set(row.levels) <= {*LEVELS, COUNT}
        assert COATConfig.from_dict(dict(row.coat or {})).enabled
        assert row.coat is None or row.coat["memory"]["checkpointing"] in ("none", "all")  # else the limit is unknown
    for level in LEVELS:
        for name in named(level):
            assert set(rivals(level, name).values()) <= named(level).keys() | {"toolkit_default"}
    assert named("step")["coat"].fp8_linears
    assert not named("step")["coat_weight_only"].fp8_linears
    assert [name for name, row in named("step").items() if row.recomputes] == [
        "bf16_checkpointed",
        "bf16_compiled_checkpointed",
        "toolkit_default",
        "toolkit_convrot8",
        "coat_recomputed",
    ]


def test_every_row_is_as_its_trainer_runs_it() -> None:
    for row in CONFIGURATIONS:
        if row.coat is not None:
            assert COATConfig.from_dict(dict(row.coat)).fallback == "error", row.name
        without = row.coat is not None or row.name.startswith("toolkit") or row.adapters == "bf16"
        assert row.autocast is not without, row.name
    assert {row.name for row in CONFIGURATIONS if row.gpu_only} == {
        *("bf16_cudagraphs", "bf16_max_autotune", "coat_cudagraphs", "launches"),
        *("attention_cudnn", "attention_flash", "attention_efficient", "attention_fa3", "attention_fa4"),
    }
    shared = {row.weights for row in CONFIGURATIONS if row.name in ("coat", "coat_cudagraphs")}
    assert len(shared) == 1
    assert len({row.weights for row in CONFIGURATIONS if row.name in ("bf16", "bf16_adapters", "coat_per_tensor")}) == 3


@pytest.mark.parametrize(
    ("level", "configuration"), [("op", "coat"), ("step", "coat_weight_only"), ("optimizer", "coat_fp8_adamw")]
)
def test_references_are_never_timed_as_our_kernels(
    monkeypatch: pytest.MonkeyPatch, level: str, configuration: str
) -> None:
    monkeypatch.setattr(worker, "current", lambda device: device)
    monkeypatch.setattr(worker, "triton_obstacle", lambda device: "a trial gave wrong codes")
    found = worker.run(spec(level, configuration, device="cuda"))
    assert found["status"] == "failed"
    assert found["reason"].startswith("KernelsRefused: a trial gave wrong codes")
    assert "measurements" not in found


def test_what_needs_a_gpu_says_so() -> None:
    found = worker.run(spec("step", "bf16_cudagraphs"))
    assert (found["status"], found["reason"]) == ("cannot", "needs a GPU")


def test_ai_toolkits_own_code_is_reported_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_is_installed", lambda package: True)
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    found = worker.run(spec("step", "toolkit_convrot8"))
    assert found["status"] == "cannot"
    assert found["reason"] == "ImportError: convrot8 is ai-toolkit's own code: set AI_TOOLKIT_ROOT to its folder"


def test_rows_of_one_process_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU a failure ends the process: what comes after a broken kernel says nothing."""
    statuses = {"a": "ok", "b": "cannot", "c": "failed", "d": "ok"}
    written: list[list[str]] = []

    def run(asked: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        kept.setdefault("seen", []).append(asked["configuration"])
        if (tmp_path / "out").exists():
            written.append(list(json.loads((tmp_path / "out").read_text())))
        assert kept["seen"][0] == "a"
        return {"status": statuses[asked["configuration"]], "traceback": ""}

    monkeypatch.setattr(worker, "run", run)
    for device, names in (("cpu", "abcd"), ("cuda", "abc")):
        written.clear()
        worker.run_together({"configurations": list("abcd"), "device": device}, tmp_path / "out")
        assert "".join(json.loads((tmp_path / "out").read_text())) == names
        (tmp_path / "out").unlink()
    assert written == [["a"], ["a", "b"]]


def test_what_gives_no_figures_is_kept_and_not_tried_again() -> None:
    results = {
        "bf16": figures(2.0),
        "torchao_float8": {"status": "cannot", "reason": "needs the package torchao, which is not installed"},
        "coat": {"status": "out of memory", "reason": "OutOfMemoryError: 5 GB asked for"},
    }
    started, lines = [], []

    def start(asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        started.append(asked["configuration"])
        return results[asked["configuration"]]

    options = BenchOptions(("step",), (64,), (1,), 2, tuple(results), Geometry(**TINY), timeout_s=9.0)
    runs = list(runner.run_cases(options, lines.append, start))
    assert started == ["bf16", "torchao_float8", "coat", "bf16"]
    assert [(run["round"], run["configuration"], run["status"]) for run in runs] == [
        (1, "bf16", "ok"),
        (1, "torchao_float8", "cannot"),
        (1, "coat", "out of memory"),
        (2, "bf16", "ok"),
    ]
    assert [line.rsplit(" (", 1)[0] for line in lines] == [
        "[1/6] round 1, step bf16 at 64 px x 1: step 2.00 ms",
        "[2/6] round 1, step torchao_float8 at 64 px x 1: cannot run here: "
        "needs the package torchao, which is not installed",
        "[3/6] round 1, step coat at 64 px x 1: out of memory",
        "[6/6] round 2, step bf16 at 64 px x 1: step 2.00 ms",
    ]


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_is_installed", lambda package: package != "optimum.quanto")
    found = worker.run(spec("step", "toolkit_default"))
    assert found["status"] == "cannot"
    assert found["reason"] == "needs the package optimum.quanto, which is not installed"


@pytest.mark.parametrize(
    ("configuration", "error", "status", "reason"),
    [
        ("torchao_float8", ValueError("no such card\nmore"), "cannot", "ValueError: no such card"),
        ("bf16_compiled", RuntimeError("no compiler"), "cannot", "RuntimeError: no compiler"),
        ("coat", ValueError("our mistake"), "failed", "ValueError: our mistake"),
        ("bf16", ValueError("x" * 999), "failed", "ValueError: " + "x" * 287 + "…"),
        ("coat", RuntimeError("CUDA error: out of memory"), "out of memory", "RuntimeError: CUDA error: out of memory"),
    ],
)
def test_errors_become_results(
    monkeypatch: pytest.MonkeyPatch, configuration: str, error: Exception, status: str, reason: str
) -> None:
    from coat_flux.bench import models

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(worker, "_is_installed", lambda package: True)
    monkeypatch.setattr(models, "_make_model", fail)
    found = worker.run(spec("step", configuration))
    assert (found["status"], found["reason"]) == (status, reason)
    assert reason[:40].split(": ")[1] in found["traceback"]


def test_a_process_that_leaves_no_result_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WORKER", "no_such_module_here")
    found = runner.start_worker(spec("step", "bf16"), 60.0)
    assert found["status"] == "failed"
    assert "exit code 1 and no result" in found["reason"]
    assert "No module named no_such_module_here" in found["reason"]


def test_a_process_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.subprocess, "run", lambda command, **options: _hang(options["timeout"]))
    found = runner.start_worker(spec("step", "bf16"), 0.5)
    assert found == {"status": "failed", "reason": "took longer than 0.5 s and was stopped; raise --timeout"}


def _hang(timeout: float) -> None:
    raise runner.subprocess.TimeoutExpired("worker", timeout)


def test_an_unusable_device_is_refused() -> None:
    with pytest.raises(runner.MachineError, match=r"--device nonsense: .*give a device that torch can use"):
        runner.describe(BenchOptions(device="nonsense"), lambda asked, _: worker.run(asked))


# -- no figures from code whose tests fail -----------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a green test for kernels and a red one for the optimizer."""
    for folder, line in (("kernels", "assert 1 + 1 == 2"), ("optim", "assert 1 + 1 == 3")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(f"def test_sum():\n    {line}\n")
    return tmp_path


@pytest.mark.slow
def test_green_tests_of_the_level_pass(repository: Path) -> None:
    green = runner.run_tests(["op"], repository)
    assert green.passed
    assert green.text.startswith("tests/kernels: green (1 passed in ")


def test_the_folders_exist_in_this_repository() -> None:
    assert set(runner.TESTS) == set(LEVELS)
    for folders in runner.TESTS.values():
        assert all((runner.REPOSITORY / folder).is_dir() for folder in folders)


def test_an_installation_without_tests_says_so(tmp_path: Path) -> None:
    result = runner.run_tests(["step"], tmp_path)
    assert result == runner.TestResult(True, "no tests were run: this is an installation without the repository")


def test_without_pytest_the_command_says_what_to_install(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "REPOSITORY", repository)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--level", "optimizer", *ARGUMENTS]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the tests that come before figures need pytest, pytest-timeout, hypothesis; pip ")
    assert len(error.splitlines()) == 1


def test_the_bench_extra_holds_what_its_tests_need() -> None:
    setup = (runner.REPOSITORY / "setup.py").read_text(encoding="utf-8")
    extra = setup[setup.index('"bench": [') : setup.index('"test": [')]
    assert [package for package in runner.NEEDED.values() if f'"{package}>=' not in extra] == []


@pytest.mark.slow
def test_red_tests_give_exit_code_1_and_no_figures(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "REPOSITORY", repository)
    assert main(["bench", "--level", "optimizer", *ARGUMENTS, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("tests: tests/kernels tests/optim: red (1 failed, 1 passed in ")
    assert "no figures from code whose tests fail" in captured.err
    assert "assert (1 + 1) == 3" in captured.err
    assert not (tmp_path / "out").exists()


def test_arguments_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (
        (["--configs", "bf17"], "invalid choice: 'bf17'"),
        (["--resolution", "500"], "'500': must be a multiple of 16, such as 512"),
        (["--rounds", "0"], "'0': must be a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *wrong])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "--level", "optimizer", "--configs", "bf16", "--skip-tests"]) == 2
    assert "--configs bf16: none is measured at --level optimizer" in capsys.readouterr().err
