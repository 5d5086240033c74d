"""A sweep: the trials of a grid as ordinary runs, several at a time, ranked by their held-out loss.

    <training_folder>/<name>_sweep/
        report.html                     the ranking and the curves, written again after each trial
        lr0.0001_linear8_seed42.yaml    the config of a trial
        lr0.0001_linear8_seed42.log     what its `coat-flux train` printed
        lr0.0001_linear8_seed42/ …      its run folder

Each trial is a process of `coat-flux train`. A sweep that is started again takes finished trials as they are and starts
the others, which resume by themselves; so do those of a grid that grew. A trial that outlived a killed sweep is waited
for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO

import yaml

from ..base.files import write_file
from ..config.job import JobConfig
from ..mini_flux.folder import provide_embedded
from ..pages.run import RunFolder, RunFolderError
from ..saves.errors import ResumeError
from ..saves.interrupts import Interrupts
from ..saves.lock import run_lock
from .grid import Trial
from .ranking import FAILED, FINISHED, OPEN, Result
from .runs import require_same

__all__ = ["read_trial", "run_trials"]

CLI = Path(__file__).resolve().parents[1] / "cli"
POLL_SECONDS = 0.5
END_SECONDS = 10.0  # that a run may take to end at once
LOG_TAIL = 40  # lines in which the reason of a failure is looked for


def read_trial(trial: Trial, folder: Path, failed: str = "") -> Result:
    """What a trial has come to so far.

    Args:
        trial: of the sweep.
        folder: of the sweep.
        failed: why it ended, where it did and not well.
    """
    path = folder / trial.name
    try:
        run = RunFolder(path)
        done = any(save.name == trial.name and save.step == _steps(trial) for save in run.saves())
        paces = [seconds for _, seconds in run.metrics.get("s_per_it", [])]
        state = FINISHED if done else FAILED if failed else OPEN
        return Result(trial, state, run.validation, median(paces) if paces else None, "" if done else failed)
    except (RunFolderError, OSError, ValueError) as error:
        damaged = "" if isinstance(error, RunFolderError) else f"{path}: {error}"
        return Result(trial, FAILED if failed or damaged else OPEN, message=failed or damaged)


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    *,
    jobs: int,
    log: Callable[[str], None],
    on_result: Callable[[list[Result]], None],
) -> list[Result]:
    """Train what is not finished.

    Args:
        trials: from `make_trials`.
        folder: of the sweep.
        jobs: runs at a time.
        log: takes lines.
        on_result: called with the results so far, at the start and after each trial.

    Returns:
        What each trial came to; a run that fails does not stop the others.

    Raises:
        VerifyError: a trial's folder holds a run of other settings.
        ResumeError: another sweep is at work in the folder.
        KeyboardInterrupt: each run under way was saved.
    """
    with run_lock(folder):
        for trial in trials:
            saved = folder / trial.name / "config.yaml"
            if saved.exists():
                found = yaml.safe_load(saved.read_text(encoding="utf-8"))
                what = "is of a run with other settings"
                require_same(found.get("config"), trial.written["config"], saved, what, folder / trial.name)
        results = {trial.name: read_trial(trial, folder) for trial in trials}
        waiting = [trial for trial in trials if results[trial.name].state != FINISHED]
        log(f"sweep: {len(trials)} trials, {len(trials) - len(waiting)} of them finished, in {folder}")
        provide_embedded(trials[0].job["config"]["process"][0]["model"]["name_or_path"])
        on_result(list(results.values()))

        def end(trial: Trial, code: int, interrupted: bool) -> None:
            failed = "" if code == 0 or interrupted else _reason(folder / f"{trial.name}.log", code)
            result = results[trial.name] = read_trial(trial, folder, failed)
            done = sum(one.state == FINISHED for one in results.values())
            log(f"{trial.name}: {describe(result)} ({done} of {len(trials)} finished)")
            on_result(list(results.values()))

        with Interrupts(log) as interrupts:
            _train(waiting, folder, jobs, log, interrupts, end)
        if interrupts.asked:
            raise KeyboardInterrupt
        return list(results.values())


def describe(result: Result) -> str:
    """A result in a few words."""
    if result.state == FAILED:
        return f"failed: {result.message}"
    if not result.curve:
        return result.state
    step, loss = result.curve[-1]
    return f"{result.state}, held-out loss {loss:.6f} at step {step:.0f}"


def _train(
    waiting: list[Trial],
    folder: Path,
    jobs: int,
    log: Callable[[str], None],
    interrupts: Interrupts,
    end: Callable[[Trial, int, bool], None],
) -> None:
    """Start, watch and, once interrupted, end the processes of trials."""
    running: dict[str, tuple[Trial, subprocess.Popen[bytes], IO[bytes]]] = {}
    told, told_of = False, set[str]()
    try:
        while running or (waiting and not interrupts.asked):
            if interrupts.asked and not told:
                _signal(running)
                told = True
            taken = {trial.name for trial in waiting if _is_taken(folder / trial.name)}
            for name in sorted(taken - told_of):
                log(f"{name}: still trains in a process of an earlier sweep, which is waited for")
            told_of |= taken
            free = [trial for trial in waiting if trial.name not in taken]
            for trial in () if interrupts.asked else free[: max(0, jobs - len(running) - len(taken))]:
                waiting.remove(trial)
                running[trial.name] = (trial, *_start(trial, folder, jobs))
                log(f"{trial.name}: started (coat-flux watch {folder / trial.name})")
            time.sleep(POLL_SECONDS)
            for name, (trial, process, file) in list(running.items()):
                if process.poll() is not None:
                    file.close()
                    del running[name]
                    end(trial, process.returncode, interrupts.asked)
    finally:  # with something left, interrupted for the second time
        _signal(running)
        until = time.monotonic() + END_SECONDS
        for _, process, file in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
            file.close()


def _start(trial: Trial, folder: Path, jobs: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    config = folder / f"{trial.name}.yaml"
    write_file(config, yaml.safe_dump(dict(trial.written), sort_keys=False, allow_unicode=True))
    environment = dict(os.environ)
    if jobs > 1:  # processes that each take every core slow each other down
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    file = (folder / f"{trial.name}.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, str(CLI), "train", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=os.name == "posix",  # Ctrl+C in the terminal is for the sweep, which passes it on once
    )
    return process, file


def _signal(running: dict[str, tuple[Trial, subprocess.Popen[bytes], IO[bytes]]]) -> None:
    """Ask runs to end; on Windows the console has asked them already."""
    if os.name == "posix":
        for _, process, _ in running.values():
            process.send_signal(signal.SIGINT)


def _is_taken(run: Path) -> bool:
    if not run.exists():
        return False
    try:
        with run_lock(run):
            return False
    except ResumeError:
        return True


def _reason(path: Path, code: int) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-LOG_TAIL:]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = errors[-1:] or [line for line in lines if line.strip()][-1:]
    return f"{' '.join(last) or 'no output'} (exit code {code}, {path.name})"


def _steps(trial: Trial) -> int:
    return JobConfig.from_dict(trial.job).train.steps
