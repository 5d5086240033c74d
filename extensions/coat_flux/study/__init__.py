"""Is COAT lossless on your data? Paired runs with and without it, judged against what the seed alone does.

runs.py        arms, the jobs of their runs, and what a finished run came to
held_out.py    which photos are held out, and the loss on them, with noise that is the same for every run
study.py       a comparison in its folder: open it, train an arm, continue
scoring.py     the final LoRAs in the bf16 model, and how alike they are
judgement.py   the statistics, pure
report.py      the verdict, as JSON and as a page
compare.py     `verify`: all of it

And which settings are best: `coat-flux sweep`.

grid.py        the trials, checked before any starts
sweep.py       their processes: start, interrupt, resume, read
ranking.py     which is best, and by how much more than luck, pure
sweep_page.py  the ranking as rows and as a page
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
