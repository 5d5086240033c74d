"""What is looked at before ai-toolkit loads a model: the whole job, and the photos.

ai-toolkit accepts unknown keys, several settings that then do something else than they say, photos it misreads, and
photos it cannot read. The rules are those of `coat-flux check` and `coat-flux data`; here they stop or warn a job.

Its data sets are opened by `DatasetConfig.folder_path` of `process.dataset_configs`, one config for each resolution,
made when the process is built: the entries of the YAML are not read again, so they stay as they are.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .common import info
from .validation import HeldOutPhotos, asked_for

__all__ = ["check_job", "check_photos", "config_file"]

PHOTOS = Path("coat") / "photos"


def config_file(save_root: str) -> str:
    """Return the job's YAML as given on the command line, or the copy ai-toolkit keeps in the save folder."""
    given = [word for word in sys.argv[1:] if word.endswith((".yaml", ".yml", ".json", ".jsonc"))]
    return given[0] if len(given) == 1 else os.path.join(save_root, "config.yaml")


def check_job(process: Any) -> None:
    """Check the whole job of a process.

    Args:
        process: built, nothing loaded.

    Raises:
        ConfigError: with every error found, a line each.
        LaunchError: `accelerate launch` started the processes in a way that cannot train here.
    """
    from ...blocks.models.check import check_models
    from ...config.check import check_job_dict
    from ...config.findings import ConfigError
    from ...config.job_file import load_job_yaml
    from ...config.launch import DDP, LaunchError, launch_obstacle, shares_weights

    # as ai-toolkit read it: the process has changed its own entry since
    raw = load_job_yaml(os.path.join(process.save_root, "config.yaml"))
    asked = {"file": config_file(process.save_root), "trainer": "ai-toolkit", "toolkit_root": _toolkit_root()}
    found = check_job_dict(raw, **asked, num_processes=process.accelerator.num_processes)
    if not any(finding.severity == "error" for finding in found):
        found += check_models(raw, **asked)
    for warning in found:
        if warning.severity != "error":
            info(f"[coat] note: {warning.line()}")
    if shares_weights(os.environ):
        raise LaunchError(f"accelerate launch with FSDP: inside ai-toolkit each process holds the model; {DDP}")
    if (obstacle := launch_obstacle(os.environ)) is not None:
        raise LaunchError(obstacle)
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)


def _toolkit_root() -> Path:
    import toolkit

    return Path(next(iter(toolkit.__path__))).parent


def check_photos(process: Any) -> HeldOutPhotos | None:
    """Inspect the data sets of a process, and let it read corrected copies where it would misread photos.

    Photos held out of training are left out of the copies.

    Args:
        process: built, nothing loaded; the `folder_path` of its dataset configs may change.

    Returns:
        The photos held out; None where none are.

    Raises:
        DatasetError: something cannot be trained on; with every error found.
    """
    from ...data.check import t5_of
    from ...data.files import DatasetError, find_images
    from ...data.hold_out import choose_hold_out
    from ...data.preflight import inspect_datasets

    asked = process.coat.data
    by_folder = _by_folder(process.dataset_configs)
    report = inspect_datasets(
        [_joined(configs) for configs in by_folder.values()],
        process.trigger_word,
        background=asked.background,
        transparency=asked.transparency,
        t5_of=t5_of(process.config),
    )
    if report.errors:
        raise DatasetError(report.error_text())
    for line in (*report.warnings, *report.tables):
        info(f"[coat] {line}")
    trained = [folder for folder, configs in by_folder.items() if not configs[0].is_reg]
    chosen = choose_hold_out(trained, asked_for(process).hold_out, process.training_seed)
    held_out = HeldOutPhotos(process, dict(zip(trained, chosen, strict=True)))
    for index, (folder, configs) in enumerate(by_folder.items()):
        out = held_out.of(folder)
        if out:
            held_out.add(folder, configs)
        if out or asked.prepare == "auto":
            keep = frozenset(path for path in find_images(Path(folder)) if path not in out) if out else None
            _prepare(Path(folder), Path(process.save_root) / PHOTOS / str(index), configs, asked, keep)
    return held_out if len(held_out) else None


def _by_folder(configs: Iterable[Any]) -> dict[str, list[Any]]:
    """Configs by the folder ai-toolkit opens; one that reads a list of files (JSON) is left to ai-toolkit."""
    found: dict[str, list[Any]] = {}
    for config in configs:
        place = config.dataset_path or config.folder_path
        if config.dataset_path and os.path.isfile(config.dataset_path):
            info(f"[coat] note: dataset_path={place} is a list of files; its photos are not checked")
        else:
            found.setdefault(place, []).append(config)
    return found


def _joined(configs: list[Any]) -> Any:
    """One config of a folder with all its resolutions, as it is in the YAML."""
    joined = copy.copy(configs[0])
    joined.folder_path = joined.dataset_path or joined.folder_path
    joined.resolution = [config.resolution for config in configs]
    return joined


def _prepare(folder: Path, target: Path, configs: list[Any], asked: Any, keep: frozenset[Path] | None) -> None:
    from ...data.prepare import prepare_copy

    policy = {"background": asked.background, "transparency": asked.transparency}
    copied = prepare_copy(folder, target, **policy, keep=keep, correct=asked.prepare == "auto")
    if copied is None:
        return
    if copied.corrected:
        traits = ", ".join(f"{count} {trait}" for trait, count in copied.traits.items())
        count = len(copied.corrected)
        info(f"[coat] {folder}: {count} photos are read from corrected copies in {copied.folder} ({traits})")
    for config in configs:
        config.folder_path = str(copied.folder)
        config.dataset_path = None
        if copied.mask_folder is not None and config.mask_path is None:
            config.mask_path = str(copied.mask_folder)


def leave_room(process: Any) -> None:
    """Where blocks are streamed as memory needs it: leave room for sampling, as far as its needs are known."""
    from ...blocks.runner import BlockRunner
    from ...config.findings import ConfigError
    from ...plan.job import job_facts
    from ...plan.predict import outside_bytes

    if process.coat.memory.stream_blocks == "auto":
        with suppress(ConfigError):
            BlockRunner.of(process.sd.unet).expect(reserve_bytes=outside_bytes(job_facts(process._job_config())))
