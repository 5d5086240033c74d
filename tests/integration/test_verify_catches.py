"""The check can fail: on the mini-FLUX `verify` calls a bad setting not lossless, and does not call COAT so."""

import importlib
from pathlib import Path

from coat_flux.mini_flux import make_mini_flux
from coat_flux.study import judge, open_study, verify
from coat_flux.study.compare import NOT_LOSSLESS

ROOT = Path(__file__).resolve().parents[2]
SEEDS, STEPS, LR = 5, 20, 5e-4
MOMENTS = {"m1_format": "e5m2", "m2_format": "e5m2", "moment_rounding": "nearest", "block_size": 4096}
E5M2 = {  # all but the weights; no GPU multiplies e5m2 by e5m2
    "optimizer": MOMENTS | {"use_dynamic_range_expansion": False},
    "activation": {"format": "e5m2", "linear_granularity": "per_tensor", "nonlinear_granularity": "per_tensor"},
}


def test_e5m2_everywhere_is_caught_and_coat_is_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    experiment = importlib.import_module("mini_flux.experiment")
    photos, _ = experiment.write_photos(tmp_path / "photos")
    model = make_mini_flux(tmp_path / "mini")
    coat = {"memory": {"checkpointing": "none"}}
    job = experiment.make_job(model, photos, tmp_path, steps=STEPS, coat=coat, lr=LR, batch=2)
    study = open_study(job, hold_out=6, every=STEPS, folder=tmp_path / "runs")
    verdict = verify(study, seeds=SEEDS, arm=E5M2)
    assert verdict.judgement.outcome == NOT_LOSSLESS, verdict.judgement.sentence
    assert verdict.in_own.gap > 0
    runs = [study.train_arm("all_on", {}, run.seed) for run in verdict.arm("bf16")]
    own = judge([run.final_own for run in verdict.arm("bf16")], [run.final_own for run in runs])
    assert own.outcome != NOT_LOSSLESS, own.sentence
    assert abs(own.gap) < verdict.in_own.gap / 2
