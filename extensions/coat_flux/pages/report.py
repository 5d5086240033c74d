"""The page of a run. Each section says what is missing; a damaged file costs only its own section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import yaml

from coat_core.casts import GRADIENT, INPUT

from .. import __version__
from ..saves.errors import SaveError
from ..saves.state import VERSIONS_FILE
from ..watch.casts import KINDS, PRECISION_FILE, REMEDIES, CastPrecision, read_rows
from ..watch.live import read_status
from ..watch.phases import MEMORY_FILE, stacked, tabulated
from .compare import COMPARE, read_index, show_comparison
from .html import Page, Tone
from .run import RunFolder, smoothed

Section: TypeAlias = Callable[[Page, RunFolder], None]

REPORT_FILE = Path("coat") / "report.html"
PACE_STEPS = 30  # newest steps, for the estimate of the time left
PHASES = {
    "load": "Loading the model",
    "cache": "Encoding photos and captions",
    "validate": "Measuring the held-out loss",
    "sample": "Sampling",
    "step": "Training",
    "save": "Saving",
}
SAMPLE_STEPS, SAMPLE_PROMPTS = 8, 12  # most columns and rows of the grid
RISE = 1.01  # the validation loss has risen if its last value is so many times the lowest
DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)  # raised for damaged files
OUTLIER_DB = 6.0  # below the median of its kind: a bit of the mantissa
LOW_DB = 20.0  # noise of a tenth of the signal
RED_TO_GREEN_DB = (0.0, 2 * LOW_DB)  # shades of the table's cells; none at `LOW_DB`
HOW_TO_READ = (
    "Local SQNR: signal to quantization noise of 128 neighbours at a time. Gaussian values have 31.5 dB in e4m3 and "
    "25.5 dB in e5m2; at 20 dB the noise is a tenth of the signal, at 0 dB as large. docs/report.md says more."
)


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run; RunFolderError if it is not a run, SaveError if the page cannot be written."""
    run = RunFolder(run_dir)
    target = out or run.path / REPORT_FILE
    page = Page(run.name, f"Run report by coat-flux {__version__}: {run.path.resolve()}")
    _show(page, run, "Summary", _show_summary)
    comparison = read_index(run.path / COMPARE)
    if comparison is not None:
        page.heading("Saves compared")
        _show(page, run, "Saves compared", lambda page, run: show_comparison(page, comparison, run.path / COMPARE))
    for title, section in (("Samples", _show_samples), ("The result", _show_result), ("Loss", _show_loss)):
        page.heading(title)
        _show(page, run, title, section)
    page.heading("Details")
    for title, section in DETAILS.items():
        with page.details(title):
            _show(page, run, title, section)
    try:
        return page.write(target)
    except OSError as error:
        reason = error.strerror or error
        raise SaveError(f"{target}: cannot be written ({reason}); give another path with --out") from error


def show_live(page: Page, run: RunFolder) -> None:
    """The sections of a live run: those that take only a moment."""
    _show(page, run, "Samples", _show_samples)
    _show(page, run, "Loss", _show_loss)
    for title in ("Speed and learning rate", "Memory", "Guard"):
        with page.details(title):
            _show(page, run, title, DETAILS[title])


def _show(page: Page, run: RunFolder, title: str, section: Section) -> None:
    """Add a section, or a line that it cannot be shown."""
    try:
        section(page, run)
    except DAMAGED as error:
        page.missing(f"{title}: cannot be shown ({type(error).__name__}: {error})")


