"""The trials of a sweep: one job for each combination of values and seed, all of them checked before any starts.

A trial differs from the config in the keys of `--set`, in its seed, and in what every trial has alike: photos held out
of training by name, so that no seed changes what is measured, samples at its end, and one checkpoint.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import UserError
from ..blocks.models.check import check_models
from ..config.check import STANDALONE, check_job_dict
from ..config.findings import ConfigError, show
from ..config.job import JobConfig
from ..config.job_file import load_job_yaml, load_written, parse
from ..data.check import check_data
from ..data.files import find_images
from ..data.hold_out import choose_hold_out
from .held_out import HELD_OUT_SHARE, MOST_HELD_OUT

__all__ = ["Axis", "SweepError", "Trial", "find_axis", "make_trials", "short_keys", "value_text"]

KEY = re.compile(r"[^.\[\]\s]+(\[\d+\])*(\.[^.\[\]\s]+(\[\d+\])*)*")
FRAME = "config.process[0]."  # what findings have in front of a key
OWN = "every trial has its own; remove it"
SAME = "is what trials are measured on, so their losses would not compare; change it in the config"
FIXED = (
    (r"name|type|training_folder|log_dir", OWN),
    (r"training_seed", "is set by --seeds K, which trains each combination from K seeds; write that"),
    (r"validation(\..*)?|trigger_word|model(\.(name_or_path|extras_name_or_path|arch|is_flux))?", SAME),
    (r"datasets(\[\d+\](\.(folder_path|resolution|caption_ext|default_caption))?)?", SAME),
)
POINTS_OF_CURVE = 20
LONGEST_VALUE, LONGEST_NAME = 24, 100  # characters, of a folder's name
ORDER_SEED = 0  # of --random: a larger N adds trials to those of a smaller one


class SweepError(UserError, ValueError):
    """A sweep cannot be made as asked."""


class Axis(NamedTuple):
    """One key and the values it is tried with."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: of the run and its folder.
        settings: key → value, of every axis.
        seed: `training_seed`.
        job: as it is checked.
        written: as it is saved, every `${VARIABLE}` unexpanded.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    job: Mapping[str, Any]
    written: Mapping[str, Any]


def find_axis(text: str) -> Axis:
    """Read `KEY=VALUE,VALUE`; values are YAML's, `[512, 768]` is one of them.

    Raises:
        SweepError: it has not that form, or the key cannot be tried.
        ConfigError: the values are not YAML.
    """
    key, _, values = (part.strip() for part in text.partition("="))
    key = key.removeprefix(FRAME)
    if not KEY.fullmatch(key) or not values:
        raise SweepError(f"--set {text}: must be KEY=VALUE,VALUE; write train.lr=1e-4,3e-4, for example")
    for pattern, rule in FIXED:
        if re.fullmatch(pattern, key):
            raise SweepError(f"--set {key}: {rule}")
    found = parse(f"[{values}]", f"--set {key}")
    return Axis(key, tuple({show(value): value for value in found}.values()))


def make_trials(
    config: str,
    axes: Sequence[Axis],
    seeds: Sequence[int],
    folder: Path,
    *,
    name: str | None = None,
    most: int | None = None,
) -> list[Trial]:
    """Make and check all trials; those of one seed first, so that a first ranking is soon there.

    Args:
        config: path of the YAML.
        axes: what is varied.
        seeds: of each combination.
        folder: of their runs.
        name: takes the place of `config.name`.
        most: of the combinations; they are drawn at random, the same ones each time.

    Raises:
        SweepError: a key is given twice, or is inside something that is not a block.
        ConfigError: everything that is wrong with the trials or the photos, as `coat-flux check` says it.
        DatasetError: the photos to hold out cannot be chosen.
    """
    twice = [key for key, count in Counter(axis.key for axis in axes).items() if count > 1]
    if twice:
        raise SweepError(f"--set {twice[0]}: is given twice; write all of its values behind one =")
    keys = [axis.key for axis in axes]
    combinations = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(a.values for a in axes))]
    if most is not None:
        random.Random(ORDER_SEED).shuffle(combinations)
        combinations = combinations[:most]
    job = JobConfig.from_file(config, name=name)
    errors, _ = check_data(job.raw)
    if errors:
        raise ConfigError(errors)
    held_out = _hold_out(job)
    trials = []
    for seed, settings in itertools.product(seeds, combinations):
        named = f"{_name(settings)}_seed{seed}"
        raw, written = load_job_yaml(config, name=named), load_written(config, name=named)
        for one in (raw, written):
            _change(one["config"]["process"][0], settings, seed, folder, held_out, job)
        trials.append(Trial(named, settings, seed, raw, written))
    for named, count in Counter(trial.name.lower() for trial in trials).items():
        if count > 1:
            raise SweepError(f"--set: {count} trials would have the folder {named}; write values that differ more")
    _check(trials, job.file)
    return trials


