"""ai-toolkit's keys: the table of them, what its own source says, and the check of a job's keys.

`ai_toolkit_keys.tsv` has one line for each key that ai-toolkit reads for image jobs.
`scripts/update_ai_toolkit_keys.py` writes it from a checkout; the columns after `default` are written by hand and
carried over:

block, key      ai-toolkit's config class, `process` or `network_kwargs`; the key
kind            the YAML types that are right, as its source has them: `int`, `number|list`, `str?` (`?`: null is, too),
                `any` (not checked), `-` (ai-toolkit does not read the key, and says nothing)
default         ai-toolkit's, as JSON; where it is computed, by hand or empty
corrected       the kind where the source says nothing or something that its code contradicts; `{X}`: a block X, `[X]`:
                a list of blocks X
values          the choices of a string, or the range of a number as `minimum=1 maximum=2`
stand-alone     supported · unsupported (any other value than the default is refused) · no effect (accepted, with a note
                saying why) · empty (an unknown key)
reason          why it has no effect

ai-toolkit's config classes take what they know with `kwargs.get("key", default)` and drop everything else, so the
source of an installed one says exactly which keys have a meaning. It is parsed, never imported: importing needs all of
its packages.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from .archs import archs_of
from .build import OtherKeys, as_mapping
from .findings import Findings, suggest_key
from .options import Option

TABLE = Path(__file__).with_suffix(".tsv")
COLUMNS = ("block", "key", "kind", "default", "corrected", "values", "stand-alone", "reason")
PROCESS, NETWORK_KWARGS = "process", "network_kwargs"
ANY_CASE = ("optimizer", "type")  # ai-toolkit lowers these before it compares
OWN_KEYS = ("coat", "validation")  # of the process entry; read by this package
OWN_KINDS = {("TrainConfig", "fused_backward"): "bool"}  # of keys in ai-toolkit's blocks; read by this package
_OPTION_KINDS = {"bool": "bool", "int": "int", "number": "float", "str": "str", "dict": "mapping"}
_WORDS = {
    "int": "a whole number",
    "number": "a number",
    "str": "a string",
    "list": "a list",
    "bool": "true or false",
    "dict": "a block of keys",
}
CLASSES_FILE = "toolkit/config_modules.py"
NETWORK_FILE = "toolkit/lora_special.py"
DATA_FILE = "toolkit/dataloader_mixins.py"
PROCESS_FILES = (
    "jobs/process/BaseProcess.py",
    "jobs/process/BaseTrainProcess.py",
    "jobs/process/BaseSDTrainProcess.py",
    "extensions_built_in/sd_trainer/SDTrainer.py",
    "extensions_built_in/sd_trainer/DiffusionTrainer.py",
)
LORA_PROCESS = 2
_NAMES = {"bool": "bool", "int": "int", "float": "number", "str": "str", "dict": "dict", "Dict": "dict"}
_NAMES |= dict.fromkeys(("list", "List", "tuple", "Tuple"), "list")
_TYPES = {bool: "bool", int: "number", float: "number", str: "str", list: "list", tuple: "list", dict: "dict"}
Row = Mapping[str, str]


class NoToolkitError(UserError, ValueError):
    """A folder that is not an ai-toolkit checkout; the message says what is missing."""


@dataclass(frozen=True)
class Schema:
    """The keys of one version of ai-toolkit.

    Args:
        version: of ai-toolkit.
        source: where the keys come from, in words.
        classes: config class, `process` or `network_kwargs` → key → kind.
        drops_cached_captions: caption_dropout_rate works with cached text embeddings, too.
        archs: of its model classes; empty where they are not known.
    """

    version: str
    source: str
    classes: Mapping[str, Mapping[str, str]]
    drops_cached_captions: bool = True
    archs: frozenset[str] = frozenset()


def read_table(path: Path = TABLE) -> tuple[str, list[dict[str, str]]]:
    """The version of ai-toolkit that the table was made from, and its rows."""
    with path.open(encoding="utf-8", newline="") as file:
        version = file.readline().split()[2]
        return version, list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


VERSION, ROWS = read_table()
BLOCKS = tuple(dict.fromkeys(row["block"] for row in ROWS))


def shipped_schema() -> Schema:
    """The keys in the table."""
    classes: dict[str, dict[str, str]] = {block: {} for block in BLOCKS}
    for row in ROWS:
        if row["kind"] != "-":
            classes[row["block"]][row["key"]] = row["corrected"] or row["kind"]
    return Schema(VERSION, f"the list of {VERSION}", classes)


def other_keys(block: str) -> OtherKeys:
    """What the stand-alone trainer knows of a block beyond its own keys."""
    rows = [row for row in ROWS if row["block"] == block]
    return OtherKeys(
        {row["key"]: row["reason"] for row in rows if row["stand-alone"] == "no effect"},
        {row["key"]: json.loads(row["default"] or "null") for row in rows if row["stand-alone"] == "unsupported"},
    )


def values_of(row: Row) -> tuple[tuple[str, ...], dict[str, float]]:
    """The choices and the range in a row."""
    words = row["values"].split()
    limits = {word.partition("=")[0]: float(word.partition("=")[2]) for word in words if "=" in word}
    return (() if limits else tuple(words)), limits


_VALUES = {(row["block"], row["key"]): values_of(row) for row in ROWS if row["values"]}


def check_keys(raw: Any, path: str, schema: Schema, findings: Findings, block: str = PROCESS) -> None:
    """Check one block and those in it: unknown keys, wrong types, values that no code knows.

    Args:
        raw: the block as read; null counts as empty.
        path: its dotted key.
        schema: what ai-toolkit reads.
        findings: receives what is wrong; every key that was written goes into `findings.given`.
        block: which block of `schema` it is.
    """
    kinds = schema.classes[block]
    for key, value in as_mapping(raw, path, findings).items():
        where, kind = f"{path}.{key}", kinds.get(key) or OWN_KINDS.get((block, key))
        findings.given.add(where)
        if kind is None:
            if block != PROCESS or key not in OWN_KEYS:
                known = {*kinds, *(OWN_KEYS if block == PROCESS else ())}
                inner = {name: one.strip("{}") for name, one in kinds.items() if one[0] in "{["}
                nested = [f"{name}.{one}" for name, at in inner.items() for one in schema.classes[at.strip("[]")]]
                findings.add(where, f"unknown key; {suggest_key(key, known, nested)}")
        elif kind.startswith("{"):
            check_keys(value, where, schema, findings, kind.strip("{}"))
        elif not kind.startswith("["):
            _check_value(value, where, (block, key), kind, schema, findings)
        elif isinstance(value, (list, tuple)):
            for i, entry in enumerate(value):
                check_keys(entry, f"{where}[{i}]", schema, findings, kind.strip("[]"))
        elif value is not None:
            findings.add(where, "must be a list; put '- ' before the first key of each entry", value)


def _check_value(value: Any, path: str, place: tuple[str, str], kind: str, schema: Schema, findings: Findings) -> None:
    choices, limits = _VALUES.get(place, ((), {}))
    refusal = _wrong_kind(value, kind, limits)
    if refusal is not None:
        findings.add(path, refusal, value)
        return
    word = value.lower() if isinstance(value, str) and place[1] in ANY_CASE else value
    if place[1] == "qtype" and isinstance(value, str):
        word = value.partition("|")[0]  # uint3|a/recovery/adapter
    if not choices or word is None:
        return
    refusal = Option(place[1], None, "choice", "", choices=choices).refusal(word)
    if refusal is not None and schema.version == VERSION:
        findings.add(path, refusal, value)
    elif refusal is not None:
        findings.warn(path, f"not a value of the ai-toolkit we know, yours is {schema.version}: {refusal}", value)


def _wrong_kind(value: Any, kind: str, limits: Mapping[str, float]) -> str | None:
    """Why `value` is not of `kind`, as `<rule>; <remedy>`; None where it is."""
    kinds, nullable = kind.removesuffix("?").split("|"), kind.endswith("?")
    if value is None and nullable:
        return None
    if kinds == ["any"]:
        rule = "must be a single value, not a block; write one value after the colon"
        return rule if isinstance(value, Mapping) else None
    if value is None and "list" in kinds:
        return "has no value; write [] or remove the line"
    if len(kinds) == 1 and kinds[0] in _OPTION_KINDS:
        return Option("", None, _OPTION_KINDS[kinds[0]], "", nullable=nullable, **limits).refusal(value)
    for one in kinds:
        if isinstance(value, (list, tuple)) if one == "list" else _wrong_kind(value, one, {}) is None:
            return None
    return f"must be {' or '.join(_WORDS[one] for one in kinds)}; write one"


# -- what the source of an installed ai-toolkit says ------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key as the source reads it: its kind, and its default as JSON, empty where it is computed."""

    kind: str
    default: str = ""


