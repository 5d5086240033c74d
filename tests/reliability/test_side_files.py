"""What happens to files beside the training, to its output and its terminal ends no run and costs no save."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coat_flux.base.interrupts import Interrupts
from coat_flux.base.table import GrowingTable
from coat_flux.trainers.standalone.progress import TensorBoard

COLUMNS = ("step", "loss", "lr")
PLAIN = "step,loss,lr\n1,0.5,0.001\n2,0.25,0.001\n"
TOUCHED = {
    "another encoding": PLAIN.encode("utf-16"),
    "a lost column": b"step,loss\n1,0.5,1\n",
    "steps as decimals": b"step,loss,lr\n1.0,0.5,0.001\n",
}


def table(path: Path, step: int, said: list[str]) -> GrowingTable:
    return GrowingTable(path, COLUMNS, step, said.append)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", TOUCHED)
def test_a_table_changed_by_a_spreadsheet_is_kept_and_a_new_one_begins(tmp_path, kind):
    path, said = tmp_path / "metrics.csv", []
    path.write_bytes(TOUCHED[kind])
    grown = table(path, 2, said)
    grown.append(["3", "0.1", "0.001"])
    grown.close()
    assert text(path) == "step,loss,lr\n3,0.1,0.001\n"
    aside = tmp_path / "metrics-changed-1.csv"
    assert aside.read_bytes() == TOUCHED[kind]
    (line,) = said
    assert str(aside) in line


def test_other_line_ends_and_quotes_are_read(tmp_path):
    path, said = tmp_path / "metrics.csv", []
    path.write_bytes(b'"step","loss","lr"\r\n"1","0.5","0.001"\r\n2,0.25,0.001\r\n')
    assert table(path, 2, said).kept == 2
    assert (text(path), said) == (PLAIN, [])


def test_a_table_that_is_a_link_is_replaced_and_its_target_left_alone(tmp_path):
    mine, path = tmp_path / "mine.csv", tmp_path / "metrics.csv"
    mine.write_text(PLAIN, encoding="utf-8")
    path.symlink_to(mine)
    table(path, 0, []).append(["3", "0.1", "0.001"])
    assert text(mine) == PLAIN
    assert not path.is_symlink()


def test_a_table_that_cannot_be_written_is_written_when_it_can_be(tmp_path):
    path, said = tmp_path / "coat" / "metrics.csv", []
    path.mkdir(parents=True)  # as one that is locked
    grown = table(path, 0, said)
    grown.append(["1", "0.5", "0.001"])
    path.rmdir()
    grown.append(["2", "0.25", "0.001"])
    assert text(path).startswith(PLAIN)
    shutil.rmtree(path.parent)
    grown.append(["9", "0", "0"])
    assert text(path).endswith("\n9,0,0\n")
    assert text(path).startswith(PLAIN)
    assert len(said) == 1
    assert "the run goes on" in said[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_removed_folder_of_tensorboard_is_made_again(tmp_path):
    folder, said = tmp_path / "board", []
    board = TensorBoard(folder, 0, said.append)
    for step in range(1, 9):
        if step in (3, 6):
            while folder.exists():  # TensorBoard's own thread may write into it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
        if step == 6:
            folder.write_text("in the way")
        board.scalars({"loss": 0.5}, step)
    assert len(said) == 1
    folder.unlink()
    board.scalars({"loss": 0.5}, 9)
    board.close()
    assert list(folder.glob("events.*"))


PRINTS = """
import sys
import time
from coat_flux.base.interrupts import keep_streams
keep_streams()
for number in range(20000):
    print("line", number)
    print("line", number, file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


def test_output_whose_reader_has_gone_ends_nothing(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", PRINTS, str(done)]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert done.read_text() == "done"


HANG_UP = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")


@HANG_UP
def test_a_hang_up_never_ends_the_save_and_stays_ignored_under_nohup(monkeypatch):
    monkeypatch.setattr("coat_flux.base.interrupts.ONE_PRESS_SECONDS", -1.0)
    monkeypatch.setattr("coat_flux.base.interrupts.READER_SECONDS", 0.0)
    lines: list[str] = []
    with Interrupts(lines.append) as interrupts:
        signal.raise_signal(signal.SIGINT)  # Ctrl+C, and while the run saves its terminal is closed
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert len(lines) == 1
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lines.append) as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, ignored)


PRINTING = """
import signal, sys, time
from coat_flux.base.interrupts import Interrupts
with Interrupts(print) as interrupts:
    print("ready", flush=True)
    open(sys.argv[1] + ".ready", "w").close()
    while not interrupts.asked:
        time.sleep(0.05)
    for _ in range(3):
        print("a save is written", flush=True)
        print("and said", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("saved")
sys.exit(130)
"""


@HANG_UP
def test_output_that_nobody_reads_any_more_does_not_cost_the_save(tmp_path):
    """Standard output is a terminal that is closed, standard error a pipe whose reader has ended."""
    import pty

    (terminal, out), (reader, error) = pty.openpty(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING, str(tmp_path / "saved")],
        stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True,
    )  # fmt: skip
    os.close(out), os.close(error)
    while not (tmp_path / "saved.ready").exists():  # closed while it prints, `print` fails
        assert process.poll() is None
        time.sleep(0.05)
    os.close(terminal), os.close(reader)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 130
    assert (tmp_path / "saved").read_text() == "saved"
