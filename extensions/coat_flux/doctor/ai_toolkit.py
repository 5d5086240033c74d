"""ai-toolkit: found, its version, our extension in it, and the names we need, read from its source, not run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from ..trainers.ai_toolkit.contract import HOOKS, LORA_PARTS, PROCESS_MODULE, TESTED_SERIES, TESTED_VERSION
from ..trainers.ai_toolkit.install import CHECKOUT_PARTS, EXTENSION, PACKAGE
from ..trainers.ai_toolkit.optimizer import PARAMETERS
from ..trainers.ai_toolkit.quantizer import BACKEND_METHODS
from . import Line, absent, bad, good

SUBJECT = "ai-toolkit"
TRAINER_MODULE, OPTIMIZER_MODULE = "extensions_built_in.sd_trainer.SDTrainer", "toolkit.optimizer"
PROCESS_CLASSES = {  # the class ours derives from, and those it derives from
    "SDTrainer": TRAINER_MODULE,
    "BaseSDTrainProcess": PROCESS_MODULE,
    "BaseTrainProcess": "jobs.process.BaseTrainProcess",
    "BaseProcess": "jobs.process.BaseProcess",
}
QUANT_MODULE = "toolkit.util.ostris_quant"
LORA_MODULES = ("toolkit.lora_special", "toolkit.network_mixins")
CURE = f"use ai-toolkit {TESTED_VERSION}, or a COAT-FLUX made for this one"


def checkout(given: Path | None) -> Iterator[Line]:
    """Version, extension and the names we need of the checkout given, of AI_TOOLKIT_ROOT's, or the current folder."""
    root = given or (Path(os.environ["AI_TOOLKIT_ROOT"]) if os.environ.get("AI_TOOLKIT_ROOT") else None)
    if root is None and not lacking(Path.cwd()):
        root = Path.cwd()
    if root is None:
        yield absent(SUBJECT, "not here; `coat-flux train` does not need it (--ai-toolkit DIR checks one)")
        return
    if missing := lacking(root):
        yield bad(
            SUBJECT, f"{root} is not a checkout of it: no {', '.join(missing)}", "give the folder of run.py", stops=True
        )
        return
    yield _version(root)
    yield _extension(root)
    problems = list(missing_pieces(root))
    for problem in problems:
        yield bad("contract", problem, CURE, stops=True)
    if not problems:
        yield good("contract", "every name that COAT-FLUX needs of it is there")


def lacking(root: Path) -> list[str]:
    """Parts of a checkout that the folder does not have."""
    return [part for part in CHECKOUT_PARTS if not (root / part).exists()]


def _version(root: Path) -> Line:
    values = _assigned(_parsed(root, "version"), "VERSION")
    version = ast.literal_eval(values[0]) if values else "of unknown version"
    if str(version).startswith(TESTED_SERIES):
        return good(SUBJECT, f"{version} in {root}")
    return bad(
        SUBJECT, f"{version} in {root} is not tested with COAT-FLUX", f"{TESTED_VERSION} is; mind the contract below"
    )


def _extension(root: Path) -> Line:
    folder = root / EXTENSION
    command = f"coat-flux install {root}"
    if not folder.exists():
        return absent("extension", f"not in that checkout; `{command}` links it")
    if folder.resolve() == PACKAGE.resolve():
        return good("extension", f"{EXTENSION} leads to {PACKAGE}")
    if folder.resolve() != folder.parent.resolve() / folder.name:
        return bad(
            "extension", f"{EXTENSION} leads to another one, {folder.resolve()}", f"remove the link, then `{command}`"
        )
    text = f"{EXTENSION} is a copy, it does not change with {PACKAGE}"
    return bad("extension", text, f"move it away, then `{command}`")


def missing_pieces(root: Path) -> Iterator[str]:
    """What `contract.check_host` would miss in a run, found in the source."""
    needed = (TRAINER_MODULE, PROCESS_MODULE, OPTIMIZER_MODULE, QUANT_MODULE, *LORA_MODULES)
    files = [_file(root, module) for module in needed]
    gone = [path.relative_to(root).as_posix() for path in files if not path.is_file()]
    if gone:
        yield f"no {', '.join(gone)}"
        return
    there = {cls: module for cls, module in PROCESS_CLASSES.items() if _file(root, module).is_file()}
    methods = {name for cls, module in there.items() for name in _methods(_parsed(root, module), cls)}
    yield from (f"SDTrainer has no {name}" for name in HOOKS if name not in methods)
    arguments = tuple(_arguments(_parsed(root, OPTIMIZER_MODULE), "get_optimizer")[:4])
    if arguments != PARAMETERS:
        yield f"{OPTIMIZER_MODULE}.get_optimizer takes {arguments}, not {PARAMETERS}"
    nodes = (node for node in ast.walk(_parsed(root, PROCESS_MODULE)) if isinstance(node, ast.ImportFrom))
    imported = {alias.name for node in nodes if node.module == OPTIMIZER_MODULE for alias in node.names}
    if "get_optimizer" not in imported:
        yield f"{PROCESS_MODULE} does not use {OPTIMIZER_MODULE}.get_optimizer"
    quant = _parsed(root, QUANT_MODULE)
    absent_methods = [name for name in BACKEND_METHODS if name not in _methods(quant, "OstrisQuantizer")]
    if absent_methods:
        yield f"{QUANT_MODULE}.OstrisQuantizer has no {', '.join(absent_methods)}"
    for name in ("get_ostris_quantizer", "convert_linear_to_ostris"):
        if not _arguments(quant, name):
            yield f"{QUANT_MODULE} has no {name}"
    for module in LORA_MODULES:
        values = _assigned(_parsed(root, module), "LINEAR_MODULES")
        if not any(isinstance(part, ast.Constant) and part.value == "OstrisLinear" for part in values):
            yield f"{module}.LINEAR_MODULES does not list OstrisLinear"
    attributes = {node.attr for node in ast.walk(_parsed(root, LORA_MODULES[0])) if isinstance(node, ast.Attribute)}
    yield from (f"{LORA_MODULES[0]} has no {name}" for name in LORA_PARTS if name not in attributes)


def _file(root: Path, module: str) -> Path:
    return root / (module.replace(".", "/") + ".py")


def _parsed(root: Path, module: str) -> ast.Module:
    return ast.parse(_file(root, module).read_text(encoding="utf-8"))


def _methods(tree: ast.Module, cls: str) -> set[str]:
    """Names of the functions in a class."""
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    return {item.name for node in found for item in node.body if isinstance(item, ast.FunctionDef)}


def _arguments(tree: ast.Module, function: str) -> list[str]:
    """Names of a function's positional parameters; empty where there is no such function."""
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [argument.arg for node in found for argument in node.args.args]


def _assigned(tree: ast.Module, name: str) -> list[ast.AST]:
    """What is assigned to a name of the module, taken apart."""
    nodes = (node for node in tree.body if isinstance(node, ast.Assign))
    values = (node.value for node in nodes if [getattr(target, "id", "") for target in node.targets] == [name])
    return [part for value in values for part in ast.walk(value)]
