"""One configuration in a process of its own: `python -m coat_flux.bench.worker SPEC RESULT`, both JSON files.

SPEC: {"level", "configuration", "sizes": [[resolution, batch], ...], "geometry": {...}, "device", "repeats"}, or
{"level": "machine", "device"}. RESULT: {"status", ...} with status

    ok              "measurements", and "said": what the libraries logged
    cannot          "reason": a baseline that does not run on this machine
    out of memory   "reason"
    failed          "reason", "traceback": an error of ours
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from .configurations import CANNOT, FAILED, OK, OUT_OF_MEMORY, named
from .flops import Geometry

REASON_LENGTH = 300


class _Said(logging.Handler):
    """Collects log lines, each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the line."""
        line = record.getMessage()
        if line not in self.lines:
            self.lines.append(line)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Do what the specification says; every error becomes a result."""
    said = _Said()
    for package in ("coat_core", __package__.rsplit(".", 1)[0]):
        logging.getLogger(package).addHandler(said)
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        device = torch.device(spec["device"])
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        if spec["level"] == "machine":
            from .machine import describe_machine

            return {"status": OK, "machine": describe_machine(device)}
        return {"status": OK, "measurements": _measured(spec), "said": said.lines}
    except Exception as error:
        status = _status(error, spec)
        return {"status": status, "reason": _short(error), "traceback": traceback.format_exc(), "said": said.lines}


class _Missing(Exception):
    """A package that a baseline needs is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"needs the package {package}, which is not installed")


def _measured(spec: dict[str, Any]) -> list[dict[str, Any]]:
    choice = named(spec["level"])[spec["configuration"]]
    for package in choice.needs:
        if not _is_installed(package):
            raise _Missing(package)
    from .timing import Setting

    if spec["level"] == "optimizer":
        from .optimizers import measure_optimizer as measure
    else:
        from .levels import MEASURE

        measure = MEASURE[spec["level"]]

    torch.manual_seed(0)
    setting = Setting(
        Geometry(**spec["geometry"]),
        tuple((resolution, batch) for resolution, batch in spec["sizes"]),
        torch.device(spec["device"]),
        spec["repeats"],
    )
    return [found.as_dict() for found in measure(choice, setting)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent, optimum
        return False


def _status(error: Exception, spec: dict[str, Any]) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():  # other allocators' too
        return OUT_OF_MEMORY
    if isinstance(error, _Missing):
        return CANNOT
    others = spec["level"] != "machine" and named(spec["level"])[spec["configuration"]].may_be_missing
    return CANNOT if others else FAILED


def _short(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    name = type(error).__name__.lstrip("_")
    text = message if isinstance(error, _Missing) else f"{name}: {message}"
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"


def main() -> None:
    """Read the specification, run it, write the result."""
    spec_file, result_file = (Path(argument) for argument in sys.argv[1:3])
    result = run(json.loads(spec_file.read_text(encoding="utf-8")))
    result_file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
