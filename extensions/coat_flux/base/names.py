"""The names users type for what this package adds to ai-toolkit."""

from __future__ import annotations

COAT_OPTIMIZER = "coat_fp8_adamw"  # train.optimizer
COAT_QTYPE = "coat_fp8"  # model.qtype
COAT_TYPE = "coat_flux_trainer"  # type of a process
