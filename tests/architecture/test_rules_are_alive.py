"""The import reader itself: a rule that never fires protects nothing."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.sources import ROOT, Import, Source


def _source(module: str, text: str, package: bool = False) -> Source:
    file = "__init__.py" if package else "module.py"
    return Source(ROOT / Path(*module.split(".")) / file, module, ast.parse(text))


def test_absolute_and_nested_imports_are_seen() -> None:
    text = "import torch.nn\ndef f():\n    from toolkit.config import load\n    import_module('jobs.process')\n"
    assert _source("coat_core.optim.state", text).imports() == [
        Import("torch.nn", 1, False),
        Import("toolkit.config.load", 3, False),
        Import("jobs.process", 4, False),
    ]


def test_relative_imports_are_resolved_from_modules_and_packages() -> None:
    text = "from ... import data\nfrom ...config.values import x\nfrom .a import b\n"
    from_module = [found.module for found in _source("coat_flux.trainers.standalone.trainer", text).imports()]
    assert from_module == ["coat_flux.data", "coat_flux.config.values.x", "coat_flux.trainers.standalone.a.b"]
    from_package = [found.module for found in _source("coat_flux.trainers.standalone", text, package=True).imports()]
    assert from_package == ["coat_flux.data", "coat_flux.config.values.x", "coat_flux.trainers.standalone.a.b"]
    assert all(found.relative for found in _source("coat_flux.trainers.standalone", text, package=True).imports())


def test_relative_import_module_is_resolved() -> None:
    found = _source(
        "coat_flux.lazy", "import importlib\nimportlib.import_module('.trainers.standalone.trainer', __package__)\n"
    )
    assert found.imports()[1] == Import("coat_flux.trainers.standalone.trainer", 2, True)
