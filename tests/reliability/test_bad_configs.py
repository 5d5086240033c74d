"""Malformed configs: one line that names the place; of any other no traceback and no ignored key."""

import copy
import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coat_flux.config.ai_toolkit_keys import BLOCKS
from coat_flux.config.check import check_job_dict
from coat_flux.config.coat import OPTIONS
from coat_flux.config.findings import ConfigError, Finding
from coat_flux.config.job import JobConfig
from coat_flux.config.job_file import load_job_yaml
from tests.reliability.bad_configs import ALONE, BAD_CONFIGS, BAD_TEXTS, BOTH, check_job_file, job_with


@pytest.fixture(autouse=True)
def _no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AI_TOOLKIT_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)


CASES = [
    pytest.param(case, trainer, id=f"{number}-{case.key}-{trainer}")
    for number, case in enumerate(BAD_CONFIGS)
    for trainer in case.trainers
]


@pytest.mark.parametrize(("case", "trainer"), CASES)
def test_a_bad_job_is_one_error_at_its_key(case, trainer):
    job = job_with(case.changes)
    errors = [item for item in check_job_dict(job, file="f.yaml", trainer=trainer) if item.severity == "error"]
    (item,) = errors
    key = case.key[1:] if case.key.startswith("/") else f"config.process[0].{case.key}"
    assert (item.file, item.key) == ("f.yaml", key)
    assert case.says in item.text
    assert item.text.count("; ") == 1, "one remedy"
    assert len(item.line()) < 600


@pytest.mark.parametrize(("suffix", "content", "where", "says"), BAD_TEXTS)
def test_a_bad_file_is_one_error(suffix, content, where, says, tmp_path):
    path = tmp_path / f"job{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (item,) = check_job_file(path)
    assert item.file == str(path)
    assert where in item.line()
    assert says in item.line()
    assert "; " in item.text


# -- valid configs, changed everywhere --------------------------------------------------------------------------------
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
JOBS: tuple[dict[str, Any], ...] = (job_with(), *(load_job_yaml(path) for path in CONFIGS))
NAMES = {part for option in OPTIONS for part in option.key.split(".")}
NAMES |= {name for block in BLOCKS.values() for name in block}  # a misspelled key may be another one
JUNK = (None, True, -1, 10**400, float("nan"), "x\0", [None], {None: 1}, datetime.date(2024, 1, 1))
Path_ = tuple[Any, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The path of everything in a job but for the user's own `meta`."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if (*path, key)[:1] != ("meta",):
            yield (*path, key)
            yield from places(item, (*path, key))


def at(job: Any, path: Path_) -> Any:
    for key in path:
        job = job[key]
    return job


def dotted(path: Path_) -> str:
    """The path as findings write it."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def errors(job: Any, trainer: str) -> list[Finding]:
    """The errors of a job; every finding is one line, and errors have a remedy."""
    items = check_job_dict(job, file="f.yaml", trainer=trainer)
    for item in items:
        assert item.line().startswith("f.yaml: ")
        assert "\n" not in item.line()
        assert item.text
        assert "; " in item.text or item.severity == "warning"
    return [item for item in items if item.severity == "error"]


def misspelled(word: str) -> set[str]:
    """A key as people misspell it."""
    middle = len(word) // 2
    left_out, doubled = word[:middle] + word[middle + 1 :], word[:middle] + word[middle] + word[middle:]
    return {left_out, doubled, word.upper(), word.replace("_", "-"), f"{word}s", f" {word}"} - {word, *NAMES}


def test_the_configs_have_no_error():
    assert [errors(job, trainer) for job in JOBS for trainer in BOTH] == [[]] * (2 * len(JOBS))


@pytest.mark.parametrize("trainer", BOTH)
def test_a_renamed_key_is_always_named(trainer):
    """The keys of all configs, each misspelled in one way after the other."""
    for i, job in enumerate(JOBS):
        for number, path in enumerate(path for path in places(job) if isinstance(path[-1], str)):
            if path[-2:-1] == ("optimizer_params",) and trainer not in ALONE:
                continue  # which ai-toolkit hands to an optimizer of its own
            spellings = sorted(misspelled(path[-1]))
            new, changed = spellings[(i + number) % len(spellings)], copy.deepcopy(job)
            block = at(changed, path[:-1])
            block[new] = block.pop(path[-1])
            items = errors(changed, trainer)
            assert items, path
            if len(path) >= 3:  # without `config` or `process` there is nothing left to name
                assert f"{dotted(path[:-1])}.{new.strip()}" in [item.key.replace(". ", ".") for item in items]


@pytest.mark.parametrize("trainer", BOTH)
def test_any_value_in_any_place_is_answered(trainer):
    for path in places(job_with()):
        for value in JUNK:
            job = job_with()
            at(job, path[:-1])[path[-1]] = value
            if errors(job, trainer) and trainer in ALONE:
                with pytest.raises(ConfigError):
                    JobConfig.from_dict(job)