def _show_summary(page: Page, run: RunFolder) -> None:
    validation_title = "held-out loss" if run.block("validation") else "validation loss"
    page.verdict(*_verdict(run, validation_title))
    facts = {}
    loss, pace = run.metrics.get("loss", []), run.metrics.get("s_per_it", [])
    if loss:
        facts["steps"] = f"{loss[-1][0]:.0f} of {run.block('train').get('steps', '?')}"
    for name, curve in (("loss, smoothed", smoothed(loss)), (validation_title, run.validation)):
        if curve:
            facts[name] = f"{curve[0][1]:.5f} → {curve[-1][1]:.5f}"
    if pace:
        seconds = [value for _, value in pace]
        facts["time per step, median"] = f"{median(seconds):.3f} s"
        facts["time in steps"] = timedelta(seconds=round(sum(seconds)))
    if run.metrics.get("peak_memory_gb"):
        facts["peak memory of steps"] = f"{max(value for _, value in run.metrics['peak_memory_gb']):.2f} GB"
    if run.metrics.get("skipped"):
        facts["updates skipped"] = f"{run.metrics['skipped'][-1][1]:.0f}"
    facts["model"] = run.block("model").get("name_or_path")
    if "linear" in run.block("network"):
        facts["LoRA"] = f"rank {run.block('network')['linear']}"
    facts["trigger word"] = run.process.get("trigger_word")
    page.table(["", ""], [[name, value] for name, value in facts.items() if value is not None])


def _verdict(run: RunFolder, validation_title: str) -> tuple[str, Tone]:
    loss, steps = run.metrics.get("loss", []), run.block("train").get("steps", "?")
    if not loss:
        return "No step of this run has been recorded yet.", "plain"
    if not math.isfinite(loss[-1][1]):
        good = max((int(step) for step, value in loss if math.isfinite(value)), default=0)
        return f"The loss has not been a finite number since step {good + 1}; use a save from before that step.", "bad"
    if run.saves and run.saves[-1].problem:
        newest = run.saves[-1]
        return f"The newest save, {newest.path.name}, {newest.problem}; use an older one.", "bad"
    done, status = int(loss[-1][0]), read_status(run.path)
    failed = status is not None and status["ended"] not in (None, "finished", "stopped")
    has_final_save = any(save.name == run.name for save in run.saves)
    if failed or (done != steps and not has_final_save):
        return progress(run, status, done, steps)
    name, curve = (validation_title, run.validation) if run.validation else ("loss", smoothed(loss))
    first, last = curve[0][1], curve[-1][1]
    lowest_step, lowest = min(curve, key=lambda point: point[1])
    if run.validation and last > RISE * lowest:
        return (
            f"All steps are done, but the {name} was lowest after step {lowest_step:.0f} and has risen since; "
            "an earlier save may be better."
        ), "open"
    if last < first:
        return f"All steps are done, and the {name} fell: {first:.4g} → {last:.4g}.", "good"
    return f"All steps are done, and the {name} did not fall: {first:.4g} → {last:.4g}.", "open"


def progress(run: RunFolder, status: dict[str, Any] | None, done: int, steps: int) -> tuple[str, Tone]:
    """How far a run has come, and whether it is still going."""
    position = f"step {done} of {steps}"
    if status is None:
        return f"{position}; this run does not say whether it is still going (COAT is off)", "open"
    if status["ended"] == "finished":
        return f"Finished: {position}", "good"
    if status["ended"] == "stopped":
        return f"Stopped after {position}. To resume, start the same config again", "open"
    if status["ended"] is not None:
        return f"Ended at {position}: {status['ended']}", "bad"
    if not status["alive"]:
        text = f"The process ended at {position} without a message"
        return f"{text}. To resume from the last save, start it again", "bad"
    phase = "load"
    with suppress(OSError, ValueError, KeyError, AttributeError):
        phases = (run.json(MEMORY_FILE) or {})["phases"]
        closed = "step" if "step" in phases else "load"
        phase = next((name for name in PHASES if phases.get(name, {}).get("open")), closed)
    paces = [value for _, value in run.metrics.get("s_per_it", [])[-PACE_STEPS:]]
    seconds = median(paces) if paces else math.nan
    time_left = ""
    if math.isfinite(seconds) and done < steps:
        rest = timedelta(seconds=round(seconds * (steps - done)))
        time_left = f", {seconds:.3g} s per step, {rest} left"
    return f"{PHASES[phase]}: {position}{time_left}", "plain"


def _show_result(page: Page, run: RunFolder) -> None:
    readable = [save for save in run.saves if not save.problem]
    if not readable:
        page.missing("None has been saved yet.")
        return
    model = str(run.block("model").get("name_or_path") or "black-forest-labs/FLUX.1-dev")
    page.result(readable[-1].path, model, run.process.get("trigger_word"), run.block("model").get("arch"))


