"""Memory of a run as a table, measurement next to prediction, from the JSON of `phases`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..base.text import GB, MB, columns
from .phases import PhaseTracker

if TYPE_CHECKING:
    from ..config.job import JobConfig

PARTS = ("transformer", "lora", "gradients", "optimizer", "ema", "saved activations", "text encoders", "vae", "rest")


def finish(
    tracker: PhaseTracker,
    job: Callable[[], JobConfig],
    log: Callable[[str], None] | None,
) -> None:
    """End a run's tracking: JSON with the prediction, and the table to `log`."""
    if tracker.path is not None:
        tracker.forecast = forecast(job, tracker.device)
    tracker.close()
    if tracker.path is not None and log is not None:
        title, rows, notes = tabulated(tracker.record())
        log("\n".join([title, *columns(rows), *notes]))


def forecast(make_job: Callable[[], JobConfig], device: torch.device) -> dict[str, Any]:
    """The plan's prediction, or why there is none; a device not in this machine has no limit."""
    try:
        from ..plan.job import JobFacts
        from ..plan.predict import predict

        known = device.type == "cuda" and torch.cuda.is_available()
        room = float(torch.cuda.mem_get_info(device)[1]) if known else None
        job = replace(make_job(), device=str(device))  # the run's device, where its config leaves it open
        prediction = predict(JobFacts(job), room)
    except Exception as error:  # a finished run must not fail for its forecast
        reason = " ".join(str(error).split())
        return {"missing": f"{type(error).__name__}: {reason}"}
    return {"peak": prediction.peak, "phases": prediction.phases}


def tabulated(record: Mapping[str, Any]) -> tuple[str, list[list[str]], list[str]]:
    """The table in parts: title, rows with the header first, and footnotes."""
    unit, scale = ("GB", GB) if record["peak"] >= 10 * GB else ("MB", MB)
    title = f"Memory by phase, {unit} (10^{9 if unit == 'GB' else 6} bytes), {record['method']['memory']}"
    baseline = record["baseline"]
    predicted = (record["prediction"] or {}).get("phases", {})
    above = ["above start"] if baseline else []

    def size(nbytes: float) -> str:
        return f"{nbytes / scale:.2f}"

    rows = [["phase", "times", "start", "end", "peak", "reserved", *above, "predicted"]]
    for name, phase in record["phases"].items():
        sign, peak = "" if phase["exact"] else ">=", phase["peak"]
        row = [name, str(phase["entered"])]
        row += [size(phase[side].get("allocated", 0)) for side in ("start", "end")]
        row += [sign + size(peak["allocated"]), size(peak["reserved"])]
        if baseline:
            row.append(sign + size(max(0, peak["allocated"] - baseline)))
        rows.append([*row, size(sum(predicted[name].values())) if name in predicted else "-"])
    notes = []
    for name, at in record["moments"].items():
        notes.append(f"{name.replace('_', ' ')}: {size(at['allocated'])}, peak until then {size(at['peak'])}")
    if "step" in record["phases"]:
        # two lines: of different moments, and of micro-batches of different sizes
        counted = "the first micro-batches" if baseline else "a step"
        sides = {
            f"held at the fullest count of {counted}": record["phases"]["step"]["parts"],
            "predicted at the peak of the largest step": predicted.get("step", {}),
        }
        for side, parts in sides.items():
            held = []
            for part, nbytes in parts.items():
                if nbytes:
                    held.append(f"{part} {size(nbytes)}")
            if held:
                notes.append(f"{side}: {', '.join(held)} {unit}")
    if record["prediction"] is None:
        line = "prediction: none, the run did not come to its end"
    elif "missing" in record["prediction"]:
        line = f"prediction: none for this run ({record['prediction']['missing']})"
    else:
        expected_peak, measured_peak = record["prediction"]["peak"], record["peak"] - baseline
        line = f"prediction: peak {size(expected_peak)} {unit}; measured {size(measured_peak)} {unit}"
        if baseline:
            line += " of resident memory above the start, libraries included"
        else:
            line += f", {(measured_peak - expected_peak) / expected_peak:+.1%} of the prediction"
    return title, rows, [*notes, line]


def stacked(record: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, float]], dict[str, float]]:
    """Memory of phases at their peak: unit, phase → part → size, phase → predicted size."""
    parts = [part for part in PARTS if part != "rest" or not record["baseline"]]
    phases = {name: {part: phase["parts"].get(part, 0) for part in parts} for name, phase in record["phases"].items()}
    predicted = (record["prediction"] or {}).get("phases", {})
    expected = {name: sum(predicted[name].values()) for name in phases if name in predicted}
    most = max([*(sum(held.values()) for held in phases.values()), *expected.values()], default=0)
    unit, scale = ("GB", GB) if most >= GB else ("MB", MB)
    bars = {name: {part: size / scale for part, size in held.items() if size} for name, held in phases.items()}
    return unit, bars, {name: size / scale for name, size in expected.items()}
