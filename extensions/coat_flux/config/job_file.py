"""Reading a job file the way ai-toolkit does, but with errors that point at the place.

As ai-toolkit: YAML or JSON by extension, `${ENV}` replaced in the text before it is parsed, `[name]` replaced in every
string, and `1e-4` a float (a string to plain PyYAML). Unlike ai-toolkit: a key written twice is refused (YAML readers
silently keep the last one), so are numbers that YAML 1.1 reads as another one, and the shape of a job is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from .findings import ConfigError, Finding, Findings, finding, suggest_key

YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json", ".jsonc")
NAME_TAG = "[name]"
_PACKAGE = Path(__file__).resolve().parents[1]
_ENV = re.compile(r"\$\{([^}]+)\}")
_EXPONENT_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
# what YAML 1.1, which ai-toolkit reads too, takes for another number than a reader does
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_INVISIBLE = re.compile("[\u00a0\u1680\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")
_ODD = re.compile(f"{_INVISIBLE.pattern}|：")
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # control characters, half a character of JSON
_TOO_DEEP = "nested too deeply to be a job; check its brackets"


def shipped_folder(name: str) -> Path | None:
    """`configs` or `datasets_example` as it came with coat-flux: inside the installed package, or in the checkout."""
    return next((path for path in (_PACKAGE / name, _PACKAGE.parents[1] / name) if path.is_dir()), None)


def shipped() -> dict[str, Path]:
    """The ready-made configs, by file name; empty where only the extension's own folder was copied."""
    folder = shipped_folder("configs")
    return {path.name: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def load_job_yaml(path: str | os.PathLike[str], *, name: str | None = None) -> dict[str, Any]:
    """Read a job file.

    Args:
        path: a .yaml, .yml, .json or .jsonc file, UTF-8 (a byte order mark is accepted).
        name: takes the place of `config.name`, as `run.py --name` does.

    Returns:
        The whole job: `job`, `config` with `name` and a list `process` of at least one block, and perhaps `meta`.

    Raises:
        ConfigError: no such file, not YAML or JSON (with line, column and the line itself), a key written twice, an
            environment variable that is not set, or not the shape of a job.
    """
    file = os.fspath(path)
    text = _read_text(Path(file))
    unset = [match for match in _ENV.finditer(text) if match[1] not in os.environ]
    if unset:
        rule = "this environment variable is not set; set it, or write the value"
        raise ConfigError(
            finding(file, f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]}", rule) for match in unset
        )
    raw = parse(_ENV.sub(lambda match: os.environ[match[1]], text), file)
    findings = Findings(file)
    check_shape(raw, findings, name=name)
    check_plain(raw, findings)
    findings.raise_if_any()
    if name is not None:
        raw["config"]["name"] = name
    return replace_name(raw, raw["config"]["name"])


