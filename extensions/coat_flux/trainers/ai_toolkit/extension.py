"""The extension class that ai-toolkit finds.

It imports every extension for every job, so errors wait until a job of our type ends with them.
"""

from __future__ import annotations

import logging
from typing import Any

from ...base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .host import AIToolkitError, load_core
from .optimizer import install_optimizer
from .quantizer import install_quantizer

logger = logging.getLogger(__name__)


class RefusingProcess:
    """In place of our process: the job ends with the reason when it runs."""

    def __init__(self, process_id: int, reason: AIToolkitError):
        self.process_id, self._reason = process_id, reason

    def run(self) -> None:
        """End the job."""
        raise self._reason

    def on_error(self, error: BaseException) -> None:
        """Nothing to clean up."""


def make_process(process_id: int, job: Any, config: Any, **kwargs: Any) -> Any:
    """The process of our job type, whose modules other jobs do not import."""
    try:
        load_core()
        from .process import CoatFluxTrainer
    except AIToolkitError as error:
        return RefusingProcess(process_id, error)
    except Exception as error:
        why = f"its trainer could not be extended ({type(error).__name__}: {error})"
        return RefusingProcess(process_id, AIToolkitError(why))
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
