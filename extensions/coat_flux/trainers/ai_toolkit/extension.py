"""What ai-toolkit finds: one extension class, and the two names it can use without it.

ai-toolkit imports every extension, and asks each for its process class, for every job. An exception in either ends jobs
that have nothing to do with us, so both only record what is wrong; a job of our type then ends with it.
"""

from __future__ import annotations

import logging
from typing import Any

from ...base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .common import AIToolkitError
from .optimizer import install_optimizer
from .quantizer import install_quantizer

__all__ = ["host_extensions"]
_log = logging.getLogger(__name__)


def host_extensions() -> list[type]:
    """Install optimizer and qtype, and return the extension classes for AI_TOOLKIT_EXTENSIONS."""
    from toolkit.extension import Extension

    for name, install in ((COAT_OPTIMIZER, install_optimizer), (COAT_QTYPE, install_quantizer)):
        try:
            install()
        except AIToolkitError as error:
            # check_host repeats it at the start of a job of ours; jobs that do not use the name need not hear of it
            _log.debug("%s is not available: %s", name, error)

    class CoatFluxTrainerExtension(Extension):
        uid = COAT_TYPE
        name = "COAT-FLUX Trainer"

        @classmethod
        def get_process(cls) -> type:
            return _process_class()

    return [CoatFluxTrainerExtension]


def _process_class() -> type:
    try:
        from .process import CoatFluxTrainer
    except Exception as error:
        return _refusing_process(AIToolkitError(f"its trainer could not be extended ({type(error).__name__}: {error})"))
    return CoatFluxTrainer


def _refusing_process(reason: AIToolkitError) -> type:
    class RefusingProcess:
        """Stands in for the process: a job of our type is built, and ends with the reason when it runs."""

        def __init__(self, process_id: int, job: Any, config: Any, **kwargs: Any):
            self.process_id = process_id

        def run(self) -> None:
            raise reason

        def on_error(self, error: BaseException) -> None:
            """Nothing to clean up."""

    return RefusingProcess