def _hold_out(job: JobConfig) -> list[str]:
    """Photos by name: as many as the config says, else a tenth, as `verify` holds out."""
    folders = [Path(entry.folder_path) for entry in job.datasets]
    photos = {path.resolve() for folder in folders for path in find_images(folder)}
    count = job.validation.hold_out or min(max(1, round(len(photos) * HELD_OUT_SHARE)), MOST_HELD_OUT)
    chosen = choose_hold_out(folders, count, job.training_seed)
    names = (path.relative_to(folder) for folder, held in zip(folders, chosen, strict=True) for path in held)
    return list(dict.fromkeys(path.as_posix() for path in names))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Key → its last part, where no other key ends like it."""
    last = {key: key.rpartition(".")[2] for key in keys}
    count = Counter(last.values())
    return {key: leaf if count[leaf] == 1 else key for key, leaf in last.items()}


def value_text(value: Any) -> str:
    """A value for people."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else show(value)


def _name(settings: Mapping[str, Any]) -> str:
    parts = []
    for key, short in short_keys(settings).items():
        word = re.sub(r"[^\w.+-]+", "-", value_text(settings[key])).strip("-.")[:LONGEST_VALUE]
        parts.append(re.sub(r"\W+", "_", short) + word)
    return "_".join(parts)[:LONGEST_NAME]


def _change(
    process: dict[str, Any],
    settings: Mapping[str, Any],
    seed: int,
    folder: Path,
    held_out: Sequence[str],
    job: JobConfig,
) -> None:
    """Make a process entry that of a trial."""
    for key in ("name", "log_dir"):
        process.pop(key, None)
    process.update(training_folder=str(folder), training_seed=seed)
    process.setdefault("train", {})["skip_first_sample"] = True
    process["save"] = {**(process.get("save") or {}), "max_step_saves_to_keep": 1}
    for key, value in settings.items():
        _lay(process, key, copy.deepcopy(value))
    rank = settings.get("network.linear", settings.get("network.rank"))
    alpha = next((key for key in ("linear_alpha", "alpha") if key in (process.get("network") or {})), None)
    sound = isinstance(rank, int) and rank > 0
    if sound and alpha and f"network.{alpha}" not in settings:  # on FLUX alpha is the rank
        process["network"][alpha] = rank
    train = process["train"] if isinstance(process["train"], dict) else {}
    steps = train.get("steps") if isinstance(train.get("steps"), int) else job.train.steps
    every = job.validation.every if job.validation.hold_out else max(1, steps // POINTS_OF_CURVE)
    process["validation"] = {"hold_out": list(held_out), "every": every}
    process["sample"] = {**(process.get("sample") or {}), "sample_every": steps}


def _lay(process: Any, key: str, value: Any) -> None:
    """Set a key of a block; blocks that are not there are made."""
    *parents, leaf = [int(step[1:-1]) if step[0] == "[" else step for step in re.findall(r"\[\d+\]|[^.\[\]]+", key)]
    block = process
    for step in parents:
        if isinstance(step, str) and isinstance(block, dict):
            block = block[step] if block.get(step) is not None else block.setdefault(step, {})
            continue
        block = _item(block, step, key)
    if isinstance(leaf, str) and isinstance(block, dict):
        block[leaf] = value
    else:
        _item(block, leaf, key)
        block[leaf] = value


def _item(block: Any, step: str | int, key: str) -> Any:
    if isinstance(step, int) and isinstance(block, list) and step < len(block):
        return block[step]
    rule = f"the config has no entry [{step}] there" if isinstance(step, int) else f"{step!r} is not inside a block"
    raise SweepError(f"--set {key}: {rule}; write a key as the errors of coat-flux check name it")


def _check(trials: Sequence[Trial], file: str) -> None:
    lines: dict[str, None] = {}
    for trial in trials:
        found = check_job_dict(trial.job, file=file, trainer=STANDALONE)
        lines |= dict.fromkeys(item.line() for item in found if item.severity == "error")
    if not lines:
        found = check_models(trials[0].job, file=file, trainer=STANDALONE)
        lines |= dict.fromkeys(item.line() for item in found if item.severity == "error")
    if lines:
        raise ConfigError(list(lines))
