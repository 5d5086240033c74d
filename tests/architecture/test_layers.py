"""Import direction: lower layers never import higher ones, siblings of one pair of folders never import each other."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tests.architecture.sources import ROOT, Import, Source, library_sources, repository_files

# layer of every module or package directly under a root; a new one must be given its place here
LAYERS = {
    "coat_core.formats": 0,
    "coat_core.granularity": 0,
    "coat_core.config": 1,
    "coat_core.quantize": 1,
    "coat_core.expansion": 1,
    "coat_core.metrics": 1,
    "coat_core.moments": 1,
    "coat_core.autograd": 1,
    "coat_core.kernels": 2,
    "coat_core.optim": 3,
    "coat_core.linear": 3,
    "coat_core.activation": 3,
    "coat_flux.errors": 4,
    "coat_flux.steady": 4,
    "coat_flux.config": 4,
    "coat_flux.flux": 4,
    "coat_flux.lora": 4,
    "coat_flux.flow": 4,
    "coat_flux.plan": 4,
    "coat_flux.memory": 4,
    "coat_flux.data": 4,
    "coat_flux.optimizer": 4,
    "coat_flux.tiny_flux": 4,
    "coat_flux.speed": 4,
    "coat_flux.check": 4,
    "coat_flux.checkpoint": 4,
    "coat_flux.export": 4,
    "coat_flux.guard": 4,
    "coat_flux.page": 4,
    "coat_flux.precision": 4,
    "coat_flux.run_log": 4,
    "coat_flux.engine": 5,
    "coat_flux.aitk": 5,
    "coat_flux.bench": 6,
    "coat_flux.doctor": 6,
    "coat_flux.report": 6,
    "coat_flux.verify": 6,
    "coat_flux.live": 6,
    "coat_flux.cli": 7,
}
SIBLINGS = [("coat_core.optim", "coat_core.linear", "coat_core.activation"), ("coat_flux.engine", "coat_flux.aitk")]
AI_TOOLKIT_MODULES = {"toolkit", "jobs", "extensions_built_in"}
MAX_LINES = 400

ROOTS = ("coat_core", "coat_flux")

SOURCES = library_sources()
MODULES = [source for source in SOURCES if source.module not in ROOTS]  # the roots re-export names of every layer


def _unit(module: str) -> str:
    """coat_core.optim.state -> coat_core.optim."""
    return ".".join(module.split(".")[:2])


def _top(found: Import) -> str:
    return found.module.split(".")[0]


def _own(source: Source) -> Iterator[tuple[str, Import]]:
    """Imports of our own code as (unit, import); the unit of a name taken from a root package is that root."""
    for found in source.imports():
        unit = _unit(found.module)
        if _top(found) in ROOTS:
            yield (unit if unit in LAYERS else _top(found)), found


def _may_import(source: Source, unit: str, found: Import) -> bool:
    if unit == "coat_flux":  # its public names load the upper layers; what starts with _ is its own
        return found.module.startswith("coat_flux._")
    if unit == "coat_core":  # public names of coat_core's top layer
        return source.module.startswith("coat_flux.")
    return LAYERS[unit] <= LAYERS[_unit(source.module)]


def _place(source: Source, found: Import) -> str:
    return f"{source.name}:{found.line} imports {found.module}"


def test_there_is_something_to_check() -> None:
    assert {source.module for source in SOURCES} >= {"coat_core", "coat_core.quantize", "coat_flux", "coat_flux.config"}
    assert {_unit(source.module) for source in MODULES} == set(LAYERS), "give every module its layer in LAYERS"


def test_lower_layers_never_import_higher_ones() -> None:
    wrong = [
        f"{_place(source, found)} (layer {LAYERS[_unit(source.module)]})"
        for source in MODULES
        for unit, found in _own(source)
        if not _may_import(source, unit, found)
    ]
    assert wrong == []


def test_siblings_never_import_each_other() -> None:
    rivals = {unit: set(family) - {unit} for family in SIBLINGS for unit in family}
    wrong = [
        _place(source, found)
        for source in MODULES
        for unit, found in _own(source)
        if unit in rivals.get(_unit(source.module), ())
    ]
    assert wrong == []


def test_core_imports_torch_and_the_standard_library_only() -> None:
    allowed = {"coat_core", "torch", *sys.stdlib_module_names}
    wrong = [
        _place(source, found)
        for source in SOURCES
        for found in source.imports()
        if source.module.startswith("coat_core")
        and _top(found) not in allowed
        and not (_top(found) == "triton" and _unit(source.module) == "coat_core.kernels")  # lazily: test_lean_import.py
    ]
    assert wrong == []


def test_only_aitk_imports_ai_toolkit() -> None:
    importers = {
        _unit(source.module) for source in SOURCES for found in source.imports() if _top(found) in AI_TOOLKIT_MODULES
    }
    assert importers <= {"coat_flux.aitk"}


def test_flux_imports_itself_relatively() -> None:
    """The folder is extensions.coat_flux to ai-toolkit and coat_flux to pip: only relative imports suit both."""
    wrong = [
        _place(source, found)
        for source in MODULES
        for found in source.imports()
        if source.module.startswith("coat_flux") and not found.relative and _top(found) in ("coat_flux", "extensions")
    ]
    assert wrong == []


def test_library_code_does_not_print() -> None:
    wrong = [
        f"{source.name}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if _unit(source.module) != "coat_flux.cli"
    ]
    assert wrong == []


def test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in repository_files()
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}
