"""The library's Python files as syntax trees, and what each of them imports. Nothing is executed."""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLUX_DIR = ROOT / "extensions" / "coat_flux"


@dataclass(frozen=True)
class Import:
    """One imported module, absolute dotted name; `relative` when it was written with leading dots."""

    module: str
    line: int
    relative: bool


@dataclass(frozen=True)
class Source:
    """One file of the library under its dotted module name."""

    path: Path
    module: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path from the repository's root, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """What relative imports start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    def imports(self) -> list[Import]:
        """Every import in the file, also inside functions and through `import_module("…")`."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, False) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node.module or "", node.level)
                # `from package import name` may import the module package.name
                found += [Import(f"{base}.{alias.name}", node.lineno, node.level > 0) for alias in node.names]
            elif isinstance(node, ast.Call) and _called_name(node) == "import_module" and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    level = len(argument.value) - len(argument.value.lstrip("."))
                    found.append(Import(self._absolute(argument.value[level:], level), node.lineno, level > 0))
        return found

    def _absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _called_name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def read_sources(folder: Path, package: str) -> list[Source]:
    """Every file of a folder, which is imported as `package`."""
    sources = []
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        sources.append(Source(path, ".".join(parts), ast.parse(path.read_text(encoding="utf-8"))))
    return sources


def library_sources() -> list[Source]:
    """Every file of coat_core and coat_flux."""
    return read_sources(ROOT / "coat_core", "coat_core") + read_sources(FLUX_DIR, "coat_flux")


def repository_files() -> list[Path]:
    """Every Python file of the repository."""
    files = [ROOT / "setup.py"]
    for folder in ("coat_core", "extensions", "scripts", "tests"):
        files += sorted((ROOT / folder).rglob("*.py"))
    return files
