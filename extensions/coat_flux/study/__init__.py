"""Is COAT lossless on your data (`coat-flux verify`)? Which settings are best (`coat-flux sweep`)?"""

from .compare import Judgement, Verdict, judge, verify
from .study import BF16, Arm, ArmResult, Study, VerifyError, open_study, score_loras

__all__ = [
    "BF16",
    "Arm",
    "ArmResult",
    "Judgement",
    "Study",
    "Verdict",
    "VerifyError",
    "judge",
    "open_study",
    "score_loras",
    "verify",
]