def _show_loss(page: Page, run: RunFolder) -> None:
    loss = run.metrics.get("loss", [])
    if loss:
        curves = {"each step": loss, "smoothed": smoothed(loss)}
        page.curves("Training loss", curves, y="loss", faint="each step")
    else:
        page.missing("No training loss: there is neither coat/metrics.csv nor ai-toolkit's loss_log.db.")
    if not run.validation:
        page.missing("No validation loss: the config has no validation block, or nothing was measured yet.")
        return
    validation = {"loss": run.validation}
    if not run.block("validation"):
        page.curves("Validation loss, noise and timesteps always the same", validation, y="loss")
        return
    step, lowest = min(run.validation, key=lambda point: point[1])
    marks = {step: f"lowest: step {step:.0f}"}
    page.curves("Loss on photos held out of training", validation, y="loss", marks=marks)
    page.paragraph(
        f"Lowest, {lowest:.5f}, at step {step:.0f}. Where it rises while the training loss falls, the LoRA is "
        "memorizing the photos."
    )
    for column, title, unit in (
        ("colour", "Colour of held-out photos, redrawn by each save", "CIEDE2000"),
        ("texture", "Print and texture of held-out photos, redrawn by each save", "octaves of contrast"),
    ):
        curve = run.fidelity.get(column, [])
        of_saves = [(step, error) for step, error in curve if step > 0]
        if of_saves:
            step, least = min(of_saves, key=lambda point: point[1])
            series = {"mean": curve, "the VAE alone, which no training can pass": run.fidelity[f"vae_{column}"]}
            marks = {step: f"best: step {step:.0f}, {least:.2f}"}
            page.curves(f"{title} (step 0: without the LoRA)", series, y=unit, marks=marks)


def _show_samples(page: Page, run: RunFolder) -> None:
    samples, prompts = run.samples(), run.prompts()
    if not samples:
        reason = f"sample_every {run.block('sample').get('sample_every', '?')}"
        if run.block("train").get("disable_sampling") or not prompts:
            reason = "the config has no prompts, or train.disable_sampling"
        page.missing(f"No samples: {reason}.")
        return
    steps = sorted({step for step, _ in samples})
    if len(steps) > SAMPLE_STEPS:  # evenly spaced, with the first and the last
        last = len(steps) - 1
        steps = [steps[round(i * last / (SAMPLE_STEPS - 1))] for i in range(SAMPLE_STEPS)]
    numbers = sorted({number for _, number in samples})[:SAMPLE_PROMPTS]  # of prompts
    for number in numbers:
        row = [(f"step {step}", samples[step, number]) for step in steps if (step, number) in samples]
        title = prompts[number] if number < len(prompts) else f"prompt {number + 1}"
        page.images(title, row, columns=len(steps))
    not_shown = len(samples) - len(steps) * len(numbers)
    if not_shown > 0:
        page.missing(f"{not_shown} more are in samples/.")


def _show_pace(page: Page, run: RunFolder) -> None:
    pace, lr, norm = (run.metrics.get(name, []) for name in ("s_per_it", "lr", "grad_norm"))
    times = {"each step": pace, "smoothed": smoothed(pace)}
    page.curves("Time per step", times, y="s/it", faint="each step")
    page.curves("Learning rate", {"lr": lr}, y="lr")
    page.curves("Gradient norm before clipping", {"norm": norm}, y="norm", log_y=True)


def _show_memory(page: Page, run: RunFolder) -> None:
    record = run.json(MEMORY_FILE)
    if record is None:
        page.missing(f"No {MEMORY_FILE.as_posix()}: COAT was off, or the run ended before it loaded a model.")
    else:
        unit, bars, expected = stacked(record)
        subject = "Tensors" if record["baseline"] else "Memory"
        page.bars(f"{subject} held at the peak of each phase, {unit}", bars, expected)
        title, (header, *rows), notes = tabulated(record)
        page.paragraph(title)
        page.table(header, rows)
        page.paragraph("\n".join(f"{note[:1].upper()}{note[1:]}." for note in notes))
    page.curves("Peak memory of steps", {"peak": run.metrics.get("peak_memory_gb", [])}, y="GB")


