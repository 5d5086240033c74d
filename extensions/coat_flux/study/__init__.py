"""Is COAT lossless on your data (`coat-flux verify`)? Which settings are best (`coat-flux sweep`)?"""

from .compare import Verdict, verify
from .judgement import Judgement, judge
from .scoring import Scores, score_loras
from .study import BF16, Arm, ArmResult, Settings, Study, VerifyError, open_study

__all__ = [
    "BF16",
    "Arm",
    "ArmResult",
    "Judgement",
    "Scores",
    "Settings",
    "Study",
    "Verdict",
    "VerifyError",
    "judge",
    "open_study",
    "score_loras",
    "verify",
]
