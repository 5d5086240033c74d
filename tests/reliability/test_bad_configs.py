"""Every malformed config is answered by one line that names the place, and the command by exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from coat_flux.config.check import check_job_dict
from tests.reliability.bad_configs import BAD_CONFIGS, BAD_TEXTS, Bad, check_job_file, job_with


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
def test_a_bad_job_is_one_error_at_its_key(case: Bad, trainer: str) -> None:
    job = job_with(case.changes)
    errors = [item for item in check_job_dict(job, file="f.yaml", trainer=trainer) if item.severity == "error"]
    (item,) = errors
    key = case.key[1:] if case.key.startswith("/") else f"config.process[0].{case.key}"
    assert (item.file, item.key) == ("f.yaml", key)
    assert case.says in item.text
    assert item.text.count("; ") == 1, "one remedy"
    assert len(item.line()) < 600


@pytest.mark.parametrize(("suffix", "content", "where", "says"), BAD_TEXTS)
def test_a_bad_file_is_one_error(suffix: str, content: str | bytes, where: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"job{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (item,) = check_job_file(path)
    assert item.file == str(path)
    assert where in item.line()
    assert says in item.line()
    assert "; " in item.text