def _show_guard(page: Page, run: RunFolder) -> None:
    guard = run.guard()
    skipped = run.metrics.get("skipped", [])
    if guard is None and not skipped:
        page.missing("No counters: no save of this run has any, and there is no coat/metrics.csv.")
        return
    if skipped and skipped[-1][1]:
        page.curves("Updates skipped", {"skipped": skipped}, y="so far")
    rows = [["updates skipped in the whole run", f"{skipped[-1][1]:.0f}" if skipped else None]]
    if guard is not None:
        rows.append(["updates done at the newest save", guard.get("updates")])
        rows.append(["skipped until then", guard.get("skipped")])
        precision = guard.get("precision") or {}
        for layer in precision.get("left_out") or []:
            rows.append([f"in bf16 by activation.min_sqnr_db: {precision.get('minimum'):g}", layer])
    page.table(["", ""], rows)


def _show_treatment(page: Page, run: RunFolder) -> None:
    columns = ("asked", "got", "why")
    for save in reversed(run.saves):  # metadata keys are coat.<column>.<part>
        parts = [key.removeprefix("coat.got.") for key in sorted(save.metadata) if key.startswith("coat.got.")]
        if parts:
            rows = [[part, *(save.metadata.get(f"coat.{key}.{part}", "") for key in columns)] for part in parts]
            page.table(["part", *columns], rows)
            page.missing(f"From the metadata of {save.path.name}.")
            return
    page.missing("No table: no save of this run has it in its metadata (coat.enabled: false, or nothing saved yet).")


def _show_saves(page: Page, run: RunFolder) -> None:
    if not run.saves:
        page.missing("None has been saved yet.")
        return
    rows = [[save.path.name, f"{save.nbytes / 1e6:.2f} MB", save.step, save.problem] for save in run.saves]
    page.table(["file", "size", "steps done", ""], rows)


def _show_versions(page: Page, run: RunFolder) -> None:
    versions = run.json(VERSIONS_FILE)
    if versions is None:
        page.missing(f"No {VERSIONS_FILE.as_posix()}: COAT was off in ai-toolkit.")
        return
    page.table(["", ""], list(versions.items()))


def _show_config(page: Page, run: RunFolder) -> None:
    if run.config_text:
        page.code(run.config_text)
    else:
        page.missing("No config.yaml in the run's folder.")


# --- precision of FP8 ---

# A layer is compared with the median of its kind of tensor: gradients in e5m2 are 6 dB below inputs in e4m3 by format.


def summaries(rows: Iterable[CastPrecision]) -> list[CastPrecision]:
    """A row per layer and kind: its median SQNR and worst shares; without tensors that were always zero."""
    groups: dict[tuple[str, str], list[CastPrecision]] = {}
    for row in rows:
        if not math.isnan(row.sqnr_db):
            groups.setdefault((row.layer, row.kind), []).append(row)
    summed = []
    for group in groups.values():
        underflow, saturation = max(row.underflow for row in group), max(row.saturation for row in group)
        sqnr_db = median(row.sqnr_db for row in group)
        summed.append(group[0]._replace(sqnr_db=sqnr_db, underflow=underflow, saturation=saturation))
    return summed


def below_median(layers: Sequence[CastPrecision]) -> list[tuple[float, CastPrecision]]:
    """Each row of a known layer with its distance below the median of its kind, the furthest first."""
    medians = {}
    for kind in {row.kind for row in layers}:
        medians[kind] = median(row.sqnr_db for row in layers if row.kind == kind)
    distances = []
    for row in layers:
        if row.layer:
            distance = 0.0 if medians[row.kind] == row.sqnr_db else medians[row.kind] - row.sqnr_db  # both may be inf
            distances.append((distance, row))
    return sorted(distances, key=lambda item: -item[0])


def standing_out(layers: Sequence[CastPrecision]) -> list[str]:
    """Layers with an input or gradient far below its kind, or an input below 20 dB."""
    names = []
    for distance, row in below_median(layers):
        outlier = row.kind in (INPUT, GRADIENT) and distance > OUTLIER_DB
        if outlier or (row.kind == INPUT and row.sqnr_db < LOW_DB):
            names.append(row.layer)
    return list(dict.fromkeys(names))


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _share(value: float) -> str:
    if 0 < value < 1e-4:
        return "<0.01%"
    return f"{value:.2%}" if value else "0"


