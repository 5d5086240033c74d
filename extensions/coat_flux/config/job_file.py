"""Reading a job file the way ai-toolkit does, but with errors that point at the place.

As the host: YAML or JSON by extension, `${ENV}` replaced in the text before it is parsed, `[name]` replaced in every
string, and `1e-4` a float (a string to plain PyYAML). Unlike the host: a key written twice is refused (YAML readers
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

from .findings import ConfigError, Findings, finding, suggest_key
from .yaml_text import INVISIBLE, MAX_DEPTH, join, parse, read_text

NAME_TAG = "[name]"
_ENV = re.compile(r"\$\{([^}]+)\}")
_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


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
    raw = parse(_replace_environment(read_text(Path(file)), file), file)
    findings = Findings(file)
    check_shape(raw, findings, name=name)
    check_plain(raw, findings)
    findings.raise_if_any()
    if name is not None:
        raw["config"]["name"] = name
    return replace_name(raw, raw["config"]["name"])


def load_written(path: str | os.PathLike[str], *, name: str) -> dict[str, Any]:
    """A job file that `load_job_yaml` has read, with every `${VARIABLE}` as it stands there: for what is stored.

    Args:
        path: of the file.
        name: of the job.
    """
    file = os.fspath(path)
    text = read_text(Path(file))
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


def check_plain(raw: Any, findings: Findings) -> None:
    """Check that there are only blocks, lists, texts, numbers, true, false and null, none of them hidden or bottomless.

    A key that is no text is left to the check of unknown keys.
    """
    _check_plain(raw, "", 0, findings)


def replace_name(value: Any, name: str) -> Any:
    """A copy of `value` with `[name]` replaced in every string, and every key a string."""
    if isinstance(value, str):
        return value.replace(NAME_TAG, name)
    if isinstance(value, Mapping):
        return {_key_text(key).replace(NAME_TAG, name): replace_name(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_name(item, name) for item in value]
    return value


def _check_plain(value: Any, path: str, depth: int, findings: Findings) -> None:
    if depth > MAX_DEPTH:
        findings.add(path, "nested too deeply to be a job; check its brackets")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            where = join(path, _key_text(key))
            _check_text(_key_text(key), where, "this key", findings)
            if odd := INVISIBLE.search(_key_text(key)):
                findings.add(
                    INVISIBLE.sub("?", where),
                    f"this key holds the invisible character U+{ord(odd[0]):04X}, shown as ?; type the key again",
                )
            _check_plain(item, where, depth + 1, findings)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_plain(item, f"{path}[{i}]", depth + 1, findings)
    elif isinstance(value, str):
        _check_text(value, path, "this text", findings)
    elif not isinstance(value, (int, float, type(None))):
        findings.add(path, f"YAML reads this as a {type(value).__name__}; write it in quotes", str(value))


def _check_text(text: str, path: str, what: str, findings: Findings) -> None:
    """Refuse what can be in no name, path or caption: control characters, and halves of a character from JSON."""
    if found := _NOT_TEXT.search(text):
        where = _NOT_TEXT.sub("?", path)
        findings.add(where, f"{what} holds the character U+{ord(found[0]):04X}; remove it")


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, (date, bytes, tuple)) else json.dumps(key)


def _replace_environment(text: str, file: str) -> str:
    unset = [match for match in _ENV.finditer(text) if match[1] not in os.environ]
    if unset:
        rule = "this environment variable is not set; set it, or write the value"
        lines = [text.count("\n", 0, match.start()) + 1 for match in unset]
        raise ConfigError(
            finding(file, f"line {line}: {match[0]}", rule) for line, match in zip(lines, unset, strict=True)
        )
    return _ENV.sub(lambda match: os.environ[match[1]], text)
