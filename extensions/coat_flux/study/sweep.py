"""`coat-flux sweep`: combinations of values chosen by Optuna, trained as ordinary runs, several at a time.

    <training_folder>/<name>_sweep/
        trials.journal                  Optuna's storage: the combinations so far, and their losses
        report.html                     the ranking and the curves, rewritten after each run
        lr0.0001_linear8_seed42.yaml    the config of a run
        lr0.0001_linear8_seed42.log     the output of its `coat-flux train`
        lr0.0001_linear8_seed42/ …      its run folder

A *trial* is one combination of values, with one run for each seed. A run differs from the config in the keys of
`--set`, its seed, and what all runs share: photos held out by name, so that no seed changes them, samples at its end,
and one checkpoint. A restarted sweep reuses finished runs, resumes the others, and waits for a run that outlived a
killed sweep. `ranking.py` says which trial is best.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import yaml

from ..base.errors import UserError
from ..base.files import write_file
from ..blocks.models.check import check_models
from ..config.check import check_job_dict
from ..config.findings import ConfigError, show
from ..config.job import JobConfig
from ..config.job_file import load_job_yaml, load_written, parse
from ..data.files import find_images
from ..data.hold_out import choose_hold_out
from ..data.preflight import check_data
from ..mini_flux import provide_embedded
from ..pages.run import RunFolder, RunFolderError
from ..saves.errors import ResumeError
from ..saves.interrupts import Interrupts
from ..saves.repair import run_lock
from .study import POINTS_OF_CURVE, held_out_count, require_same_job

__all__ = [
    "FAILED",
    "FINISHED",
    "OPEN",
    "Run",
    "Sweep",
    "SweepError",
    "Trial",
    "find_axis",
    "short_keys",
    "value_text",
]

FINISHED, FAILED, OPEN = "finished", "failed", "not finished"
KEY = re.compile(r"[^.\[\]\s]+(\[\d+\])*(\.[^.\[\]\s]+(\[\d+\])*)*")
FRAME = "config.process[0]."  # prefix of a key in findings
SAME = "is what trials are measured on, so their losses would not compare; change it in the config"
FIXED = {
    r"name|type|training_folder|log_dir": "every trial has its own; remove it",
    r"training_seed": "is set by --seeds K, which trains each combination from K seeds; write that",
    r"validation(\..*)?|trigger_word|model(\.(name_or_path|extras_name_or_path|arch|is_flux))?": SAME,
    r"datasets(\[\d+\](\.(folder_path|resolution|caption_ext|default_caption))?)?": SAME,
}
LONGEST_VALUE, LONGEST_NAME = 24, 100  # characters, of a folder's name
SAMPLER_SEED = 0
CLI = Path(__file__).resolve().parents[1] / "cli"
POLL_SECONDS = 0.5
END_SECONDS = 10.0  # grace period of a run that must end at once
LOG_TAIL = 40  # lines searched for the reason of a failure


class SweepError(UserError, ValueError):
    """A sweep cannot be run as requested."""


def find_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `KEY=VALUE,VALUE` into the key and its values, which are YAML's, `[512, 768]` being one.

    Raises:
        SweepError: malformed, or the key cannot be varied.
        ConfigError: the values are not YAML.
    """
    key, _, values = (part.strip() for part in text.partition("="))
    key = key.removeprefix(FRAME)
    if not KEY.fullmatch(key) or not values:
        raise SweepError(f"--set {text}: must be KEY=VALUE,VALUE; write train.lr=1e-4,3e-4, for example")
    for pattern, rule in FIXED.items():
        if re.fullmatch(pattern, key):
            raise SweepError(f"--set {key}: {rule}")
    parsed = parse(f"[{values}]", f"--set {key}")
    return key, list({show(value): value for value in parsed}.values())


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Key → its last part, if unique."""
    last = {key: key.rpartition(".")[2] for key in keys}
    count = Counter(last.values())
    return {key: leaf if count[leaf] == 1 else key for key, leaf in last.items()}


def value_text(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else show(value)


@dataclass
class Run:
    """One run of a sweep, and its results so far: `curve` of (step, held-out loss), median `seconds` per step."""

    name: str
    steps: int
    job: Mapping[str, Any]
    state: str = OPEN
    curve: Sequence[tuple[float, float]] = ()
    seconds: float | None = None
    message: str = ""

    @property
    def loss(self) -> float:
        """The final one; NaN before the end."""
        return self.curve[-1][1] if self.state == FINISHED and self.curve else math.nan

    def read(self, folder: Path, failure: str = "") -> None:
        """Read the results of its folder in the sweep's; `failure` is the reason of a failure."""
        self.state, self.message = (FAILED, failure) if failure else (OPEN, "")
        try:
            run = RunFolder(folder / self.name)
            if any(save.name == self.name and save.step == self.steps for save in run.saves):
                self.state, self.message = FINISHED, ""
            paces = [seconds for _, seconds in run.metrics.get("s_per_it", [])]
            self.seconds = median(paces) if paces else None
            self.curve = run.validation
        except RunFolderError:
            return
        except (OSError, ValueError) as error:
            self.state, self.message = FAILED, failure or f"{folder / self.name}: {error}"

    def describe(self) -> str:
        """State and loss in a few words."""
        if self.state == FAILED:
            return f"failed: {self.message}"
        if not self.curve:
            return self.state
        step, loss = self.curve[-1]
        return f"{self.state}, held-out loss {loss:.6f} at step {step:.0f}"


