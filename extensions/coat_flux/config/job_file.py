"""Reading a job file the way ai-toolkit does, but with errors that point at the line.

As the host: YAML or JSON by extension, `${ENV}` replaced in the text before it is parsed, `[name]` replaced in every
string, and `1e-4` a float (to plain PyYAML it is a text). Unlike the host: a key written twice is refused (YAML readers
silently keep the last one), and the shape `job`, `config.name`, `config.process` is checked.
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

from .findings import ConfigError, Findings, suggest_key

YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json", ".jsonc")
NAME_TAG = "[name]"
_ENV = re.compile(r"\$\{([^}]+)\}")
_EXPONENT_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the host's float rule."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+0123456789"))


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
    text = _replace_environment(_read(Path(file)), file)
    if file.lower().endswith(JSON_SUFFIXES):
        raw = _load_json(text, file)
    else:
        raw = _load_yaml(text, file)
    findings = Findings(file)
    check_shape(raw, findings, name=name)
    _check_plain(raw, "", findings)
    findings.raise_if_any()
    if name is not None:
        raw["config"]["name"] = name
    return replace_name(raw, raw["config"]["name"])


def check_shape(raw: Any, findings: Findings, *, name: str | None = None) -> None:
    """Check that `raw` is a job: `job`, `config.name` and a list of process blocks."""
    if not isinstance(raw, Mapping):
        findings.add("the file", "must be a block with the keys job and config; start from one in configs/", raw)
        return
    if "job" not in raw:
        findings.add("job", "is missing; write job: extension")
    for key in raw:
        if key not in ("job", "config", "meta"):
            findings.add(str(key), f"unknown key; {suggest_key(key, ('job', 'config', 'meta'))}")
    config = raw.get("config")
    if not isinstance(config, Mapping):
        findings.add("config", "must be a block with the keys name and process; start from one in configs/", config)
        return
    if name is None and not isinstance(config.get("name"), str):
        findings.add("config.name", "must be a text; write one, in quotes if it is a number", config.get("name"))
    processes = config.get("process")
    if not isinstance(processes, list) or not processes:
        findings.add("config.process", "must be a list; put '- ' before its first key, as in '- type: …'", processes)
        return
    for i, process in enumerate(processes):
        if not isinstance(process, Mapping):
            findings.add(f"config.process[{i}]", "must be a block of keys; write type: coat_flux_trainer", process)


def replace_name(value: Any, name: str) -> Any:
    """A copy of `value` with `[name]` replaced in every string, and every key a string."""
    if isinstance(value, str):
        return value.replace(NAME_TAG, name)
    if isinstance(value, Mapping):
        return {_key_text(key).replace(NAME_TAG, name): replace_name(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_name(item, name) for item in value]
    return value


def _check_plain(value: Any, path: str, findings: Findings) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, _join(path, _key_text(key)), findings)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_plain(item, f"{path}[{i}]", findings)
    elif not isinstance(value, (str, int, float, type(None))):
        findings.add(path, f"YAML reads this as a {type(value).__name__}; write it in quotes", str(value))


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, (date, bytes)) else json.dumps(key)


def _read(path: Path) -> str:
    if path.suffix.lower() not in YAML_SUFFIXES + JSON_SUFFIXES:
        known = ", ".join(YAML_SUFFIXES + JSON_SUFFIXES)
        raise ConfigError(f"{path}: a job file ends in {known}; rename it or give the path of the YAML")
    if not path.exists():
        raise ConfigError(f"{path}: no such file in {Path.cwd()}; give a path that exists")
    if not path.is_file():
        raise ConfigError(f"{path}: not a file; give the path of the YAML itself")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error


def _replace_environment(text: str, file: str) -> str:
    unset = [match for match in _ENV.finditer(text) if match[1] not in os.environ]
    if unset:
        raise ConfigError(
            f"{file}: line {text.count(chr(10), 0, match.start()) + 1}: ${{{match[1]}}}: this environment variable "
            "is not set; set it, or write the value"
            for match in unset
        )
    return _ENV.sub(lambda match: os.environ[match[1]], text)


def _load_yaml(text: str, file: str) -> Any:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _refuse_odd_nodes(node, text, file)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_at(file, text, mark, f"not YAML: {error.problem or error.context}")) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = f"U+{ord(error.character):04X}" if isinstance(error.character, str) else f"U+{error.character:04X}"
        raise ConfigError(f"{file}: line {line}: the character {code} cannot be in YAML; remove it") from error
    except ValueError as error:  # a date or number that has the form of one and is none, as 2024-13-45
        raise ConfigError(f"{file}: not YAML: {error}; write that value in quotes") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply to be a job; check its brackets") from error


def _at(file: str, text: str, mark: yaml.Mark | None, problem: str) -> str:
    if mark is None:
        return f"{file}: {problem}; correct it"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        remedy = "indent with spaces, not tabs"
    elif ": " in line.partition(": ")[2] or "mapping values" in problem:
        remedy = "put a text that contains ': ' in quotes, and check the indentation"
    else:
        remedy = "check the indentation, quotes and brackets of this line and the one before"
    return f"{file}: line {mark.line + 1}, column {mark.column + 1}: {problem}; {remedy}: {line.strip()!r}"


def _refuse_odd_nodes(root: yaml.Node | None, text: str, file: str) -> None:
    """Raise on keys written twice and on aliases that contain themselves."""
    findings: list[str] = []
    done: set[int] = set()

    def visit(node: yaml.Node | None, path: str, parents: tuple[int, ...]) -> None:
        if id(node) in parents:
            findings.append(_at(file, text, node.start_mark, f"{path}: an alias that contains itself"))
        elif isinstance(node, yaml.CollectionNode) and id(node) not in done:
            done.add(id(node))
            inside = (*parents, id(node))
            if isinstance(node, yaml.SequenceNode):
                for i, item in enumerate(node.value):
                    visit(item, f"{path}[{i}]", inside)
            else:
                findings.extend(_duplicates(node, path, file))
                for key, item in node.value:
                    visit(item, _join(path, str(key.value)), inside)

    visit(root, "", ())
    if findings:
        raise ConfigError(findings)


def _duplicates(node: yaml.MappingNode, path: str, file: str) -> list[str]:
    first: dict[str, int] = {}
    findings = []
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            where = _join(path, key.value)
            findings.append(f"{file}: {where}: written twice, in lines {first[key.value]} and {line}; keep one")
        first.setdefault(key.value, line)
    return findings


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _load_json(text: str, file: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(f"{file}: the key '{key}' is written twice in one block; keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{file}: {where}: not JSON: {error.msg}; correct this line: {line.strip()!r}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: nested too deeply to be a job; check its brackets") from error