def load_written(path: str | os.PathLike[str], *, name: str) -> dict[str, Any]:
    """A job file that `load_job_yaml` has read, with every `${VARIABLE}` unexpanded: for what is stored.

    Args:
        path: of the file.
        name: of the job.
    """
    file = os.fspath(path)
    text = _read_text(Path(file))
    variables = list(dict.fromkeys(_ENV.findall(text)))
    marks = {variable: f"COATVARIABLE{number}X" for number, variable in enumerate(variables)}
    raw = parse(_ENV.sub(lambda match: marks[match[1]], text), file)
    raw["config"]["name"] = name

    def put_back(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: put_back(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put_back(item) for item in value]
        if isinstance(value, str):
            for variable, mark in marks.items():
                value = value.replace(mark, f"${{{variable}}}")
        return value

    return put_back(replace_name(raw, name))


def check_shape(raw: Any, findings: Findings, *, name: str | None = None) -> None:
    """Check that `raw` is a job: `job`, `config.name` and a list of process blocks."""
    if not isinstance(raw, Mapping):
        findings.add("the file", "must be a block with the keys job and config; start from one in configs/", raw)
        return
    if "job" not in raw:
        findings.add("job", "is missing; write job: extension")
    for key in raw:
        if key not in ("job", "config", "meta"):
            findings.add(_key_text(key), f"unknown key; {suggest_key(key, ('job', 'config', 'meta'))}")
    config = raw.get("config")
    if not isinstance(config, Mapping):
        findings.add("config", "must be a block with the keys name and process; start from one in configs/", config)
        return
    if name is None and not isinstance(config.get("name"), str):
        findings.add("config.name", "must be a string; write one, in quotes if it is a number", config.get("name"))
    processes = config.get("process")
    if not isinstance(processes, list) or not processes:
        findings.add("config.process", "must be a list; put '- ' before its first key, as in '- type: …'", processes)
        return
    for i, process in enumerate(processes):
        if not isinstance(process, Mapping):
            findings.add(f"config.process[{i}]", "must be a block of keys; write type: coat_flux_trainer", process)


def check_plain(value: Any, findings: Findings, path: str = "") -> None:
    """Check that there are only blocks, lists, strings, numbers, true, false and null, without hidden characters.

    A key that is not a string is left to the check of unknown keys.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = _key_text(key)
            where = f"{path}.{name}" if path else name
            _check_characters(name, where, "this key", findings)
            if odd := _INVISIBLE.search(name):
                rule = f"this key holds the invisible character U+{ord(odd[0]):04X}, shown as ?; type the key again"
                findings.add(_INVISIBLE.sub("?", where), rule)
            check_plain(item, findings, where)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_plain(item, findings, f"{path}[{i}]")
    elif isinstance(value, str):
        _check_characters(value, path, "this string", findings)
    elif not isinstance(value, (int, float, type(None))):
        findings.add(path, f"YAML reads this as a {type(value).__name__}; write it in quotes", str(value))


def replace_name(value: Any, name: str) -> Any:
    """A copy of `value` with `[name]` replaced in every string, and every key a string."""
    if isinstance(value, str):
        return value.replace(NAME_TAG, name)
    if isinstance(value, Mapping):
        return {_key_text(key).replace(NAME_TAG, name): replace_name(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_name(item, name) for item in value]
    return value


def parse(text: str, file: str) -> Any:
    """What the text of a job file says, as plain values; JSON or YAML by the file's name.

    Raises:
        ConfigError: with line and column, and the line itself where that helps.
    """
    load = _load_json if file.lower().endswith(JSON_SUFFIXES) else _load_yaml
    try:
        return load(text, file)
    except RecursionError as error:
        raise ConfigError(finding(file, "", _TOO_DEEP)) from error


class _Loader(yaml.SafeLoader):
    """SafeLoader with ai-toolkit's float rule."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+0123456789"))


def _read_text(path: Path) -> str:
    known = ", ".join(YAML_SUFFIXES + JSON_SUFFIXES)
    try:
        if path.suffix.lower() not in YAML_SUFFIXES + JSON_SUFFIXES:
            wrong = f"a job file ends in {known}; rename it or give the path of the YAML"
        elif not path.exists():
            wrong = f"no such file in {Path.cwd()}; give a path that exists"
        elif not path.is_file():
            wrong = "not a file; give the path of the YAML itself"
        else:
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 text (byte {error.start}); save the file as UTF-8"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}; check its permissions"
    raise ConfigError(finding(str(path), "", wrong))


def _load_yaml(text: str, file: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if found := _odd_nodes(node, text, file):
            raise ConfigError(found)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_at(file, text, mark, f"not YAML: {error.problem or error.context}")) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = f"U+{ord(error.character):04X}" if isinstance(error.character, str) else f"U+{error.character:04X}"
        rule = f"the character {code} cannot be in YAML; remove it"
        raise ConfigError(finding(file, f"line {line}", rule)) from error
    except ConfigError:
        raise
    except ValueError as error:  # what has the form of a date or number but is not one, as 2024-13-45
        raise ConfigError(finding(file, "", f"not YAML: {error}; write that value in quotes")) from error
    finally:
        if loader is not None:
            loader.dispose()


def _at(file: str, text: str, mark: yaml.Mark | None, problem: str) -> Finding:
    """A finding at a mark of PyYAML's, with the remedy that its line suggests."""
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


def _odd_nodes(root: yaml.Node | None, text: str, file: str) -> list[Finding]:
    """Keys written twice, aliases of themselves, and numbers that mean another one in YAML 1.1."""
    found: list[Finding] = []
    done: set[int] = set()

    def walk(node: yaml.Node, path: str, parents: tuple[int, ...]) -> None:
        if id(node) in parents:
            found.append(_at(file, text, node.start_mark, f"{path}: an alias that contains itself"))
        if id(node) in done:
            return
        done.add(id(node))
        inside = (*parents, id(node))
        if isinstance(node, yaml.ScalarNode):
            if rule := _misread(node):
                found.append(finding(file, f"line {node.start_mark.line + 1}: {path}", rule))
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, f"{path}[{i}]", inside)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, list[int]] = {}
            for key, item in node.value:
                where = f"{path}.{key.value}" if path else str(key.value)
                if isinstance(key, yaml.ScalarNode):
                    lines.setdefault(where, []).append(key.start_mark.line + 1)
                walk(key, where, inside)
                walk(item, where, inside)
            for where, at in lines.items():
                if len(at) > 1:
                    found.append(finding(file, where, f"written twice, in lines {at[0]} and {at[1]}; keep one"))

    if root is not None:
        walk(root, "", ())
    return found


def _misread(node: yaml.ScalarNode) -> str | None:
    """Rule and remedy for a number that YAML 1.1 reads as another one: `1:30` is 90, `010` is 8."""
    text = node.value
    if node.style is not None or node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return None
    if _SEXAGESIMAL.fullmatch(text):
        rule = f"YAML reads {text} as a number to base 60, {yaml.safe_load(text)}"
        return f"{rule}; write a plain number, or '{text}' in quotes"
    if _OCTAL.fullmatch(text) and yaml.safe_load(text) != (plain := int(text)):
        return f"YAML reads {text} as an octal number, {yaml.safe_load(text)}; write {plain}, or '{text}' in quotes"
    return None


def _load_json(text: str, file: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(finding(file, "", f"the key '{key}' is written twice in one block; keep one"))
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else ""
        where = f"line {error.lineno}, column {error.colno}"
        rule = f"not JSON: {error.msg}; correct this line: {line.strip()!r}"
        raise ConfigError(finding(file, where, rule)) from error
    except ConfigError:
        raise
    except ValueError as error:  # a whole number of more than 4300 digits
        rule = "not JSON: a number has more than 4300 digits; shorten that number"
        raise ConfigError(finding(file, "", rule)) from error


def _check_characters(text: str, path: str, what: str, findings: Findings) -> None:
    """Refuse what cannot be in a name, path or caption."""
    if found := _NOT_TEXT.search(text):
        where = _NOT_TEXT.sub("?", path)
        findings.add(where, f"{what} holds the character U+{ord(found[0]):04X}; remove it")


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, (date, bytes, tuple)) else json.dumps(key)
