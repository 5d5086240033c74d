"""Which keys an ai-toolkit reads, and of which kind their values are, from its own source.

Its config classes take what they know with `kwargs.get("key", default)` and drop everything else, so their source says
exactly which keys have a meaning. It is parsed, never imported: importing needs all of ai-toolkit's packages.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.errors import UserError
from .ai_toolkit_keys import BLOCKS, NETWORK_KWARGS, PROCESS, ROWS, Schema

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


class NoToolkitError(UserError, ValueError):
    """A folder that is not an ai-toolkit checkout; the message says what is missing."""


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
    return Schema(version, str(root), classes, "get_dropout_caption" in _text(root / DATA_FILE))


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
