"""Reading a job file as ai-toolkit does, with errors that point at line and column.

As in ai-toolkit: YAML or JSON by extension, `${ENV}` replaced in the text before parsing, `[name]` replaced in every
string, and `1e-4` a float (a string to plain PyYAML). In addition duplicate keys are refused (parsers silently keep
the last one), and the shape of a job is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from .findings import ConfigError, Finding, Findings, suggest_key

YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json", ".jsonc")
NAME_TAG = "[name]"
# keys around the entries of `config.process`
FRAME = ("job", "config", "meta")
CONFIG = ("name", "process", "device")
_PACKAGE = Path(__file__).resolve().parents[1]
_ENV = re.compile(r"\$\{([^}]+)\}")
_EXPONENT_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


def shipped_folder(name: str) -> Path | None:
    """`configs` or `datasets_example` as shipped with coat-flux: in the installed package or the checkout."""
    return next((path for path in (_PACKAGE / name, _PACKAGE.parents[1] / name) if path.is_dir()), None)


def load_job_yaml(path: str | os.PathLike[str], *, name: str | None = None) -> dict[str, Any]:
    """Read a job (`job`, `config` with `name` and `process`, optional `meta`) from a UTF-8 YAML or JSON file.

    `name` overrides `config.name`, as `run.py --name` does. Raises ConfigError, where it can with line and column.
    """
    file = os.fspath(path)
    text = _read_text(Path(file))
    errors = []
    for match in _ENV.finditer(text):
        if match[1] not in os.environ:
            place = f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            rule = "this environment variable is not set; set it, or write the value"
            errors.append(Finding("error", file, place, None, rule))
    if errors:
        raise ConfigError(errors)
    raw = parse(_ENV.sub(lambda match: os.environ[match[1]], text), file)
    findings = Findings(file)
    job = plain_job(raw, findings, name=name)
    if findings.errors:
        raise ConfigError(findings.errors)
    return job


def load_written(path: str | os.PathLike[str], *, name: str) -> dict[str, Any]:
    """A job file that `load_job_yaml` accepted, with every `${VARIABLE}` unexpanded, for storage."""
    file = os.fspath(path)
    text = _read_text(Path(file))
    marks: dict[str, str] = {}  # variable → a word in its place while YAML is read
    text = _ENV.sub(lambda match: marks.setdefault(match[0], f"COATVARIABLE{len(marks)}X"), text)
    raw = parse(text, file)
    raw["config"]["name"] = name

    def put_back(value: str) -> str:
        for variable, mark in marks.items():
            value = value.replace(mark, variable)
        return value.replace(NAME_TAG, name)

    return _map_strings(raw, put_back)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a job with all its strings changed, and string keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(_key_text(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def plain_job(raw: Any, findings: Findings, *, name: str | None = None) -> Any:
    """The job with `[name]` replaced; None, with findings, if `raw` is not a job.

    `name` overrides `config.name`.
    """
    if not isinstance(raw, Mapping):
        findings.add("the file", "must be a block with job and config; start from one in configs/", raw)
        return None
    if "job" not in raw:
        findings.add("job", "is missing; write job: extension")
    elif raw["job"] != "extension":
        findings.add("job", "must be extension; write job: extension", raw["job"])
    if raw.get("meta") is not None and not isinstance(raw["meta"], Mapping):
        findings.add("meta", "must be a block of keys; remove it", raw["meta"])
    config = raw.get("config")
    if not isinstance(config, Mapping):
        findings.add("config", "must be a block with name and process; start from one in configs/", config)
        return None
    if name is None and not isinstance(config.get("name"), str):
        findings.add("config.name", "must be a string; write one, in quotes", config.get("name"))
    if "device" in config:
        findings.warn("config.device", "no effect, in ai-toolkit too; write it in config.process[0]")
    for block, prefix, known in ((raw, "", FRAME), (config, "config.", CONFIG)):
        for key in block:
            if key not in known:
                findings.add(f"{prefix}{_key_text(key)}", f"unknown key; {suggest_key(key, known)}")
    processes = config.get("process")
    if not isinstance(processes, list) or not processes:
        findings.add("config.process", "must be a list; put '- ' before its first key", processes)
        return None
    for i, process in enumerate(processes):
        if not isinstance(process, Mapping):
            findings.add(f"config.process[{i}]", "must be a block of keys; write type: coat_flux_trainer", process)
    if findings.errors:
        return None
    if name is not None:
        raw["config"]["name"] = name
    own = raw["config"]["name"]
    try:
        return _map_strings(raw, lambda text: text.replace(NAME_TAG, own))
    except RecursionError:
        findings.add("", "an alias contains itself; write out its value")
        return None


def _key_text(key: Any) -> str:
    try:
        return key if isinstance(key, str) else json.dumps(key)
    except TypeError:
        return str(key)


def parse(text: str, file: str) -> Any:
    """Parse a job file's text as JSON or YAML by the file's name; raises ConfigError with line and column."""
    where = ""
    try:
        if file.lower().endswith(JSON_SUFFIXES):
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark, line = error.problem_mark or error.context_mark, ""
        if mark:
            where = f"line {mark.line + 1}, column {mark.column + 1}"
            line = "".join(text.splitlines()[mark.line : mark.line + 1])
        remedy = "check indentation, quotes and brackets of this line and the one before"
        if "\t" in line[: len(line) - len(line.lstrip())]:
            remedy = "indent with spaces, not tabs"
        elif '"' in line and "\\" in line:
            remedy = "a backslash in double quotes starts an escape: use single quotes, or / in paths"
        rule = f"not YAML: {error.problem or error.context}; {remedy}"
    except json.JSONDecodeError as error:
        where, rule = f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}; correct this place"
    except RecursionError:
        rule = "nested too deeply to be a job; check its brackets"
    except (yaml.YAMLError, ValueError) as error:  # a character, a date such as 2024-13-45, a key written twice
        problem = " ".join(str(error).replace(";", ",").split())
        rule = f"cannot be read: {problem}; correct that value, or write it in quotes"
    raise ConfigError([Finding("error", file, where, None, rule)])


class _Loader(yaml.SafeLoader):
    """SafeLoader with ai-toolkit's float rule; refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in first:
                    problem = f"the key {key.value} is written twice, first in line {first[key.value].line + 1}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                first[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+0123456789"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{max(keys, key=keys.count)}' is written twice in one block")
    return block


def _read_text(path: Path) -> str:
    known = YAML_SUFFIXES + JSON_SUFFIXES
    try:
        if path.suffix.lower() in known:
            return path.read_text(encoding="utf-8-sig")
        wrong = f"a job file ends in {', '.join(known)}; rename it or give the path of the YAML"
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 text (byte {error.start}); save the file as UTF-8"
    except FileNotFoundError:
        wrong = f"no such file in {Path.cwd()}; give a path that exists"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}; give the path of the YAML, and check its permissions"
    raise ConfigError([Finding("error", str(path), "", None, wrong)])
