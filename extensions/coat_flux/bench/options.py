"""What a benchmark run is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from .configurations import LEVELS, named
from .flops import Geometry


@dataclass(frozen=True)
class Case:
    """What one process measures: one configuration at one size (ops and optimizers: at all their sizes)."""

    level: str
    configuration: str
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def label(self) -> str:
        """For progress lines."""
        sizes = ", ".join(f"{resolution} px x {batch}" for resolution, batch in self.sizes)
        return f"{self.level} {self.configuration}" + (f" at {sizes}" if sizes else "")


@dataclass(frozen=True)
class BenchOptions:
    """A benchmark run.

    Attributes:
        levels: of `configurations.LEVELS`.
        resolutions: pixels along a side.
        batches: images of a step or a block; linears see one.
        rounds: how often each case is measured, each time in a new process.
        configurations: names to keep; none keeps all.
        geometry: of the transformer and its LoRA.
        device: "cpu", "cuda" or "cuda:1".
        repeats: timed calls in a process; None takes the level's own.
        timeout_s: of one process.
    """

    levels: tuple[str, ...] = LEVELS
    resolutions: tuple[int, ...] = (512, 768, 1024)
    batches: tuple[int, ...] = (1, 4)
    rounds: int = 3
    configurations: tuple[str, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    device: str = "cpu"
    repeats: int | None = None
    timeout_s: float = 1800.0

    def cases(self) -> list[Case]:
        """Every case, sizes outermost so that rivals are measured next to each other."""
        found = []
        for level in self.levels:
            names = [name for name in named(level) if not self.configurations or name in self.configurations]
            found += [Case(level, name, sizes) for sizes in self._sizes(level) for name in names]
        return found

    def _sizes(self, level: str) -> list[tuple[tuple[int, int], ...]]:
        if level == "optimizer":
            return [()]
        if level == "op":
            return [tuple((resolution, 1) for resolution in self.resolutions)]
        return [((resolution, batch),) for batch in self.batches for resolution in self.resolutions]
