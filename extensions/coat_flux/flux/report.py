"""What COAT did to a model: asked, got, why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CoatReport:
    """Result of `apply_coat`, by full module name.

    Attributes:
        asked: what the config asks of a linear of the blocks, in words.
        converted: linears whose weight is FP8 or whose GEMMs are.
        got: name → what the layer does now, in words.
        why: name → reason, where a layer got less than the config asks for in general.
        skipped: name → reason, for linears left in high precision.
        checkpointing: one line on recomputation and saved tensors.
        path: one line on who chooses the GEMMs' scaling and compilation.
    """

    asked: str = ""
    converted: list[str] = field(default_factory=list)
    got: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    checkpointing: str = ""
    path: str = ""

    def add(self, name: str, got: str, why: str = "") -> None:
        """Note a converted layer."""
        self.converted.append(name)
        self.got[name] = got
        if why:
            self.why[name] = why

    def rows(self) -> list[tuple[str, int, str, str]]:
        """Return (layers, count, got, why), one row per part of the model and treatment."""
        counted: dict[tuple[str, str, str], int] = {}
        for name in self.converted:
            key = (_part(name), self.got[name], self.why.get(name, ""))
            counted[key] = counted.get(key, 0) + 1
        for name, reason in self.skipped.items():
            key = (_part(name), "high precision", reason)
            counted[key] = counted.get(key, 0) + 1
        return [(group, count, got, why) for (group, got, why), count in counted.items()]

    def table(self) -> str:
        """Return the start-up table as text."""
        rows = [("layers", "count", "got", "why"), *((g, str(n), got, why) for g, n, got, why in self.rows())]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"asked for: {self.asked}"] if self.asked else []
        lines += ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        lines += [line for line in (self.checkpointing, self.path) if line]
        return "\n".join(line.rstrip() for line in lines)


def _part(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{part}.*" if rest else part