@lru_cache(maxsize=8)
def read_schema(root: Path) -> Schema:
    """The keys of an ai-toolkit checkout, with the corrections of the table.

    Args:
        root: the folder with ai-toolkit's run.py.

    Raises:
        NoToolkitError: the files are not there, or are not as we know them.
    """
    version, blocks = read_source(root)
    classes = {block: {key: item.kind for key, item in keys.items()} for block, keys in blocks.items()}
    for row in ROWS:
        if row["corrected"] and row["key"] in classes[row["block"]]:
            classes[row["block"]][row["key"]] = row["corrected"]
    drops = "get_dropout_caption" in _text(root / DATA_FILE)
    return Schema(version, str(root), classes, drops, frozenset(archs_of(root)))


def read_source(root: Path) -> tuple[str, dict[str, dict[str, Key]]]:
    """The version of a checkout, and block → key → how its source reads it.

    Raises:
        NoToolkitError: the files are not there, or are not as we know them.
    """
    classes = {node.name: node for node in _tree(root / CLASSES_FILE).body if isinstance(node, ast.ClassDef)}
    blocks: dict[str, dict[str, Key]] = {block: {} for block in BLOCKS}
    for block in BLOCKS:
        if block not in (PROCESS, NETWORK_KWARGS):
            blocks[block] = _class_keys(classes[block]) if block in classes else {}
            if not blocks[block]:
                raise NoToolkitError(f"{root / CLASSES_FILE}: has no class {block} that reads keys")
    processes = [_tree(root / file) for file in PROCESS_FILES]
    blocks[PROCESS] = {"type": Key("any"), "device": Key("any")}
    for call in _calls(*processes):
        if ast.unparse(call.func) in ("self.get_conf", "self.config.get") and _first_text(call):
            blocks[PROCESS].setdefault(_first_text(call).split(".")[0], Key("any", _default(call.args[1:])))
    blocks[NETWORK_KWARGS] = _network_kwargs(_tree(root / NETWORK_FILE), processes[LORA_PROCESS])
    for node in _tree(root / "version.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value), blocks
    return "of an unknown version", blocks


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoToolkitError(f"{path}: cannot be read ({error})") from error


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(_text(path))
    except SyntaxError as error:
        raise NoToolkitError(f"{path}: line {error.lineno}: {error.msg}") from error


def _calls(*trees: ast.AST) -> Iterator[ast.Call]:
    return (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))


