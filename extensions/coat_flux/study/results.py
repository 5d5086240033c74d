"""What one run came to, read from its folder."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from ..trainers.standalone.resume import find_resume_point
from .errors import VerifyError
from .paired import run_name

__all__ = ["ArmResult", "read_result"]

IMAGES = ("*.jpg", "*.png", "*.webp")


@dataclass(frozen=True)
class ArmResult:
    """What one run came to.

    Attributes:
        arm: its arm's name.
        seed: of the run.
        lora: the final LoRA.
        curve: (step, held-out loss) in the run's own precision, by `Settings.curve_sigmas`.
        final_own: held-out loss at the end in the run's own precision, by `Settings.final_sigmas`.
        seconds: of all optimizer steps, without validation.
        steps_per_s: optimizer steps per second.
        peak_bytes: most device memory of a training step; None where it was not measured.
        samples: images of the last step, in the order of the prompts.
    """

    arm: str
    seed: int
    lora: Path
    curve: tuple[tuple[int, float], ...]
    final_own: float
    seconds: float
    steps_per_s: float
    peak_bytes: int | None
    samples: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Of the run and its folder."""
        return run_name(self.arm, self.seed)


def read_result(run: Path, arm_name: str, seed: int, steps: int) -> ArmResult:
    """What a finished run says of itself.

    Args:
        run: its folder.
        arm_name: of its arm.
        seed: of the run.
        steps: it has done.

    Raises:
        VerifyError: it was not finished by `verify`.
        ResumeError: its last save is damaged.
    """
    point = find_resume_point(run, run.name)
    seen = {} if point is None else point.record.get("observed", {})
    if point is None or "final" not in seen:
        raise VerifyError(f"{run}: was finished without verify, so it has no held-out losses; move it elsewhere")
    seconds = sum(_column(run / "coat" / "metrics.csv", "s_per_it"))
    return ArmResult(
        arm=arm_name,
        seed=seed,
        lora=point.path,
        curve=tuple((int(step), float(loss)) for step, loss in seen["curve"]),
        final_own=float(seen["final"]),
        seconds=seconds,
        steps_per_s=steps / seconds if seconds else 0.0,
        peak_bytes=_step_peak(run / "coat" / "memory.json"),
        samples=_last_samples(run / "samples", steps),
    )


def _column(table: Path, name: str) -> list[float]:
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def _step_peak(path: Path) -> int | None:
    if not path.exists():
        return None
    phases = json.loads(path.read_text(encoding="utf-8"))["phases"]
    return phases["step"]["peak"]["allocated"] if "step" in phases else None


def _last_samples(folder: Path, steps: int) -> tuple[Path, ...]:
    """The newest image of each prompt: `<milliseconds>__<step>_<number>.<extension>`."""
    newest: dict[int, Path] = {}
    for path in sorted(path for pattern in IMAGES for path in folder.glob(pattern)):
        stamp, _, number = path.stem.rpartition("_")
        if stamp.endswith(f"__{steps:09d}") and number.isdecimal():
            newest[int(number)] = path
    return tuple(newest[number] for number in sorted(newest))