def show_layers(page: Page, rows: Iterable[CastPrecision]) -> list[CastPrecision]:
    """Add the precision by kind and of the worst layers; returns `summaries(rows)`."""
    layers = summaries(rows)
    if not layers:
        page.missing("No FP8 cast was measured: coat/precision.csv is missing. Runs with coat.enabled: true write it.")
        return layers
    page.paragraph(HOW_TO_READ)
    kinds = []
    for kind in KINDS:
        of_kind = [row for row in layers if row.kind == kind]
        if of_kind:
            typical = median(row.sqnr_db for row in of_kind)
            lowest = min(of_kind, key=lambda row: row.sqnr_db)
            underflow = _share(max(row.underflow for row in of_kind))
            remedy = REMEDIES[kind] if typical < LOW_DB else ""
            lowest_text = f"{_db(lowest.sqnr_db)} {lowest.layer}"
            kinds.append([kind, len(of_kind), _db(typical), lowest_text, underflow, remedy])
    page.heading("By kind of tensor", 3)
    page.table(["kind", "layers", "SQNR, median", "lowest", "underflow, highest", "change"], kinds)
    worst: dict[str, list[str]] = {}  # the first, hence furthest, row of each layer
    for distance, row in below_median(layers):
        shares = _share(row.underflow), _share(row.saturation)
        worst.setdefault(row.layer, [row.layer, row.kind, _db(row.sqnr_db), _db(distance), *shares])
    page.heading("The ten worst layers", 3)
    header = ["layer", "kind", "SQNR", "below the kind's median", "underflow", "saturation"]
    page.table(header, list(worst.values())[:10])
    return layers


def _show_precision(page: Page, run: RunFolder) -> None:
    rows = read_rows(run.path / PRECISION_FILE)
    layers = show_layers(page, rows)
    if not layers:
        return
    names = standing_out(layers)
    if names:
        page.paragraph(
            f"{len(names)} layers stand out: an input or gradient more than {OUTLIER_DB:g} dB below the median of its "
            f"kind, or an input below {LOW_DB:g} dB. To multiply them in bf16, paste this into the config's process "
            "entry; activation.min_sqnr_db does that by itself for inputs, from a threshold in dB."
        )
        excluded = (run.block("coat").get("activation") or {}).get("exclude") or []
        block = {"coat": {"activation": {"exclude": list(dict.fromkeys([*excluded, *names]))}}}
        page.code(yaml.safe_dump(block, sort_keys=False, allow_unicode=True))
    else:
        page.paragraph(
            f"No layer stands out: none is more than {OUTLIER_DB:g} dB below the median of its kind, and no input "
            f"is below {LOW_DB:g} dB. There is nothing to exclude."
        )
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in layers)]
    values: dict[str, dict[str, float]] = {}
    for row in layers:
        values.setdefault(row.layer or "(layer not known)", {})[row.kind] = row.sqnr_db
    page.heading("Local SQNR by layer in dB, median over the measured steps", 3)
    table = [[layer, *map(by_kind.get, kinds)] for layer, by_kind in values.items()]
    page.table(["layer", *kinds], table, RED_TO_GREEN_DB)
    lowest: dict[str, dict[int, float]] = {kind: {} for kind in kinds}  # by step
    for row in rows:
        if row.step and row.kind in KINDS and not math.isnan(row.sqnr_db):
            by_step = lowest[row.kind]
            by_step[row.step] = min(row.sqnr_db, by_step.get(row.step, math.inf))
    curves = {kind: sorted(by_step.items()) for kind, by_step in lowest.items()}
    page.curves("Local SQNR over the run, lowest layer", curves, y="dB")
    page.paragraph(f"All numbers: {PRECISION_FILE.as_posix()} in the run.")


DETAILS: dict[str, Section] = {
    "Speed and learning rate": _show_pace,
    "Memory": _show_memory,
    "Precision of FP8": _show_precision,
    "Guard": _show_guard,
    "Asked, got, why": _show_treatment,
    "Saves": _show_saves,
    "Versions": _show_versions,
    "Config": _show_config,
}
