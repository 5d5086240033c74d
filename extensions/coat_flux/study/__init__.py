"""Is COAT lossless on your data (`coat-flux verify`)? Which settings are best (`coat-flux sweep`)?

runs.py        arms, the jobs of their runs, and the result of a finished one
held_out.py    which photos are held out, and the loss on them, with noise that is the same for every run
study.py       a comparison in its folder: open it, train an arm, resume
compare.py     `verify`: all of it
scoring.py     the final LoRAs in the bf16 model, and how alike they are
judgement.py   the statistics, pure
report.py      the verdict, as JSON and as a page
sweep.py       the trials of a sweep, chosen by Optuna, and their processes
ranking.py     which trial is best, by how much more than luck, and the page that shows it
"""

from .compare import verify
from .judgement import Judgement, judge
from .report import Verdict
from .runs import BF16, Arm, ArmResult, VerifyError
from .scoring import Scores, score_loras
from .study import Settings, Study, open_study

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
