"""Our interface to ai-toolkit. Imported for every job of a user, it needs neither coat_core nor diffusers."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tqdm import tqdm

from ... import _load_package
from ...base.run_log import PACKAGES, Lines

if TYPE_CHECKING:
    from ...config.coat import COATConfig

TESTED_SERIES = "0.12."
TESTED_VERSION = "0.12.26"
PROCESS_MODULE = "jobs.process.BaseSDTrainProcess"
OPTIMIZER_MODULE = "toolkit.optimizer"
QUANTIZER_MODULE = "toolkit.util.ostris_quant"
LORA_MODULES = ("toolkit.lora_special", "toolkit.network_mixins")

# in a checkout, or in site-packages
CORE_FOLDERS = tuple(Path(__file__).resolve().parents[up] / "coat_core" for up in (4, 3))
MARK = "_coat_flux_original"  # attribute of a wrapper: ai-toolkit's original function


class AIToolkitError(RuntimeError):
    """COAT-FLUX does not fit this ai-toolkit."""

    def __init__(self, piece: str):
        self.piece = piece
        super().__init__(f"COAT-FLUX cannot run in ai-toolkit {ai_toolkit_version()}: {piece}")


def ai_toolkit_version() -> str:
    """ai-toolkit's version."""
    try:
        return str(importlib.import_module("version").VERSION)
    except (ImportError, AttributeError):
        return "of unknown version"


def load_core() -> None:
    """Make `import coat_core` work: from beside this folder (through links), else as installed."""
    folder = next((folder for folder in CORE_FOLDERS if (folder / "__init__.py").is_file()), None)
    try:
        if folder is None:
            importlib.import_module("coat_core")
        else:
            _load_package("coat_core", folder)
    except ImportError as error:
        raise AIToolkitError(
            f"coat_core cannot be imported ({error}); run `{sys.executable} -m pip install --no-deps <its folder>`, or "
            f"replace {Path(__file__).resolve().parents[2]} by a link with `coat-flux install`"
        ) from error


def let_lora_find(class_name: str) -> None:
    """Add a class of ours to those ai-toolkit's LoRA finds by name."""
    for module in LORA_MODULES:
        names = importlib.import_module(module).LINEAR_MODULES
        if class_name not in names:
            names.append(class_name)


def wrap_everywhere(name: str, original: Callable, wrapper: Callable) -> None:
    """Replace `original` in every loaded module, once."""
    if hasattr(original, MARK):
        original, wrapper = getattr(original, MARK), original
    else:
        functools.update_wrapper(wrapper, original)
        setattr(wrapper, MARK, original)
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)  # getattr(module, name) would load lazy ones
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = wrapper


patched = mock.patch.multiple  # attributes of an object or class, inside a `with` block


# -- the running job: ai-toolkit passes the process entry to neither optimizer nor qtype


def _write(line: str) -> None:
    from toolkit.print import print_acc

    with tqdm.external_write_mode():
        print_acc(line if line.startswith("[") else f"[coat] {line}")


config: COATConfig | None = None  # of the running job, if it is of our type
lines = Lines(_write, verbose=True)
info = lines.info  # prints as ai-toolkit does, and writes to `coat/log.txt`
detail = lines.detail  # prints if verbose, as other jobs are


@contextmanager
def job_scope() -> Iterator[None]:
    """Forget config and log of the job when it ends."""
    global config
    try:
        yield
    finally:
        config = None
        lines.restart(verbose=True)


def config_or_default() -> COATConfig:
    """The running job's config, or the defaults."""
    from ...config.coat import COATConfig

    return COATConfig.from_dict(None) if config is None else config


def show_logs() -> None:
    """Send our log records to our lines, despite `logging.disable(WARNING)` of ai-toolkit's captioners."""
    lines.listen()
    manager = logging.Manager(logging.getLogger())
    for root in PACKAGES:
        logging.getLogger(root).propagate = False
        folder = Path(str(sys.modules[root].__file__)).parent
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join([root, *parts]).removesuffix(".__init__")
            logging.getLogger(name).manager = manager
