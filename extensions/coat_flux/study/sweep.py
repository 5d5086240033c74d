"""`coat-flux sweep`: combinations of values chosen by Optuna, trained as ordinary runs, and ranked.

    <training_folder>/<name>_sweep/
        trials.journal                  Optuna's storage: the combinations so far, and their losses
        report.html                     the ranking and the curves, rewritten after each run
        lr0.0001_linear8_seed42.yaml    the config of a run
        lr0.0001_linear8_seed42.log     the output of its `coat-flux train`
        lr0.0001_linear8_seed42/ …      its run folder

A *trial* is one combination of values, with one run for each seed. A restarted sweep reuses finished runs and
resumes the others. A run's loss is its last on the held-out photos, with the same noise in all runs; that of a trial is
the mean over its seeds. Luck, s, is the pooled standard deviation of runs that differ in the seed alone:

    s² = sum over trials of sum_i (loss_i - mean)² / sum of (n - 1)

Trials tie with the best where their gap to it is at most 2 s · sqrt(1 / n + 1 / n_best); with one seed, unknown.
"""

from __future__ import annotations

import itertools
import math
import os
import random
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

from .. import __version__
from ..base.errors import UserError
from ..base.files import write_file
from ..base.interrupts import Interrupts
from ..blocks.models.check import check_models
from ..config.check import check_job_dict
from ..config.findings import ConfigError, show
from ..config.job import JobConfig
from ..config.job_file import load_job_yaml, load_written, parse
from ..data.captions import inject_trigger
from ..data.preflight import check_data
from ..mini_flux import provide_embedded
from ..pages.html import SERIES_COLOURS, Page, Tone
from ..pages.report import RISE
from ..pages.run import RunFolder, RunFolderError
from ..saves.repair import run_lock
from ..trainers.standalone.saving import save_name
from .compare import REPORT_FILE, mean_curve
from .study import POINTS_OF_CURVE, hold_out_names, one_of_several, require_same_job

FINISHED, FAILED, OPEN = "finished", "failed", "not finished"
KEY = re.compile(r"[^.\[\]\s]+(\[\d+\])*(\.[^.\[\]\s]+(\[\d+\])*)*")  # train.lr, datasets[0].resolution
FRAME = "config.process[0]."  # prefix of a key in findings
FIXED = {
    r"name|type|training_folder|log_dir": "every trial has its own; remove it",
    r"training_seed": "is set by --seeds K, which trains each combination from K seeds; write that",
    r"validation(\..*)?|trigger_word|model(\.(name_or_path|extras_name_or_path|arch|is_flux))?|"
    r"datasets(\[\d+\](\.(folder_path|resolution|caption_ext|default_caption))?)?": "losses of different trials would "
    "not compare; change it in the config",
}
LONGEST_VALUE, LONGEST_NAME = 24, 100  # characters, in a folder's name
SAMPLER_SEED = 0
CLI = Path(__file__).resolve().parents[1] / "cli"
POLL_SECONDS = 0.5
END_SECONDS = 10.0  # grace period at a second Ctrl+C
LOG_TAIL = 40  # lines searched for an error
SIGMAS = 2.0  # of a tie, at most
PICTURED = 6  # trials whose samples are shown
HOW = (
    "Each combination was trained as an ordinary run. Its loss is measured on photos that no trial is trained on, with "
    "the same noise for all, in its own precision. Ranked by the last loss, the mean over seeds."
)


def find_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `KEY=VALUE,VALUE` into the key and its YAML values (`[512, 768]` is one); raises UserError."""
    key, _, values = (part.strip() for part in text.partition("="))
    key = key.removeprefix(FRAME)
    if not KEY.fullmatch(key) or not values:
        raise UserError(f"--set {text}: must be KEY=VALUE,VALUE; write train.lr=1e-4,3e-4, for example")
    for pattern, rule in FIXED.items():
        if re.fullmatch(pattern, key):
            raise UserError(f"--set {key}: {rule}")
    parsed = parse(f"[{values}]", f"--set {key}")
    return key, list({show(value): value for value in parsed}.values())


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Key → its last part, or the whole key where several end alike."""
    leaves = {key: key.rpartition(".")[2] for key in keys}
    count = Counter(leaves.values())
    return {key: leaf if count[leaf] == 1 else key for key, leaf in leaves.items()}


