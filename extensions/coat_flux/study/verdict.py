"""What a comparison came to, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .judgement import LOSSLESS, Judgement
from .results import ArmResult
from .scoring import Scores
from .similarity import Gram, mean_pair_cosine, mean_seed_cosine
from .study import Study

__all__ = ["ARM_BF16", "ARM_COAT", "Verdict"]

ARM_BF16, ARM_COAT = "bf16", "coat"


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to.

    Attributes:
        judgement: the worse of both below: outcome, gap, interval, spread.
        study: the comparison.
        runs: bf16 and COAT of each seed, in order.
        scores: of the final LoRAs in the bf16 model; None where a COAT run died.
        weights: inner products of weight changes by layer, "" for all; empty where a COAT run died.
        notes: what a reader should know besides.
        in_bf16: judged by the LoRAs in the bf16 model; None where a COAT run died.
        in_own: judged by each run's loss in its own precision; likewise.
    """

    judgement: Judgement
    study: Study
    runs: tuple[ArmResult, ...]
    scores: Scores | None = None
    weights: Mapping[str, Gram] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    in_bf16: Judgement | None = None
    in_own: Judgement | None = None

    @property
    def lossless(self) -> bool:
        """The outcome is `lossless`."""
        return self.judgement.outcome == LOSSLESS

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return self.judgement.sentence

    @property
    def json_path(self) -> Path:
        """`verdict.json`."""
        return self.study.folder / "verdict.json"

    @property
    def page_path(self) -> Path:
        """`report.html`."""
        return self.study.folder / "report.html"

    def arm(self, name: str) -> list[ArmResult]:
        """The runs of one arm, by seed."""
        return [run for run in self.runs if run.arm == name]

    def cosines(self, gram: Gram) -> tuple[float | None, float | None]:
        """Mean cosines of (bf16, COAT) pairs, and of bf16 seeds with each other."""
        bf16, coat = ([run.name for run in self.arm(name)] for name in (ARM_BF16, ARM_COAT))
        return mean_pair_cosine(gram, bf16, coat), mean_seed_cosine(gram, bf16)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; losses are mean squared errors, numbers that are not finite are null."""
        grams = {} if self.scores is None else {"output": self.scores.outputs, "output_change": self.scores.changes}
        grams |= {"weights": self.weights[""]} if self.weights else {}
        layers = {name: gram for name, gram in self.weights.items() if name}
        return _plain(
            {
                "outcome": self.judgement.outcome,
                "sentence": self.sentence,
                "seeds": self.judgement.seeds,
                "in_bf16_model": None if self.in_bf16 is None else asdict(self.in_bf16),
                "in_own_precision": None if self.in_own is None else asdict(self.in_own),
                "config": self.study.job.file,
                "settings": asdict(self.study.settings),
                "held_out": list(self.study.held_out.names),
                "base_loss": None if self.scores is None else self.scores.base,
                "runs": [self._run_json(run) for run in self.runs],
                "cosines": {name: self._cosine_json(gram) for name, gram in grams.items()},
                "layer_cosines": {name: self._cosine_json(gram) for name, gram in layers.items()},
                "notes": list(self.notes),
            }
        )

    def _run_json(self, run: ArmResult) -> dict[str, Any]:
        final = None if self.scores is None else self.scores.losses[run.name]
        return asdict(run) | {"final_bf16_model": final}

    def _cosine_json(self, gram: Gram) -> dict[str, float | None]:
        pairs, seeds = self.cosines(gram)
        return {"bf16_and_coat": pairs, "bf16_seeds": seeds}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
