"""What ai-toolkit finds: an extension class, an optimizer and a qtype.

For every job it imports every extension and asks for its process class. An
exception would end jobs that have nothing to do with us, so both only record
what is wrong; a job of our type then ends with it.
"""

from __future__ import annotations

import logging
from typing import Any

from ...base.names import COAT_OPTIMIZER, COAT_QTYPE, COAT_TYPE
from .host import AIToolkitError
from .optimizer import install_optimizer
from .quantizer import install_quantizer

logger = logging.getLogger(__name__)


def host_extensions() -> list[type]:
    """Install optimizer and qtype; returns AI_TOOLKIT_EXTENSIONS."""
    from toolkit.extension import Extension

    for name, install in ((COAT_OPTIMIZER, install_optimizer), (COAT_QTYPE, install_quantizer)):
        try:
            install()
        except AIToolkitError as error:
            # check_host repeats it at the start of a job of ours; jobs that do not use the name need not hear of it
            logger.debug("%s is not available: %s", name, error)

    class CoatFluxTrainerExtension(Extension):
        uid = COAT_TYPE
        name = "COAT-FLUX Trainer"

        @classmethod
        def get_process(cls) -> type:
            try:
                from .process import CoatFluxTrainer
            except Exception as error:
                why = f"its trainer could not be extended ({type(error).__name__}: {error})"
                return refusing_process(AIToolkitError(why))
            return CoatFluxTrainer

    return [CoatFluxTrainerExtension]


def refusing_process(reason: AIToolkitError) -> type:
    """In the place of our process: ends with the reason when it runs."""

    class RefusingProcess:
        def __init__(self, process_id: int, job: Any, config: Any, **kwargs: Any):
            self.process_id = process_id

        def run(self) -> None:
            raise reason

        def on_error(self, error: BaseException) -> None:
            pass

    return RefusingProcess
