"""Malformed configs: one line that names the place. Mutated ones: a job or findings, no traceback, no ignored key."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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


# -- valid configs, mutated ------------------------------------------------------------------------------------------
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
JOBS: tuple[dict[str, Any], ...] = (job_with(), *(load_job_yaml(path) for path in CONFIGS))
Path_ = tuple[Any, ...]

WORDS = sorted({part for option in OPTIONS for part in option.key.split(".")} | {"optimiser", "", "a.b", "\n"})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([str(choice) for option in OPTIONS for choice in option.choices]),
    st.sampled_from(["1e-4", "true", "16", "coat_fp8", "adamw", "\0", "~/x"]),
    st.dates(),
)
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=6), st.integers(), st.none())
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


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


NAMES = {*(name for block in BLOCKS.values() for name in block), *WORDS}  # a misspelled key may be another one
KEYS = [(i, path) for i, job in enumerate(JOBS) for path in places(job) if isinstance(path[-1], str)]


def errors(job: Any, trainer: str) -> list[Finding]:
    """The errors of a job; every finding is one line, and errors have a remedy."""
    items = check_job_dict(job, file="f.yaml", trainer=trainer)
    for item in items:
        assert item.line().startswith("f.yaml: ")
        assert "\n" not in item.line()
        assert item.text
        assert "; " in item.text or item.severity == "warning"
    return [item for item in items if item.severity == "error"]


def mangled(word: str, how: int, where: int) -> str:
    """A key as people misspell it."""
    i = where % len(word)
    return (
        word[:i] + word[i + 1 :],
        word[:i] + word[i] + word[i:],
        word[:i] + word[i : i + 2][::-1] + word[i + 2 :],
        word[:i] + "x" + word[i + 1 :],
        word.upper(),
        word.replace("_", "-"),
        f"{word}s",
        f" {word}",
    )[how % 8]


def check_renamed(job: dict[str, Any], path: Path_, new: str, trainer: str) -> None:
    """A key that nobody knows is an error, which names it."""
    job = copy.deepcopy(job)
    block = at(job, path[:-1])
    block[new] = block.pop(path[-1])
    items = errors(job, trainer)
    assert items
    if len(path) >= 3:  # without `config` or `process` there is nothing left to name
        assert f"{dotted(path[:-1])}.{new.strip()}" in [item.key.replace(". ", ".") for item in items]


def test_the_configs_have_no_error():
    assert [errors(job, trainer) for job in JOBS for trainer in BOTH] == [[]] * (2 * len(JOBS))


@pytest.mark.parametrize("trainer", BOTH)
@settings(max_examples=30)
@given(place=st.sampled_from(KEYS), how=st.integers(0, 7), where=st.integers(0, 40))
def test_a_renamed_key_is_always_named(trainer, place, how, where):
    i, path = place
    new = mangled(path[-1], how, where)
    assume(new not in {path[-1], *NAMES})
    check_renamed(JOBS[i], path, new, trainer)


@pytest.mark.parametrize("trainer", BOTH)
@settings(max_examples=50)
@given(data=st.data())
def test_mutated_jobs_are_answered_and_accepted_ones_ignore_no_key(trainer, data):
    job = copy.deepcopy(data.draw(st.sampled_from(JOBS)))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(job, data)
    if not errors(job, trainer):
        paths = [path for path in places(job) if isinstance(path[-1], str)]
        check_renamed(job, data.draw(st.sampled_from(paths)), "nobody_reads_this", trainer)
    elif trainer in ALONE:
        with pytest.raises(ConfigError):
            JobConfig.from_dict(job)


def mutate(job: dict[str, Any], data: st.DataObject) -> None:
    """Drop, rename, retype, swap or add one thing somewhere."""
    there = list(places(job))
    if not there:
        return
    path = data.draw(st.sampled_from(there))
    block, key = at(job, path[:-1]), path[-1]
    what = data.draw(st.sampled_from(["drop", "rename", "retype", "move", "add"]))
    if what == "drop":
        del block[key]
    elif what == "rename" and isinstance(key, str):
        new = mangled(key, data.draw(st.integers(0, 7)), data.draw(st.integers(0, 40))) if key else "x"
        block[new] = block.pop(key)
    elif what == "move":
        block[key] = copy.deepcopy(at(job, data.draw(st.sampled_from(there))))
    elif what == "add" and isinstance(block[key], dict):
        block[key][data.draw(st.sampled_from(["x", 5, None, "lr", "enabled", "type"]))] = copy.deepcopy(data.draw(junk))
    else:
        block[key] = copy.deepcopy(data.draw(junk))
