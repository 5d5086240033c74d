"""COAT for FLUX: one folder with two names.

`coat_flux` is the package that pip installs; ai-toolkit imports the same folder as `extensions.coat_flux`. Submodules
under both names would give two copies of every class, so the second name only loads `coat_flux` from its own real
folder and returns its extensions; it has no submodules.

Importing this module needs neither torch nor diffusers; public names are loaded on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"

__all__ = ["COATConfig", "COATTrainer", "apply_coat", "attach_lora", "build_optimizer"]

_HOMES = {
    "COATConfig": "coat_flux.config",
    "COATTrainer": "coat_flux.trainers.standalone.trainer",
    "apply_coat": "coat_flux.blocks.apply",
    "attach_lora": "coat_flux.blocks.lora",
    "build_optimizer": "coat_flux.trainers.optimizer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _load_package(name: str, folder: Path) -> ModuleType:
    """Import `folder` as the package `name` without sys.path: the repository's root shadows ai-toolkit's names."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}: no package in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _as_ai_toolkit_extension() -> list[type]:
    """AI_TOOLKIT_EXTENSIONS. Never raises: that would end every job of the user."""
    if "toolkit.extension" not in sys.modules:
        return []
    try:
        _load_package("coat_flux", Path(__file__).resolve().parent)
        return importlib.import_module("coat_flux.trainers.ai_toolkit.extension").host_extensions()
    except Exception:
        logging.getLogger("coat_flux").exception("COAT-FLUX could not start and is left out; other jobs are untouched")
        return []


if __name__.startswith("extensions."):
    AI_TOOLKIT_EXTENSIONS = _as_ai_toolkit_extension()
    __path__: list[str] = []
