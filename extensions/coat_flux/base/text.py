"""Sizes and tables formatted for people."""

from __future__ import annotations

from collections.abc import Sequence

GB, MB = 1e9, 1e6  # as everywhere here: memory.budget_gb, metrics.csv, RESULTS.md
UNITS = ((GB, "GB"), (MB, "MB"), (1e3, "kB"))


def size_text(size: float) -> str:
    """Bytes in the largest unit that gives at least 1, such as `12.5 GB`."""
    unit, name = next((known for known in UNITS if size >= known[0]), UNITS[-1])
    return f"{size / unit:.1f} {name}"


def markdown_table(header: Sequence[str], *rows: Sequence[str]) -> str:
    """Rows of cells as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of cells as lines of aligned columns; those in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