def value_text(value: Any) -> str:
    """A value as tables and names show it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else show(value)


@dataclass
class Run:
    """One run and its results so far: `curve` of (step, held-out loss), median `seconds` per step."""

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
        """Read the results in the sweep's folder; `failure` is why training failed, or ""."""
        self.state, self.message = (FAILED, failure) if failure else (OPEN, "")
        try:
            run = RunFolder(folder / self.name)
            if any(save.name == self.name and save.step == self.steps for save in run.saves):
                self.state, self.message = FINISHED, ""
            paces = [seconds for _, seconds in run.metrics.get("s_per_it", [])]
            self.seconds = median(paces) if paces else None
            self.curve = run.validation
        except RunFolderError:  # not begun
            return
        except (OSError, ValueError) as error:
            self.state, self.message = FAILED, failure or f"{folder / self.name}: {error}"


class Trial(NamedTuple):
    """One combination of values, its run of each seed, and its numbers in Optuna: TPE may choose it twice."""

    settings: Mapping[str, Any]
    runs: list[Run]
    numbers: list[int]

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

    Their order is random, or with `tpe` chosen by Optuna's TPE sampler from the losses so far. Raises UserError, with
    all problems of the config, a value or the photos, as `coat-flux check` prints them.
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
            raise UserError(f"sweep needs Optuna ({error}): pip install 'coat-flux[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self.job = JobConfig.load(config, name=name)
        errors, _ = check_data(self.job.raw)
        if errors:
            raise ConfigError("\n".join(errors))
        self.folder, self.held_out = folder, hold_out_names(self.job)
        self._config, self._seeds, self._tpe = config, seeds, tpe
        self._values: dict[str, dict[str, Any]] = {}
        for key, values in axes:
            self._values.setdefault(key, {}).update({show(value): value for value in values})
        combinations = math.prod(len(values) for values in self._values.values())
        self._most = combinations if most is None else min(most, combinations)
        self.trials: list[Trial] = []
        self.total = self._most * len(seeds)
        self._lock, self._ends_at_once = threading.Lock(), False
        # every value is checked with the first ones of the other keys, before any run starts
        first = {key: next(iter(values.values())) for key, values in self._values.items()}
        variants = []
        for key, values in self._values.items():
            variants += [{**first, key: value} for value in values.values()]
        for check, cases in ((check_job_dict, variants), (check_models, [first])):
            lines: dict[str, None] = {}
            for settings in cases:
                raw = load_job_yaml(config, name="trial")
                self._change(raw["config"]["process"][0], settings, seeds[0])
                findings = check(raw, file=self.job.file)
                lines |= dict.fromkeys(item.line() for item in findings if item.severity == "error")
            if lines:
                raise ConfigError("\n".join(lines))

    @property
    def runs(self) -> list[Run]:
        """The runs of all trials so far."""
        return [run for trial in self.trials for run in trial.runs]

    def run(self, *, jobs: int, log: Callable[[str], None], on_result: Callable[[], None]) -> list[Trial]:
        """Train unfinished runs, `jobs` at a time, even if some fail; `on_result` follows each. Ctrl+C saves them."""
        with run_lock(self.folder):
            provide_embedded(self.job.model.name_or_path)
            study = self._open_study()
            waiting = [run for run in self.runs if run.state != FINISHED]
            log(f"sweep: {self.total} trials, {len(self.runs) - len(waiting)} of them finished, in {self.folder}")
            if self.trials:
                on_result()
            with Interrupts(log) as interrupts, ThreadPoolExecutor(jobs) as pool:

                def work() -> None:
                    while not interrupts.asked and (run := self._next(study, waiting)) is not None:
                        failure = self._train(run, jobs, interrupts, log)
                        with self._lock:
                            run.read(self.folder, failure)
                            text = f"{run.state}: {run.message}" if run.message else run.state
                            if run.curve:
                                step, loss = run.curve[-1]
                                text += f", held-out loss {loss:.6f} at step {step:.0f}"
                            done = sum(run.state == FINISHED for run in self.runs)
                            log(f"{run.name}: {text} ({done} of {self.total} finished)")
                            self._report(study)
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

    def _open_study(self) -> Any:
        """Optuna's study of these keys and values, with its trials so far; other values make another study."""
        optuna, path = self._optuna, str(self.folder / "trials.journal")
        space = {key: list(values) for key, values in self._values.items()}
        lock = optuna.storages.journal.JournalFileOpenLock(path)
        backend = optuna.storages.journal.JournalFileBackend(path, lock)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            sampler=optuna.samplers.TPESampler(seed=SAMPLER_SEED, constant_liar=True),
            study_name=f"{'TPE' if self._tpe else 'random'} {space}",
            load_if_exists=True,
        )
        if not self._tpe:
            combinations = list(itertools.product(*self._values.values()))
            random.Random(SAMPLER_SEED).shuffle(combinations)
            for combination in combinations[: self._most]:
                study.enqueue_trial(dict(zip(self._values, combination, strict=True)), skip_if_exists=True)
        for chosen in study.trials:
            self._add(chosen)
        return study

    def _next(self, study: Any, waiting: list[Run]) -> Run | None:
        """An unfinished run, of the next combination if none is waiting; None if no combination is left."""
        with self._lock:
            distribution = self._optuna.distributions.CategoricalDistribution
            space = {key: distribution(list(values)) for key, values in self._values.items()}
            while not waiting and sum(bool(chosen.params) for chosen in study.trials) < self._most:
                waiting += [run for run in self._add(study.ask(space)) if run.state != FINISHED]
                self._report(study)
            return waiting.pop(0) if waiting else None

    def _add(self, chosen: Any) -> list[Run]:
        """Add an Optuna trial; returns its runs, none if it has no values yet or those of an earlier one."""
        settings = {key: self._values[key][shown] for key, shown in chosen.params.items()}
        earlier = [trial for trial in self.trials if trial.settings == settings]
        for trial in earlier:
            trial.numbers.append(chosen.number)
        if earlier or not settings:
            return []
        words = []
        for key, short in short_keys(settings).items():
            word = re.sub(r"[^\w.+-]+", "-", value_text(settings[key])).strip("-.")
            words.append(re.sub(r"\W+", "_", short) + word[:LONGEST_VALUE].lower())
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
        self.trials.append(Trial(settings, runs, [chosen.number]))
        return runs

    def _report(self, study: Any) -> None:
        """Report trials to Optuna once all of their runs are finished, or one failed."""
        failed = self._optuna.trial.TrialState.FAIL
        for trial in self.trials:
            states = {run.state for run in trial.runs}
            for number in trial.numbers:
                if states == {FINISHED}:
                    study.tell(number, trial.loss, skip_if_finished=True)
                elif FAILED in states:
                    study.tell(number, state=failed, skip_if_finished=True)

    def _change(self, process: dict[str, Any], settings: Mapping[str, Any], seed: int) -> int:
        """Turn the config's process entry into a run's; returns its steps."""
        for key, value in settings.items():
            _set_value(process, key, value)
        for key, alpha in _alphas(process, settings).items():
            _set_value(process, key, alpha)
        validation = self.job.validation
        try:
            steps = process.get("train", {}).get("steps", self.job.train.steps)
            every = validation.every if validation.hold_out else max(1, steps // POINTS_OF_CURVE)
            one_of_several(process, self.folder, seed, steps, {"hold_out": self.held_out, "every": every})
        except (AttributeError, TypeError) as error:
            keys = ", ".join(settings)
            raise UserError(f"--set {keys}: train, save and sample must be mappings, steps a number") from error
        return steps

    def _train(self, run: Run, jobs: int, interrupts: Interrupts, log: Callable[[str], None]) -> str:
        """Run `coat-flux train`, passing on interrupts; returns why it failed, by its log's last error, or ""."""
        config, output = self.folder / f"{run.name}.yaml", self.folder / f"{run.name}.log"
        write_file(config, yaml.safe_dump(dict(run.job), sort_keys=False, allow_unicode=True))
        environment = dict(os.environ)
        if jobs > 1:  # processes that each use every core slow each other down
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, str(CLI), "train", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=os.name == "posix",  # the terminal's Ctrl+C goes to the sweep, which passes it on
            )
            log(f"{run.name}: started (coat-flux watch {self.folder / run.name})")
            while process.poll() is None and not interrupts.asked:
                time.sleep(POLL_SECONDS)
            if os.name == "posix":  # on Windows the console has already interrupted it
                process.send_signal(signal.SIGINT)
            while process.poll() is None and not self._ends_at_once:
                time.sleep(POLL_SECONDS)
            try:
                code = process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        if code == 0 or interrupts.asked:
            return ""
        lines = output.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-LOG_TAIL:]
        lines = [line for line in lines if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("error: ")] or lines
        return f"{errors[-1].removeprefix('error: ')} (exit code {code}, {output.name})"


