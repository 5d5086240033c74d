"""The report's section on memory: measured by phase, against the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..watch.memory_report import forecast, stacked, tabulated
from .html import Page
from .logs import read_metrics
from .run import RunFolder

__all__ = ["show_memory"]

MEMORY_FILE = Path("coat") / "memory.json"


def show_memory(page: Page, run: RunFolder) -> None:
    """Add the section.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is damaged.
    """
    record = run.json(MEMORY_FILE)
    if record is None:
        page.missing(f"No {MEMORY_FILE.as_posix()}: COAT was off, or the run ended before it loaded a model.")
    else:
        record = _with_prediction(record, run)
        unit, bars, expected = stacked(record)
        what = "Tensors held" if record["baseline"] else "Memory held"
        title = f"{what} at the peak of each phase"
        page.bars(title, bars, unit=unit, expected=expected, expected_name="predicted by coat-flux plan")
        title, (header, *rows), notes = tabulated(record)
        page.paragraph(title)
        page.table(header, rows)
        page.paragraph("\n".join(f"{note[:1].upper()}{note[1:]}." for note in notes))
    peak = read_metrics(run.path).get("peak_memory_gb", [])
    page.curves("Peak memory of steps", {"peak": peak}, x="step", y="GB")


def _with_prediction(record: dict[str, Any], run: RunFolder) -> dict[str, Any]:
    """A run that did not come to its end has no prediction in its record: it is made now."""
    if record["prediction"] is not None or not run.config_text:
        return record
    import torch

    from ..config.job import JobConfig

    device = torch.device(record["device"])
    return {**record, "prediction": forecast(lambda: JobConfig.from_file(run.path / "config.yaml"), device)}
