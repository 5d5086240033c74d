"""Settings and fixtures for every test: no hub access, a fixed seed, devices, and skips that say why."""

import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see scripts/_environment.py

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: kernels run on the CPU then

ALL_ONLY = (  # tests that take minutes on a busy machine: left to `python scripts/test.py --all`; at most 20
    "tests/kernels/test_compile.py",  # every kernel, compiled for GPUs that are not there
    "tests/integration/test_engine_processes.py::test_under_fsdp2_three_processes_resume_the_full_run_of_two",
    "tests/integration/test_engine_processes.py::test_a_killed_process_ends_all_with_one_message",
    "tests/integration/test_verify_catches.py",  # five pairs of runs
)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=150, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def _missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None."""
    if marker == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if marker == "triton":
        return _no_triton()
    if marker == "aitk" and not os.environ.get("AI_TOOLKIT_ROOT"):
        return "needs a real ai-toolkit checkout: set AI_TOOLKIT_ROOT to its folder"
    return None


def _no_triton() -> str | None:
    """Why kernels run neither compiled nor interpreted, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    triton, numpy = (_version(package) for package in ("triton", "numpy"))
    if not torch.cuda.is_available() and triton < (3, 7) and numpy >= (2, 4):
        return f"the interpreter of Triton {triton} takes a loop bound for a scalar, which NumPy {numpy} refuses"
    return None


def _version(package: str) -> tuple[int, ...]:
    """Major and minor; a triton under another name (triton-windows) is taken for a new one."""
    try:
        return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (999,)


def pytest_collection_finish() -> None:
    """Let the collector pass over what importing has made: a short run, which collects once, takes half the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let Python free all of it, or nanobind reports leaks."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`: also the tests of `ALL_ONLY`."""
    parser.addoption("--all", action="store_true", help="also the tests that take minutes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `ALL_ONLY` unless asked for, skip what this machine cannot run; files that run programs come first."""
    named = any("::" in argument or argument.endswith(".py") for argument in config.args)
    if not config.getoption("--all") and not named:
        left_out = [item for item in items if item.nodeid.startswith(ALL_ONLY)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    runs = ("integration", "reliability")
    items.sort(key=lambda item: item.path.parent.name not in runs)
    reasons = {marker: _missing(marker) for marker in ("gpu", "triton", "aitk")}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if torch.cuda.is_available() and item.get_closest_marker("triton") and params.get("device") == "cpu":
            item.add_marker(pytest.mark.skip(reason="Triton's interpreter runs kernels where there is no GPU"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine that tests should pass on."""
    return torch.device(request.param)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Model, photos (`PHOTOS` of the module, or 4) and output folder of the runs of a module."""
    from tests.helpers.engine_job import tiny_place

    with tiny_place(tmp_path_factory.mktemp("runs"), getattr(request.module, "PHOTOS", 4)) as place:
        yield place