def _alphas(process: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, int]:
    """Values of the alpha keys that follow a varied rank: on FLUX they equal it."""
    rank = settings.get("network.linear", settings.get("network.rank"))
    network = process.get("network") or {}
    if not isinstance(rank, int) or rank <= 0:
        return {}
    keys = {f"network.{name}": rank for name in ("linear_alpha", "alpha") if name in network}
    return {key: alpha for key, alpha in keys.items() if key not in settings}


def _set_value(process: Any, key: str, value: Any) -> None:
    """Set `a.b[0].c` in place, making missing blocks."""
    path: list[Any] = []
    for step in re.findall(r"\[\d+\]|[^.\[\]]+", key):
        path.append(int(step[1:-1]) if step[0] == "[" else step)
    *parents, leaf = path
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
        rule = "the config has no such place; write a key as the errors of coat-flux check name it"
        raise UserError(f"--set {key}: {rule}") from error


def rank(trials: Sequence[Trial]) -> tuple[list[Trial], float | None]:
    """All trials, best first, those without a loss last; and s (see above), None with one seed."""
    squares, freedom = 0.0, 0
    for trial in trials:
        squares += sum((run.loss - trial.loss) ** 2 for run in trial.finished)
        freedom += max(0, len(trial.finished) - 1)
    ordered = sorted(trials, key=lambda trial: trial.loss if trial.finished else math.inf)
    return ordered, math.sqrt(squares / freedom) if freedom else None