class Trial(NamedTuple):
    """One combination of values, and its run of each seed."""

    settings: Mapping[str, Any]
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        """Runs with a loss."""
        return [run for run in self.runs if math.isfinite(run.loss)]

    @property
    def loss(self) -> float:
        """The mean over finished runs; NaN without one."""
        return fmean(run.loss for run in self.finished) if self.finished else math.nan


class Sweep:
    """One sweep, of at most `most` combinations (None: all), `total` runs in all.

    With `tpe`, Optuna's TPE sampler chooses them by the losses so far; else the order is random, without repetition.

    Raises:
        SweepError: a key is given twice, a value has no place in the config, or Optuna is not installed.
        ConfigError: all problems of the config, a value or the photos, as `coat-flux check` prints them.
        DatasetError: the photos to hold out cannot be chosen.
    """

    def __init__(
        self,
        config: str,
        axes: Sequence[tuple[str, Sequence[Any]]],
        seeds: Sequence[int],
        folder: Path,
        *,
        name: str | None = None,
        most: int | None = None,
        tpe: bool = False,
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise SweepError(f"sweep needs Optuna ({error}): pip install 'coat-flux[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        for key, count in Counter(key for key, _ in axes).items():
            if count > 1:
                raise SweepError(f"--set {key}: is given twice; write all of its values behind one =")
        self.job = JobConfig.load(config, name=name)
        errors, _ = check_data(self.job.raw)
        if errors:
            raise ConfigError(errors)
        self.folder, self.held_out = folder, _hold_out(self.job)
        self._config, self._seeds, self._tpe = config, seeds, tpe
        self._values = {key: {show(value): value for value in values} for key, values in axes}
        combinations = math.prod(len(values) for values in self._values.values())
        self._most = combinations if most is None else min(most, combinations)
        self.trials: list[Trial] = []
        self.total = self._most * len(seeds)
        self._lock, self._ends_at_once = threading.Lock(), False
        self._check_values()

    @property
    def runs(self) -> list[Run]:
        """The runs of all trials so far."""
        return [run for trial in self.trials for run in trial.runs]

    def run(self, *, jobs: int, log: Callable[[str], None], on_result: Callable[[], None]) -> list[Trial]:
        """Train unfinished runs, `jobs` at a time; one that fails does not stop the others.

        `on_result` is called at the start and after each run. Raises VerifyError if a folder has a run of other
        settings, ResumeError if another sweep is using it, and KeyboardInterrupt once current runs are saved.
        """
        with run_lock(self.folder):
            provide_embedded(self.job.model.name_or_path)
            study = self._open_study()
            for chosen in study.trials:
                self._add(chosen.params)
            waiting = [run for run in self.runs if run.state != FINISHED]
            log(f"sweep: {self.total} trials, {len(self.runs) - len(waiting)} of them finished, in {self.folder}")
            on_result()
            with Interrupts(log) as interrupts, ThreadPoolExecutor(jobs) as pool:

                def work() -> None:
                    while not interrupts.asked and (run := self._next(study, waiting)) is not None:
                        code = self._train(run, jobs, interrupts, log)
                        failed = code != 0 and not interrupts.asked
                        with self._lock:
                            run.read(self.folder, _reason(self.folder / f"{run.name}.log", code) if failed else "")
                            done = sum(one.state == FINISHED for one in self.runs)
                            log(f"{run.name}: {run.describe()} ({done} of {self.total} finished)")
                            self._tell(study)
                            on_result()

                futures = [pool.submit(work) for _ in range(jobs)]
                try:
                    while wait(futures, POLL_SECONDS).not_done:
                        pass
                except KeyboardInterrupt:  # the second one
                    interrupts.asked = self._ends_at_once = True
                    raise
                for future in futures:
                    future.result()
            if interrupts.asked:
                raise KeyboardInterrupt
        self.total = len(self.runs)  # TPE may choose a combination twice
        return self.trials

    # -- which trials --------------------------------------------------------------------------------------------------

    def _check_values(self) -> None:
        """Check every value with the first ones of the other keys, before any run starts."""
        first = {key: next(iter(values.values())) for key, values in self._values.items()}
        lines: dict[str, None] = {}
        for key, values in self._values.items():
            if len({_word(value) for value in values.values()}) < len(values):
                raise SweepError(f"--set {key}: trials would have the same folder; write values that differ more")
            for value in values.values():
                lines |= dict.fromkeys(self._errors({**first, key: value}, check_job_dict))
        if not lines:
            lines |= dict.fromkeys(self._errors(first, check_models))
        if lines:
            raise ConfigError(list(lines))

    def _errors(self, settings: Mapping[str, Any], check: Callable[..., Any]) -> list[str]:
        raw = load_job_yaml(self._config, name="trial")
        self._change(raw["config"]["process"][0], settings, self._seeds[0])
        return [item.line() for item in check(raw, file=self.job.file) if item.severity == "error"]

    def _open_study(self) -> Any:
        """Optuna's study of these keys and values; other values make another one, which finds the same runs."""
        optuna, path = self._optuna, str(self.folder / "trials.journal")
        space = {key: list(values) for key, values in self._values.items()}

        class Grid(optuna.samplers.GridSampler):  # type: ignore[misc]
            def after_trial(self, *_: Any) -> None:
                """Do nothing: it would stop Optuna's own loop, which is not used."""

        sampler = Grid(space, seed=SAMPLER_SEED)
        if self._tpe:
            sampler = optuna.samplers.TPESampler(seed=SAMPLER_SEED, constant_liar=True)
        lock = optuna.storages.journal.JournalFileOpenLock(path)
        backend = optuna.storages.journal.JournalFileBackend(path, lock)
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            sampler=sampler,
            study_name=f"{type(sampler).__name__} {space}",
            load_if_exists=True,
        )

    def _next(self, study: Any, waiting: list[Run]) -> Run | None:
        """An unfinished run, of the next combination if none waits."""
        with self._lock:
            distribution = self._optuna.distributions.CategoricalDistribution
            while not waiting and len(study.trials) < self._most:
                chosen = study.ask({key: distribution(list(values)) for key, values in self._values.items()})
                waiting += [run for run in self._add(chosen.params) if run.state != FINISHED]
                self._tell(study)
            return waiting.pop(0) if waiting else None

    def _settings(self, params: Mapping[str, str]) -> dict[str, Any]:
        return {key: values[params[key]] for key, values in self._values.items()}

    def _add(self, params: Mapping[str, str]) -> list[Run]:
        """The runs of a combination with their current state; none if TPE has chosen it before."""
        settings = self._settings(params)
        if any(trial.settings == settings for trial in self.trials):
            return []
        words = [re.sub(r"\W+", "_", short) + _word(settings[key]) for key, short in short_keys(settings).items()]
        stem = "_".join(words)[:LONGEST_NAME]
        runs = []
        for seed in self._seeds:
            name = f"{stem}_seed{seed}"
            job = load_written(self._config, name=name)
            steps = self._change(job["config"]["process"][0], settings, seed)
            require_same_job(self.folder / name, job)
            run = Run(name, steps, job)
            run.read(self.folder)
            runs.append(run)
        self.trials.append(Trial(settings, runs))
        return runs

    def _tell(self, study: Any) -> None:
        """Report trials to Optuna once all of their runs are finished, or one failed."""
        for chosen in study.trials:
            settings = self._settings(chosen.params)
            trial = next(trial for trial in self.trials if trial.settings == settings)
            states = {run.state for run in trial.runs}
            if states == {FINISHED}:
                study.tell(chosen.number, fmean(run.loss for run in trial.runs), skip_if_finished=True)
            elif FAILED in states:
                study.tell(chosen.number, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def _change(self, process: dict[str, Any], settings: Mapping[str, Any], seed: int) -> int:
        """Turn the config's process entry into that of a run; returns its steps."""
        for key in ("name", "log_dir"):
            process.pop(key, None)
        process.update(training_folder=str(self.folder), training_seed=seed)
        process.setdefault("train", {})["skip_first_sample"] = True
        process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
        for key, value in settings.items():
            _set_value(process, key, value)
        rank = settings.get("network.linear", settings.get("network.rank"))
        if isinstance(rank, int) and rank > 0:  # on FLUX alpha is the rank
            for alpha in ("linear_alpha", "alpha"):
                if alpha in (process.get("network") or {}) and f"network.{alpha}" not in settings:
                    process["network"][alpha] = rank
        steps = self.job.train.steps
        if isinstance(process["train"], dict) and isinstance(process["train"].get("steps"), int):
            steps = process["train"]["steps"]
        every = self.job.validation.every if self.job.validation.hold_out else max(1, steps // POINTS_OF_CURVE)
        process["validation"] = {"hold_out": list(self.held_out), "every": every}
        process["sample"] = {**(process.get("sample") or {}), "sample_every": steps}
        return steps

    # -- their processes -----------------------------------------------------------------------------------------------

    def _train(self, run: Run, jobs: int, interrupts: Interrupts, log: Callable[[str], None]) -> int:
        """Run `coat-flux train`, passing on interrupts; returns its exit code."""
        folder, config = self.folder / run.name, self.folder / f"{run.name}.yaml"
        if _is_taken(folder):
            log(f"{run.name}: still trains in a process of an earlier sweep, which is waited for")
        while _is_taken(folder):
            time.sleep(POLL_SECONDS)
            if interrupts.asked:
                return 0
        write_file(config, yaml.safe_dump(dict(run.job), sort_keys=False, allow_unicode=True))
        environment = dict(os.environ)
        if jobs > 1:  # processes that each use every core slow each other down
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        with (self.folder / f"{run.name}.log").open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, str(CLI), "train", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=os.name == "posix",  # the terminal's Ctrl+C goes to the sweep, which passes it on
            )
            log(f"{run.name}: started (coat-flux watch {folder})")
            while process.poll() is None and not interrupts.asked:
                time.sleep(POLL_SECONDS)
            if os.name == "posix":  # on Windows the console has already interrupted it
                process.send_signal(signal.SIGINT)
            while process.poll() is None and not self._ends_at_once:
                time.sleep(POLL_SECONDS)
            try:
                return process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()


def _hold_out(job: JobConfig) -> list[str]:
    """Names of held-out photos: as many as configured, else a tenth, as `verify` does."""
    folders = [Path(entry.folder_path) for entry in job.datasets]
    photos = {path.resolve() for folder in folders for path in find_images(folder)}
    chosen = choose_hold_out(folders, job.validation.hold_out or held_out_count(len(photos)), job.training_seed)
    names = [path.relative_to(folder) for folder, held in zip(folders, chosen, strict=True) for path in held]
    return list(dict.fromkeys(path.as_posix() for path in names))


def _word(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", value_text(value)).strip("-.")[:LONGEST_VALUE].lower()


def _set_value(process: Any, key: str, value: Any) -> None:
    *parents, leaf = [int(step[1:-1]) if step[0] == "[" else step for step in re.findall(r"\[\d+\]|[^.\[\]]+", key)]
    block = process
    try:
        for step in parents:
            if isinstance(step, str) and block.get(step) is None:
                block[step] = {}
            block = block[step]
        if isinstance(leaf, int) and leaf >= len(block):
            raise IndexError(leaf)
        block[leaf] = value
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise SweepError(
            f"--set {key}: the config has no such place; write a key as the errors of coat-flux check name it"
        ) from error


def _is_taken(run: Path) -> bool:
    if not run.exists():
        return False
    try:
        with run_lock(run):
            return False
    except ResumeError:
        return True


def _reason(path: Path, code: int) -> str:
    """The last error of a log, or its last line."""
    lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-LOG_TAIL:]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = errors or [line for line in lines if line.strip()] or ["no output"]
    return f"{last[-1]} (exit code {code}, {path.name})"
