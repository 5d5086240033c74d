"""Which keys ai-toolkit reads, and of which kind their values are: from its own source, or from the shipped list.

Its config classes take what they know with `kwargs.get("key", default)` and drop everything else, so their source says
exactly which keys have a meaning. It is parsed, never imported: importing needs all of ai-toolkit's packages.

A kind is written `int`, `number|list`, `str?`: the YAML types that are right, `?` where null is. `any` is not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.errors import UserError
from .ai_toolkit_keys import HOST_VERSION
from .ai_toolkit_schema import KINDS, SHIPPED

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
PROCESS, NETWORK_KWARGS = "process", "network_kwargs"
_NAMES = {
    "bool": "bool",
    "int": "int",
    "float": "number",
    "str": "str",
    "dict": "dict",
    "Dict": "dict",
} | dict.fromkeys(("list", "List", "tuple", "Tuple"), "list")
_TYPES = {bool: "bool", int: "number", float: "number", str: "str", list: "list", tuple: "list", dict: "dict"}
Kinds = Mapping[str, str]


class NoHostError(UserError, ValueError):
    """A folder that is no ai-toolkit checkout; the message says what is missing."""


@dataclass(frozen=True)
class HostSchema:
    """The keys of one version of ai-toolkit.

    Args:
        version: of ai-toolkit.
        source: where the keys come from, in words.
        classes: config class, `process` or `network_kwargs` → key → kind.
        drops_cached_captions: caption_dropout_rate works beside cached text embeddings.
    """

    version: str
    source: str
    classes: Mapping[str, Kinds]
    drops_cached_captions: bool = True

    @property
    def known_version(self) -> bool:
        """Whether the values we know for its keys are this version's."""
        return self.version == HOST_VERSION


def shipped_schema() -> HostSchema:
    """The list that comes with this package."""
    classes = {name: dict(word.split(":") for word in words.split()) for name, words in SHIPPED.items()}
    return HostSchema(HOST_VERSION, f"the list of {HOST_VERSION}", classes)


@lru_cache(maxsize=8)
def read_schema(root: Path) -> HostSchema:
    """The keys of an ai-toolkit checkout.

    Args:
        root: the folder with ai-toolkit's run.py.

    Raises:
        NoHostError: the files are not there, or are not as we know them.
    """
    classes = {name: _class_kinds(node) for name, node in _config_classes(_tree(root / CLASSES_FILE))}
    absent = [name for name in SHIPPED if name not in (PROCESS, NETWORK_KWARGS) and not classes.get(name)]
    if absent:
        raise NoHostError(f"{root / CLASSES_FILE}: has no class {absent[0]} that reads keys")
    _resolve_followers(classes)
    processes = [_tree(root / file) for file in PROCESS_FILES]
    classes[PROCESS] = {"type": "any", "device": "any"} | {key: "any" for tree in processes for key in _read(tree)}
    classes[NETWORK_KWARGS] = _network_kwargs(_tree(root / NETWORK_FILE), processes[LORA_PROCESS])
    for name, kinds in KINDS.items():
        classes[name].update({key: kind for key, kind in kinds.items() if key in classes[name]})
    cached = "get_dropout_caption" in _text(root / DATA_FILE)
    return HostSchema(_version(root), str(root), classes, cached)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoHostError(f"{path}: cannot be read ({error})") from error


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(_text(path))
    except SyntaxError as error:
        raise NoHostError(f"{path}: line {error.lineno}: {error.msg}") from error


def _version(root: Path) -> str:
    for node in _tree(root / "version.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return "of an unknown version"


def _config_classes(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node


def _class_kinds(cls: ast.ClassDef) -> dict[str, str]:
    """Key → kind of every `kwargs.get`; `=key` where the default follows another key."""
    annotations = {
        id(node.value): node.annotation for node in ast.walk(cls) if isinstance(node, ast.AnnAssign) and node.value
    }
    kinds: dict[str, str] = {}
    for call in ast.walk(cls):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "kwargs.get" and _first_text(call):
            kinds.setdefault(_first_text(call), _kind(annotations.get(id(call)), call.args[1:]))
    return kinds


def _first_text(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _kind(annotation: ast.expr | None, default: list[ast.expr]) -> str:
    """The kind a key's annotation and default together ask for; a default's own type wins over a wrong annotation."""
    asked = _annotated(annotation)
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


def _annotated(annotation: ast.expr | None) -> list[str]:
    """The kinds an annotation names; of `List[int]` only the list."""
    kinds: list[str] = []
    for node in ast.walk(annotation) if annotation else ():
        kind = _NAMES.get(node.id) if isinstance(node, ast.Name) else None
        if kind and kind not in kinds and "list" not in kinds:
            kinds.append(kind)
    return kinds


def _resolve_followers(classes: dict[str, dict[str, str]]) -> None:
    for kinds in classes.values():
        for key, kind in list(kinds.items()):
            if kind.startswith("="):
                followed = kinds.get(kind[1:], "any")
                kinds[key] = "any" if followed.startswith("=") else followed


def _read(tree: ast.Module) -> Iterator[str]:
    """Keys of the process entry: `self.get_conf("key", …)` and `self.config.get("key", …)`."""
    for call in ast.walk(tree):
        reads = isinstance(call, ast.Call) and ast.unparse(call.func) in ("self.get_conf", "self.config.get")
        if reads and (key := _first_text(call).split(".")[0]):
            yield key


def _network_kwargs(network: ast.Module, process: ast.Module) -> dict[str, str]:
    """What `network.network_kwargs` can give: arguments of the LoRA network that the process does not give itself."""
    given = {"self", "unet", "text_encoder"}
    for call in ast.walk(process):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "NetworkClass":
            given |= {keyword.arg for keyword in call.keywords if keyword.arg}
    for name, cls in _config_classes(network):
        for node in cls.body if name == "LoRASpecialNetwork" else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return {arg.arg: "any" for arg in node.args.args if arg.arg not in given}
    raise NoHostError(f"{NETWORK_FILE}: has no class LoRASpecialNetwork")
