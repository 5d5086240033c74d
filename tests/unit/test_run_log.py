"""Where the lines of a run go: console, `coat/log.txt`, and what is dropped."""

import logging
import re
from pathlib import Path

import pytest

from coat_flux.base.run_log import LOG_FILE, PACKAGES, Lines, bar_options


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "coat").mkdir()
    return tmp_path


def test_details_are_in_the_file_and_on_the_console_only_if_asked(run):
    for verbose in (False, True):
        shown: list[str] = []
        lines = Lines(shown.append, verbose=verbose)
        lines.info("before the folder")
        lines.open(run)
        lines.detail("memory\nline")
        lines.record("a table")
        lines.close()
        assert shown == ["before the folder", *["memory\nline"] * verbose]
    text = (run / LOG_FILE).read_text(encoding="utf-8").splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
    expected = [f"{time}before the folder", f"{time}memory", " {21}line", f"{time}a table"] * 2  # appended
    assert len(text) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, text, strict=True))


def test_a_link_is_replaced_and_what_it_names_is_left_alone(run):
    elsewhere = run / "diary.txt"
    elsewhere.write_text("mine", encoding="utf-8")
    (run / LOG_FILE).symlink_to(elsewhere)
    lines = Lines(print)
    lines.open(run)
    lines.info("a step")
    lines.close()
    assert elsewhere.read_text(encoding="utf-8") == "mine"
    assert "a step" in (run / LOG_FILE).read_text(encoding="utf-8")


def test_warnings_of_our_packages_are_shown_and_the_rest_is_a_detail(run):
    shown: list[str] = []
    levels = [logging.getLogger(name).level for name in PACKAGES]
    lines = Lines(shown.append)
    lines.listen()
    lines.open(run)
    logging.getLogger("coat_flux.data").warning("%d photos", 4)
    logging.getLogger("coat_core.linear").info("78 linears")
    logging.getLogger("somebody").warning("else")
    lines.close()
    logging.getLogger("coat_flux.data").warning("after the run")
    assert shown == ["WARNING: 4 photos"]
    assert [line[21:] for line in (run / LOG_FILE).read_text().splitlines()] == ["WARNING: 4 photos", "78 linears"]
    assert [logging.getLogger(name).level for name in PACKAGES] == levels


def test_a_full_disk_costs_the_log_and_not_the_run(run, monkeypatch):
    shown: list[str] = []
    (run / LOG_FILE).symlink_to("/dev/full")
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    lines = Lines(shown.append)
    lines.open(run)
    for line in ("one", "two"):
        lines.info(line)
    lines.close()
    assert [line.split(" (")[0] for line in shown] == ["one", "coat/log.txt: cannot be written", "two"]
    assert "the run goes on" in shown[1]


def test_bars_are_drawn_rarely_into_a_file(monkeypatch):
    for terminal, pause in ((True, 0.5), (False, 30.0)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        assert bar_options()["mininterval"] == pause
        assert bar_options()["maxinterval"] >= pause  # tqdm redraws after this by itself
