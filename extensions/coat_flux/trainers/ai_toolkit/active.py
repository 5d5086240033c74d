"""The COATConfig of the job that runs now.

ai-toolkit passes neither the optimizer nor the qtype a view of the process entry, so our process leaves its config
here for the length of its `run()`. Outside one (a plain `sd_trainer` job) the defaults hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...config.coat import COATConfig

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
