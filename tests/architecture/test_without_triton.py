"""Windows and macOS, where PyTorch comes without triton: test files that need it are read, and skip themselves."""

import ast

from tests.architecture.sources import ROOT, Import, Source, library_sources, read_sources

SOURCES = {
    source.module: source
    for source in [
        *library_sources(),
        *read_sources(ROOT / "tests", "tests"),
        *read_sources(ROOT / "scripts", "scripts"),
    ]
}
SKIPS = 'pytest.importorskip("triton"'


def _imported_by(source: Source) -> list[Import]:
    """What importing the file imports; not what stands in a function or behind a condition."""
    body: list[ast.stmt] = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return Source(source.path, source.module, ast.Module(body, [])).imports()


def _way_to_triton(module: str, seen: set[str]) -> list[str]:
    """The modules by which importing `module` imports triton; empty if it does not."""
    seen.add(module)
    for imported in _imported_by(SOURCES[module]):
        name = imported.module
        if name.partition(".")[0] == "triton":
            return [module]
        while name and name not in SOURCES:
            name = name.rpartition(".")[0]
        if name and name not in seen and (way := _way_to_triton(name, seen)):
            return [module, *way]
    return []


def test_no_test_file_needs_triton_to_be_read():
    ways = {}
    for module, source in SOURCES.items():
        if source.path.name.startswith("test_") and SKIPS not in source.path.read_text(encoding="utf-8"):
            ways[module] = _way_to_triton(module, set())
    assert len(ways) > 100
    assert {module: way for module, way in ways.items() if way} == {}
    assert _way_to_triton("tests.helpers.kernel_cases", set()) != []  # a way is found where there is one
