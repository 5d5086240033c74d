"""The size of the house: what a newcomer must read. The test prints the numbers (`pytest -s`) and holds them."""

import ast
import re

from coat_flux.config.coat import OPTIONS
from tests.architecture.sources import ROOT, library_sources

SOURCES = library_sources()
TEXTS = {source.module: source.path.read_text(encoding="utf-8") for source in SOURCES}
# goals: 35,000 lines in 210 files, 41.7 characters a line, 350 short functions, 250 called once, 100 records
LIMITS = {  # lower them when the house has become smaller
    "lines": 38_380,
    "files": 195,
    "characters in 100 lines": 4_531,
    "functions of four lines or fewer": 464,
    "private functions called once in their file": 245,
    "dataclasses and named tuples": 107,
    "docstring lines": 4_045,
    "coat: options": 45,
}


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _called_once(tree: ast.Module, text: str) -> int:
    """Private functions whose name stands twice in their file: where they are defined, and where they are used."""
    names = [function.name for function in _functions(tree) if re.fullmatch(r"_[a-z]\w*", function.name)]
    return sum(len(re.findall(rf"\b{name}\b", text)) == 2 for name in names)


def _is_record(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any("dataclass" in mark or "NamedTuple" in mark for mark in marks)


def _docstring_lines(tree: ast.Module) -> int:
    lines = 0
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            lines += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def _counts() -> dict[str, int]:
    lines = sum(text.count("\n") for text in TEXTS.values())
    functions = [function for source in SOURCES for function in _functions(source.tree)]
    return {
        "lines": lines,
        "files": len(SOURCES),
        "characters in 100 lines": sum(len(text) - text.count("\n") for text in TEXTS.values()) * 100 // lines,
        "functions of four lines or fewer": sum((each.end_lineno or 0) - each.lineno < 4 for each in functions),
        "private functions called once in their file": sum(
            _called_once(source.tree, TEXTS[source.module]) for source in SOURCES
        ),
        "dataclasses and named tuples": sum(_is_record(node) for source in SOURCES for node in ast.walk(source.tree)),
        "docstring lines": sum(_docstring_lines(source.tree) for source in SOURCES),
        "coat: options": len(OPTIONS),
    }


def test_the_house_does_not_grow():
    counts = _counts()
    for name, count in counts.items():
        print(f"{count:7,}  {name} (at most {LIMITS[name]:,})")
    assert {name: count for name, count in counts.items() if count > LIMITS[name]} == {}


def _lines_below(folder: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py"))


def test_scripts_and_tests_do_not_grow():
    assert _lines_below("scripts") <= 4_381
    assert _lines_below("tests") <= 33_207
