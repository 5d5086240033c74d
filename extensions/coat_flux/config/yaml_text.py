"""From the text of a job file to plain Python values, with errors that point at the line.

YAML is read with SafeLoader, so nothing in a file can make an object or run code. A file may be as large as a job ever
is: longer or deeper ones, and aliases that multiply ("billion laughs"), are refused before anything is built from them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from .findings import ConfigError, Finding, finding

YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json", ".jsonc")
MAX_BYTES = 200_000
MAX_DEPTH = 32
MAX_NODES = 8_000  # twenty times a long job, and half a second of PyYAML
MAX_EXPANDED = 50_000  # nodes after every alias is replaced by what it stands for
_EXPONENT_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
# what YAML 1.1, which ai-toolkit reads too, takes for another number than a reader does
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
INVISIBLE = re.compile("[\u00a0\u1680\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")
_ODD = re.compile(f"{INVISIBLE.pattern}|：")
_TOO_DEEP = "nested too deeply to be a job; check its brackets"


class _TooManyError(Exception):
    """More nodes than a job has."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the host's float rule, and limits on what costs it time: nodes, and open brackets squared."""

    def __init__(self, text: str):
        super().__init__(text)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _TooManyError
        return super().compose_node(parent, index)

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token_class)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+0123456789"))


def read_text(path: Path) -> str:
    """The text of a job file.

    Raises:
        ConfigError: not a YAML or JSON file, not there, too large, not UTF-8.
    """
    file = str(path)
    if path.suffix.lower() not in YAML_SUFFIXES + JSON_SUFFIXES:
        known = ", ".join(YAML_SUFFIXES + JSON_SUFFIXES)
        raise _error(file, "", f"a job file ends in {known}; rename it or give the path of the YAML")
    try:
        if not path.exists():
            raise _error(file, "", f"no such file in {Path.cwd()}; give a path that exists")
        if not path.is_file():
            raise _error(file, "", "not a file; give the path of the YAML itself")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _error(file, "", f"has {size:,} bytes, a job at most {MAX_BYTES:,}; give the path of the YAML itself")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _error(file, "", f"not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except OSError as error:
        raise _error(file, "", f"cannot be read: {error.strerror}; check its permissions") from error


def parse(text: str, file: str) -> Any:
    """What the text of a job file says, as plain values; JSON or YAML by the file's name.

    Raises:
        ConfigError: with line and column, and the line itself where that helps.
    """
    return _load_json(text, file) if file.lower().endswith(JSON_SUFFIXES) else _load_yaml(text, file)


def join(path: str, key: str) -> str:
    """`path.key`."""
    return f"{path}.{key}" if path else key


def _error(file: str, key: str, text: str) -> ConfigError:
    return ConfigError(finding(file, key, text))


def _load_yaml(text: str, file: str) -> Any:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _refuse_odd_nodes(node, text, file)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except _TooManyError as error:
        raise _error(file, "", f"has more than {MAX_NODES:,} values; give the path of the YAML itself") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_at(file, text, mark, f"not YAML: {error.problem or error.context}")) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = f"U+{ord(error.character):04X}" if isinstance(error.character, str) else f"U+{error.character:04X}"
        raise _error(file, f"line {line}", f"the character {code} cannot be in YAML; remove it") from error
    except ConfigError:
        raise
    except ValueError as error:  # a date or number that has the form of one and is none, as 2024-13-45
        raise _error(file, "", f"not YAML: {error}; write that value in quotes") from error
    except RecursionError as error:
        raise _error(file, "", _TOO_DEEP) from error


def _at(file: str, text: str, mark: yaml.Mark | None, problem: str) -> Finding:
    if mark is None:
        return finding(file, "", f"{problem}; correct it")
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    if "could not determine a constructor" in problem:
        problem, remedy = f"{problem}, and a job holds plain values only", "remove the tag that starts with !"
    elif "unhashable key" in problem:
        problem, remedy = "a key must be a string", "write one before the colon"
    elif "\t" in line[: len(line) - len(line.lstrip())]:
        remedy = "indent with spaces, not tabs"
    elif odd := next((n for n in (mark.line - 1, mark.line) if 0 <= n < len(lines) and _ODD.search(lines[n])), None):
        line, sign = lines[odd], _ODD.search(lines[odd])[0]
        where = f"line {odd + 1}, column {line.index(sign) + 1}"
        remedy = f"replace the character U+{ord(sign):04X} by a plain {'colon' if sign == '：' else 'space'}"
    elif "escape" in problem or "hexadecimal" in problem:
        remedy = "in double quotes a backslash starts an escape: use single quotes, or / in paths"
    elif ": " in line.partition(": ")[2] or "mapping values" in problem:
        remedy = "put a string that contains ': ' in quotes, and check the indentation"
    else:
        remedy = "check the indentation, quotes and brackets of this line and the one before"
    return finding(file, where, f"{problem}; {remedy}: {line.strip()!r}")