def tie(trial: Trial, best: Trial, spread: float | None) -> bool:
    """Whether a trial's gap to the best may be luck; `spread` is s."""
    if spread is None or not trial.finished:
        return False
    limit = SIGMAS * spread * math.sqrt(1 / len(trial.finished) + 1 / len(best.finished))
    return trial.loss - best.loss <= limit


def lowest(trial: Trial) -> tuple[float, float]:
    """(step, loss) at the minimum of the mean over finished seeds."""
    mean = mean_curve([run.curve for run in trial.finished])
    return min(((step, loss) for step, loss, _ in mean), key=lambda point: point[1])


def ranking_rows(trials: Sequence[Trial], spread: float | None) -> list[list[str]]:
    """A header, and a row per trial, best first, as `rank` returns them."""
    best = trials[0]
    keys, seeds = _varied(trials), len(best.runs)
    header = ["place", *keys.values(), "held-out loss", "above the best", "more than luck", "lowest", "s/step"]
    if seeds > 1:
        header.append(f"of {seeds} seeds")
    rows = [[*header, "state"]]
    for number, trial in enumerate(trials, 1):
        place = loss = gap = luck = minimum = ""
        if trial.finished:
            place, loss = str(number), f"{trial.loss:.6f}"
            step, value = lowest(trial)
            minimum = f"{value:.6f} at step {step:.0f}"
        if trial.finished and trial is not best:
            gap = f"{trial.loss - best.loss:+.6f}"
            luck = "no" if tie(trial, best, spread) else "yes"
            if spread is None:
                luck = "not known"
        paces = [run.seconds for run in trial.runs if run.seconds is not None]
        row = [place, *(value_text(trial.settings[key]) for key in keys), loss, gap, luck, minimum]
        row.append(f"{fmean(paces):.2f}" if paces else "")
        if seeds > 1:
            row.append(str(len(trial.finished)))
        states = {run.state for run in trial.runs}
        mixed = FAILED if FAILED in states else "under way"
        rows.append([*row, mixed if len(states) > 1 else states.pop()])
    return rows


def _varied(trials: Sequence[Trial]) -> dict[str, str]:
    """Key → short name, of the keys with several values, or of all if none has."""
    names = short_keys(trials[0].settings)
    varied = {}
    for key, name in names.items():
        if len({value_text(trial.settings[key]) for trial in trials}) > 1:
            varied[key] = name
    return varied or names


def _words(trial: Trial, keys: Mapping[str, str]) -> str:
    """Settings in words: `lr 0.0001, linear 8`."""
    return ", ".join(f"{name} {value_text(trial.settings[key])}" for key, name in keys.items())


def sentence_of(trials: Sequence[Trial], spread: float | None, total: int) -> tuple[str, Tone]:
    """The ranking in one sentence and its tone; `total` is the number of planned runs."""
    best = trials[0]
    left = total - sum(run.state == FINISHED for trial in trials for run in trial.runs)
    rest = f"; {left} of {total} trials are not finished" if left else ""
    if not best.finished:
        return f"No trial is finished yet{rest}.", "plain"
    tied = sum(tie(trial, best, spread) for trial in trials[1:])
    text = f"Lowest held-out loss{' so far' if left else ''}: {best.loss:.6f} with {_words(best, _varied(trials))}"
    if spread is not None and len(trials) > 1:
        text += f"; others as good within the noise (±{spread:.2g} a run): {tied or 'none'}"
    if left:
        return f"{text}{rest}.", "plain"
    return f"{text}.", "open" if tied or spread is None else "good"


