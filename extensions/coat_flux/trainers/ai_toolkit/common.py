"""Small things every file of this folder needs: ai-toolkit's version, output and bound names, and the job's config."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ... import _load_package

if TYPE_CHECKING:
    from ...config.coat import COATConfig

__all__ = [
    "AIToolkitError",
    "active_config",
    "ai_toolkit_version",
    "detail",
    "info",
    "is_ours",
    "job_scope",
    "load_core",
    "rebind",
    "run_lines",
    "set_active",
    "show_logs",
]

# Where coat_core is, relative to this folder: in a checkout of COAT-FLUX, or in site-packages
CORE_FOLDERS = tuple(Path(__file__).resolve().parents[up] / "coat_core" for up in (4, 3))


class AIToolkitError(RuntimeError):
    """COAT-FLUX and the ai-toolkit it runs in do not fit; the message names the version and the missing piece."""

    def __init__(self, piece: str):
        self.piece = piece
        super().__init__(f"COAT-FLUX cannot run in ai-toolkit {ai_toolkit_version()}: {piece}")


def ai_toolkit_version() -> str:
    """Return ai-toolkit's version, or "of unknown version"."""
    version = sys.modules.get("version")
    if version is None:
        try:
            import version
        except ImportError:
            return "of unknown version"
    return str(getattr(version, "VERSION", "of unknown version"))


def load_core() -> None:
    """Make `import coat_core` work: from next to this folder, else from ai-toolkit's environment.

    A linked folder resolves to its checkout, so code and math come from the same version without pip.

    Raises:
        AIToolkitError: the folder was only copied and coat_core is not installed.
    """
    found = next((folder for folder in CORE_FOLDERS if (folder / "__init__.py").is_file()), None)
    try:
        if found is None:
            import coat_core  # noqa: F401
        else:
            _load_package("coat_core", found)
    except ImportError as error:
        raise AIToolkitError(
            f"coat_core cannot be imported ({error}); "
            f"run `{sys.executable} -m pip install --no-deps <COAT-FLUX folder>` "
            f"or replace the copy in {Path(__file__).resolve().parents[2]} by a link with `coat-flux install`"
        ) from error


def info(message: str) -> None:
    """Print on the main process, as ai-toolkit does, above its progress bars, and write to the run's `coat/log.txt`.

    Outside ai-toolkit it goes to the log.
    """
    _print(message)
    if _lines is not None:
        _lines.record(message)


def detail(message: str) -> None:
    """Write to the run's `coat/log.txt`; printed, too, with ai-toolkit's `logging.verbose`, or without a run's log."""
    if _lines is None:
        _print(message)
    else:
        _lines.detail(message)


def _print(message: str) -> None:
    try:
        from toolkit.print import print_acc
    except ImportError:
        logging.getLogger("coat_flux").info(message)
        return
    with tqdm.external_write_mode():
        print_acc(message)


_lines: Any = None  # run_log.Lines of the run under way


@contextmanager
def run_lines(*, verbose: bool) -> Iterator[Any]:
    """Keep the lines printed inside the context for `coat/log.txt`: `open(run)` of what it yields writes there.

    Args:
        verbose: print details, too.
    """
    global _lines
    from ...base.run_log import Lines

    lines = _lines = Lines(_print, verbose=verbose)
    try:
        yield lines
    finally:
        _lines = None
        lines.close()


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= logging.INFO:
            detail(f"[coat] {record.getMessage()}")
        else:
            info(f"[coat] {record.levelname}: {record.getMessage()}")


def show_logs() -> None:
    """Send both packages' log lines to ai-toolkit's output; may be called more than once.

    ai-toolkit configures no logging, and its captioner extensions, imported for every job, call
    `logging.disable(WARNING)` for the whole process. Our fall-back warnings must not be lost to that, so our loggers,
    also those of modules that are imported later, decide by their own level alone.
    """
    for root in ("coat_core", "coat_flux"):
        logger = logging.getLogger(root)
        if any(isinstance(handler, _LineHandler) for handler in logger.handlers):
            continue
        logger.addHandler(_LineHandler())
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
        logger.propagate = False
        folder = Path(str(sys.modules[root].__file__)).parent
        for file in folder.rglob("*.py"):
            name = ".".join([root, *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
            item = logging.getLogger(name)
            item.isEnabledFor = functools.partial(_is_enabled, item)  # type: ignore[method-assign]


def _is_enabled(logger: logging.Logger, level: int) -> bool:
    return level >= logger.getEffectiveLevel()


def rebind(name: str, original: Callable, replacement: Callable) -> list[str]:
    """Replace `original` by `replacement` in every loaded module that holds it under `name`.

    ai-toolkit imports functions by name, so a replacement in the defining module alone is not seen. `vars` and not
    getattr: lazy modules would start loading, and some module attributes are classes of the same name.

    Returns:
        Names of the modules that were changed.
    """
    changed = []
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = replacement
            changed.append(module_name)
    return changed


# The COATConfig of the job that runs now: ai-toolkit passes neither the optimizer nor the qtype a view of the process
# entry. Empty outside a job of ours (a plain `sd_trainer` job), where the defaults hold.
_current: list[COATConfig] = []


def set_active(config: COATConfig) -> None:
    """Make `config` the running job's; only inside `job_scope`."""
    _current[:] = [config]


def active_config() -> COATConfig:
    """Return the running job's config, or the defaults outside a `coat_flux_trainer` job."""
    from ...config.coat import COATConfig

    return _current[0] if _current else COATConfig.from_dict(None)


def is_ours() -> bool:
    """Whether a `coat_flux_trainer` job with COAT on is running."""
    return bool(_current)


@contextmanager
def job_scope() -> Iterator[None]:
    """Forget the config when the job ends, however it ends: the next job of the same command must not inherit it."""
    _current.clear()
    try:
        yield
    finally:
        _current.clear()