class _Nodes:
    """One walk over the nodes of a document: keys written twice, aliases of themselves, depth, size without aliases."""

    def __init__(self, text: str, file: str):
        self.text, self.file = text, file
        self.found: list[Finding] = []
        self.sizes: dict[int, int] = {}

    def size(self, node: yaml.Node | None, path: str, parents: tuple[int, ...]) -> int:
        """How many nodes `node` is once its aliases are replaced."""
        if not isinstance(node, yaml.CollectionNode):
            if isinstance(node, yaml.ScalarNode):
                self._check_number(node, path)
            return 1
        if id(node) in parents:
            self.found.append(_at(self.file, self.text, node.start_mark, f"{path}: an alias that contains itself"))
            return 1
        if len(parents) > MAX_DEPTH:
            raise _error(self.file, "", _TOO_DEEP)
        if id(node) not in self.sizes:
            inside = (*parents, id(node))
            self.sizes[id(node)] = 1 + sum(self.size(item, name, inside) for name, item in self.items(node, path))
        return self.sizes[id(node)]

    def _check_number(self, node: yaml.ScalarNode, path: str) -> None:
        """Find numbers that mean another one in YAML 1.1: `1:30` is 90, `010` is 8."""
        text = node.value
        if node.style is not None or node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
            return
        where = f"line {node.start_mark.line + 1}: {path}"
        if _SEXAGESIMAL.fullmatch(text):
            rule = f"YAML reads {text} as a number to base 60, {yaml.safe_load(text)}"
            self.found.append(finding(self.file, where, f"{rule}; write a plain number, or '{text}' in quotes"))
        elif _OCTAL.fullmatch(text) and yaml.safe_load(text) != (plain := int(text)):
            rule = f"YAML reads {text} as an octal number, {yaml.safe_load(text)}"
            self.found.append(finding(self.file, where, f"{rule}; write {plain}, or '{text}' in quotes"))

    def items(self, node: yaml.CollectionNode, path: str) -> list[tuple[str, yaml.Node]]:
        if isinstance(node, yaml.SequenceNode):
            return [(f"{path}[{i}]", item) for i, item in enumerate(node.value)]
        self.found += _duplicates(node, path, self.file)
        return [(join(path, str(key.value)), part) for key, item in node.value for part in (key, item)]


def _refuse_odd_nodes(root: yaml.Node | None, text: str, file: str) -> None:
    """Raise on keys written twice, on aliases that contain themselves, on too much."""
    nodes = _Nodes(text, file)
    size = nodes.size(root, "", ())
    if nodes.found:
        raise ConfigError(nodes.found)
    if size > MAX_EXPANDED:
        rule = f"its aliases (*name) make {size:,} values, a job has at most {MAX_EXPANDED:,}; write out what is meant"
        raise _error(file, "", rule)


def _duplicates(node: yaml.MappingNode, path: str, file: str) -> list[Finding]:
    lines: dict[str, list[int]] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            lines.setdefault(key.value, []).append(key.start_mark.line + 1)
    return [
        finding(file, join(path, key), f"written twice, in lines {at[0]} and {at[1]}; keep one")
        for key, at in lines.items()
        if len(at) > 1
    ]


def _load_json(text: str, file: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise _error(file, "", f"the key '{key}' is written twice in one block; keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise _error(file, where, f"not JSON: {error.msg}; correct this line: {line.strip()!r}") from error
    except RecursionError as error:
        raise _error(file, "", _TOO_DEEP) from error
    except ConfigError:
        raise
    except ValueError as error:  # a whole number of more than 4300 digits
        raise _error(file, "", "not JSON: a number has more than 4300 digits; shorten that number") from error
