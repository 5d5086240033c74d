"""One atomic write: files are renamed into place and flushed in `base/files.py`; `saves` moves whole sets."""

from __future__ import annotations

import ast

from tests.architecture.sources import library_sources

PARTS = {"replace", "rename", "fsync", "mkstemp", "NamedTemporaryFile"}
MODULES = {"os", "tempfile"}
HOMES = ("coat_flux.base.", "coat_flux.saves.")


def test_only_base_and_saves_rename_and_flush_files() -> None:
    wrong = [
        f"{source.name}:{node.lineno}: {node.value.id}.{node.attr}; use coat_flux.base.files"
        for source in library_sources()
        if not source.module.startswith(HOMES)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in MODULES
        and node.attr in PARTS
    ]
    assert not wrong, "\n".join(wrong)