def _first_text(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _default(default: list[ast.expr]) -> str:
    try:
        return json.dumps(ast.literal_eval(default[0]) if default else None)
    except ValueError:
        return ""


def _class_keys(cls: ast.ClassDef) -> dict[str, Key]:
    """The key of every `kwargs.get`."""
    annotations = {
        id(node.value): node.annotation for node in ast.walk(cls) if isinstance(node, ast.AnnAssign) and node.value
    }
    keys: dict[str, Key] = {}
    for call in _calls(cls):
        if ast.unparse(call.func) == "kwargs.get" and _first_text(call):
            kind = _kind(annotations.get(id(call)), call.args[1:])
            keys.setdefault(_first_text(call), Key(kind, _default(call.args[1:])))
    for name, key in list(keys.items()):
        if key.kind.startswith("="):  # the default is another key's
            followed = keys[key.kind[1:]].kind if key.kind[1:] in keys else "any"
            keys[name] = Key("any" if followed.startswith("=") else followed, key.default)
    return keys


def _kind(annotation: ast.expr | None, default: list[ast.expr]) -> str:
    """The kind a key's annotation and default together ask for; a default's own type wins over a wrong annotation.

    `=key` where the default is another key's.
    """
    asked: list[str] = []
    for node in ast.walk(annotation) if annotation else ():
        kind = _NAMES.get(node.id) if isinstance(node, ast.Name) else None
        if kind and kind not in asked and "list" not in asked:  # of List[int] only the list
            asked.append(kind)
    if default and isinstance(default[0], ast.Attribute):
        return f"{'|'.join(asked)}?" if asked else f"={default[0].attr}"
    try:
        value = ast.literal_eval(default[0]) if default else None
    except ValueError:
        return "|".join(asked) or "any"
    if value is None:
        return f"{'|'.join(asked)}?" if asked else "any"
    own = _TYPES[type(value)]
    if "int" in asked and isinstance(value, int) and own != "bool":
        own = "int"
    return "|".join([*asked, own] if own not in asked else asked)


def _network_kwargs(network: ast.Module, process: ast.Module) -> dict[str, Key]:
    """What `network.network_kwargs` can give: arguments of the LoRA network that the process does not give itself."""
    given = {"self", "unet", "text_encoder"}
    for call in _calls(process):
        if ast.unparse(call.func) == "NetworkClass":
            given |= {keyword.arg for keyword in call.keywords if keyword.arg}
    for cls in network.body:
        for node in cls.body if isinstance(cls, ast.ClassDef) and cls.name == "LoRASpecialNetwork" else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args.args
                defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
                return {
                    argument.arg: Key("any", _default([default]) if default else "")
                    for argument, default in zip(arguments, defaults, strict=True)
                    if argument.arg not in given
                }
    raise NoToolkitError(f"{NETWORK_FILE}: has no class LoRASpecialNetwork")
