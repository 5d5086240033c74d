"""CoatReport: the start-up table says what each part got and why."""

from __future__ import annotations

from coat_flux.flux import CoatReport


def test_rows_count_parts_with_the_same_treatment() -> None:
    report = CoatReport()
    for i in range(3):
        report.add(f"blocks.{i}.to_q", "W e4m3/per_tensor, x e4m3/per_tensor, dy e5m2")
    report.add("blocks.0.norm", "W e4m3/per_tensor, high precision GEMM", "one row per image")
    report.skipped = {"proj_out": "outside the blocks", "blocks.0.odd": "fallback: multiples of 16"}
    assert report.rows() == [
        ("blocks.*", 3, "W e4m3/per_tensor, x e4m3/per_tensor, dy e5m2", ""),
        ("blocks.*", 1, "W e4m3/per_tensor, high precision GEMM", "one row per image"),
        ("proj_out", 1, "high precision", "outside the blocks"),
        ("blocks.*", 1, "high precision", "fallback: multiples of 16"),
    ]
    assert report.converted == ["blocks.0.to_q", "blocks.1.to_q", "blocks.2.to_q", "blocks.0.norm"]


def test_table_is_aligned_and_ends_with_checkpointing() -> None:
    report = CoatReport(checkpointing="checkpointing all: 2 of 2 blocks recompute")
    report.add("blocks.0", "short", "why it is")
    report.add("other", "a longer treatment")
    assert report.table().splitlines() == [
        "layers    count  got                 why",
        "blocks.*  1      short               why it is",
        "other     1      a longer treatment",
        "checkpointing all: 2 of 2 blocks recompute",
    ]


def test_empty_report_is_a_heading() -> None:
    assert CoatReport().table() == "layers  count  got  why"
