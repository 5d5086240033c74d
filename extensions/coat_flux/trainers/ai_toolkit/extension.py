"""The extension class that ai-toolkit finds.

It imports every extension for every job, so errors wait until a job of our type ends with them.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from ...base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .host import AIToolkitError, load_core
from .optimizer import install_optimizer
from .quantizer import install_quantizer

logger = logging.getLogger(__name__)


def make_process(process_id: int, job: Any, config: Any, **kwargs: Any) -> Any:
    """The process of our job type, whose modules other jobs do not import."""
    try:
        load_core()
        from .process import CoatFluxTrainer
    except Exception as error:
        reason = error
        if not isinstance(error, AIToolkitError):
            reason = AIToolkitError(f"its trainer could not be extended ({type(error).__name__}: {error})")

        def run() -> None:  # ai-toolkit would hide an error before the job runs
            raise reason

        return SimpleNamespace(process_id=process_id, run=run, on_error=lambda error: None)
    return CoatFluxTrainer(process_id, job, config, **kwargs)


def host_extensions() -> list[type]:
    """Install optimizer and qtype; returns AI_TOOLKIT_EXTENSIONS."""
    from toolkit.extension import Extension

    for name, install in ((COAT_OPTIMIZER, install_optimizer), (COAT_QTYPE, install_quantizer)):
        try:
            install()
        except AIToolkitError as error:
            # check_host repeats it when our jobs start; other jobs need not know
            logger.debug("%s is not available: %s", name, error)

    class CoatFluxTrainerExtension(Extension):
        uid = COAT_TYPE
        name = "COAT-FLUX Trainer"

        @classmethod
        def get_process(cls) -> Any:
            return make_process  # ai-toolkit calls it like a class

    return [CoatFluxTrainerExtension]
