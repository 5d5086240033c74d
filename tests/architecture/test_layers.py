"""The floor plan: every package has its own number, and imports go to a smaller one; no files import in a circle.

Files are renamed into place and flushed in `base/files.py` alone; `saves` moves whole sets.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.architecture.sources import ROOT, Import, Source, library_sources, repository_files

# from the ground up; a new module or package is given its place here
CORE = (
    *("formats", "granularity", "autograd", "casts", "config", "quantize", "rounding", "int8", "nvfp4", "expansion"),
    *("moments", "ops", "optim", "linear", "activation"),
)
FLUX = (
    *("base", "config", "mini_flux", "data", "blocks", "saves", "plan", "export", "watch", "trainers", "pages"),
    *("study", "bench", "doctor", "cli"),
)
ORDER = (*(f"coat_core.{name}" for name in CORE), *(f"coat_flux.{name}" for name in FLUX))
LAYERS = {unit: number for number, unit in enumerate(ORDER)}
MAX_FOLDERS = 15  # of coat_flux
SIBLINGS = ("coat_flux.trainers.standalone", "coat_flux.trainers.ai_toolkit")
AI_TOOLKIT_MODULES = {"toolkit", "jobs", "extensions_built_in"}
MAX_LINES = 800
RENAMES_AND_FLUSHES = {"replace", "rename", "fsync", "mkstemp", "NamedTemporaryFile"}  # of os and tempfile

ROOTS = ("coat_core", "coat_flux")

SOURCES = library_sources()
MODULES = [source for source in SOURCES if source.module not in ROOTS]  # the roots re-export names of every layer
FILES = {source.module: source for source in SOURCES}


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
    own = _unit(source.module)
    return own == unit or LAYERS[unit] < LAYERS[own]


def _place(source: Source, found: Import) -> str:
    return f"{source.name}:{found.line} imports {found.module}"


def test_every_module_has_its_place():
    assert {_unit(source.module) for source in MODULES} == set(LAYERS), "give every module its place in ORDER"
    assert len(FLUX) <= MAX_FOLDERS


def test_imports_go_to_a_smaller_number():
    wrong = [
        f"{_place(source, found)} (number {LAYERS[_unit(source.module)]})"
        for source in MODULES
        for unit, found in _own(source)
        if not _may_import(source, unit, found)
    ]
    assert wrong == []


def test_no_files_import_in_a_circle():
    """Also lazily or for types alone; a package's file may list its modules."""
    reads: dict[str, set[str]] = {}
    for source in MODULES:
        for found in source.imports():
            module = found.module if found.module in FILES else found.module.rpartition(".")[0]
            own = module == source.module or source.module.startswith(f"{module}.")
            if _top(found) in ROOTS and module in FILES and not own:
                reads.setdefault(source.module, set()).add(module)
    TopologicalSorter(reads).prepare()  # CycleError names the circle


def _is_forbidden(source: Source, found: Import) -> bool:
    top = _top(found)
    if top in AI_TOOLKIT_MODULES and not source.module.startswith("coat_flux.trainers.ai_toolkit."):
        return True
    if source.module.startswith("coat_core") and top not in {"coat_core", "torch", *sys.stdlib_module_names}:
        return not (top == "triton" and _unit(source.module) == "coat_core.ops")  # lazily: test_lean_import.py
    return any(
        source.module.startswith(one) and found.module.startswith(other) for one, other in (SIBLINGS, SIBLINGS[::-1])
    )


def test_what_no_file_imports():
    """The trainers not each other, core only torch and the standard library, ai-toolkit in its trainer alone."""
    wrong = [_place(source, found) for source in SOURCES for found in source.imports() if _is_forbidden(source, found)]
    assert wrong == []


def test_flux_imports_itself_relatively():
    """The folder is extensions.coat_flux to ai-toolkit and coat_flux to pip: only relative imports suit both."""
    wrong = [
        _place(source, found)
        for source in MODULES
        for found in source.imports()
        if source.module.startswith("coat_flux") and not found.relative and _top(found) in ("coat_flux", "extensions")
    ]
    assert wrong == []


def test_only_base_and_saves_rename_and_flush_files():
    wrong = [
        f"{source.name}:{node.lineno}: use coat_flux.base.files"
        for source in SOURCES
        if not source.module.startswith(("coat_flux.base.", "coat_flux.saves."))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in RENAMES_AND_FLUSHES
        if isinstance(node.value, ast.Name) and node.value.id in ("os", "tempfile")
    ]
    assert wrong == []


def test_files_are_short():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in repository_files()
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}