def noise_text(spread: float | None) -> str:
    """The source of the noise, and what it decides."""
    if spread is None:
        return "With one seed, how much of a lead is luck is not known: --seeds 3 measures it."
    return (
        f"Noise: ±{spread:.2g}, the standard deviation of runs that differ in the seed alone. A gap to the best of up "
        f"to {SIGMAS:g} times that, times the root of 2/n for n seeds each, may be luck."
    )


def write_sweep_page(sweep: Sweep) -> Path:
    """Write `report.html` in the folder of the runs."""
    job = sweep.job
    page = Page(f"Sweep of {job.name}", f"coat-flux sweep, {job.file}, trials: {sweep.total}")
    trials, spread = rank(sweep.trials)
    keys, best = _varied(trials), trials[0]
    page.verdict(*sentence_of(trials, spread, sweep.total))
    header, *rows = ranking_rows(trials, spread)
    page.table(header, rows)
    same = [f"{key} {value_text(value)}" for key, value in best.settings.items() if key not in keys]
    if same:
        page.paragraph(f"All trials: {', '.join(same)}.")
    page.paragraph(noise_text(spread))
    if best.finished:
        step, minimum = lowest(best)
        if best.loss > RISE * minimum:
            page.paragraph(f"The best run's loss was lowest after step {step:.0f}: fewer steps may make a better LoRA.")
    page.heading("Held-out loss over the runs")
    curves = {}
    for trial in trials:
        points = mean_curve([run.curve for run in trial.finished or trial.runs if run.curve])
        if points and len(curves) < SERIES_COLOURS:
            curves[_words(trial, keys)] = [(step, loss) for step, loss, _ in points]
    more = f", the best {SERIES_COLOURS}" if len(trials) > SERIES_COLOURS else ""
    page.curves(f"Each run in its own precision{more}", curves, y="loss")
    _show_samples(page, sweep, trials, keys)
    if best.finished:
        page.heading("The best result")
        name = best.finished[0].name
        result = sweep.folder / name / save_name(name, None, full=job.full)
        page.result(result, job.model.name_or_path, job.trigger_word, job.model.arch)
        page.paragraph("Held-out photos are not in it. For one from all photos, write into the config:")
        block: dict[str, Any] = {}
        process = best.finished[0].job["config"]["process"][0]
        for key in (*best.settings, *_alphas(process, best.settings)):
            place, _, _ = key.partition("[")  # a list is shown whole
            value = process
            for part in place.split("."):
                value = value[part]
            _set_value(block, place, value)
        page.code(yaml.safe_dump(block, sort_keys=False, allow_unicode=True).rstrip())
    failures = [[run.name, run.message] for run in sweep.runs if run.state == FAILED]
    if failures:
        page.heading("Failed trials")
        page.table(["trial", "why"], failures)
    page.heading("Details")
    with page.details("How it is measured"):
        page.paragraph(HOW)
        page.paragraph(f"Photos not trained on: {', '.join(sweep.held_out)}.")
    page.missing(f"coat-flux {__version__}")
    return page.write(sweep.folder / REPORT_FILE)


def _show_samples(page: Page, sweep: Sweep, trials: Sequence[Trial], keys: Mapping[str, str]) -> None:
    """The last samples of the best trials, a row per prompt."""
    pictures: dict[str, dict[int, Path]] = {}  # trial → prompt → picture
    for trial in trials[:PICTURED]:
        for run in trial.finished[:1]:
            samples = RunFolder(sweep.folder / run.name).samples()
            last = max((step for step, _ in samples), default=None)
            newest = {number: path for (step, number), path in samples.items() if step == last}
            pictures[_words(trial, keys)] = newest
    if any(pictures.values()):
        page.heading("Samples")
        for number, item in enumerate(sweep.job.sample.items()):
            cells = [(words, paths[number]) for words, paths in pictures.items() if number in paths]
            prompt = inject_trigger(item.prompt, sweep.job.trigger_word, add_if_missing=False)
            page.images(prompt, cells, columns=len(pictures))
