"""The parts of `verify` that need no model: jobs of arms, held-out photos and points, room, the page, the verdict."""

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from coat_flux.blocks.held import USABLE_FRACTION
from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.data.files import find_images
from coat_flux.data.hold_out import FixedNoise
from coat_flux.plan.job import JobFacts
from coat_flux.plan.predict import predict
from coat_flux.study.compare import LOSSLESS, NOT_LOSSLESS, UNDECIDED, judge
from coat_flux.study.study import BF16, Study, VerifyError, bf16_arm, hold_out_names, open_study, require_room
from tests.helpers.engine_job import engine_job

OPTIONS = {"memory": {"checkpointing": "all"}, "data": {"background": "black"}}


def job_of(tmp_path: Path, coat: dict[str, Any] | None = None, **blocks: Any) -> JobConfig:
    raw = engine_job("mine", model=tmp_path / "model", images=tmp_path / "photos", out=tmp_path, coat=coat, **blocks)
    process = raw["config"]["process"][0]
    process["log_dir"] = str(tmp_path / "boards")
    if coat is not None:
        process["model"] |= {"quantize": True, "qtype": "coat_fp8"}
    return JobConfig.from_dict(raw)


def prepared(job: JobConfig, arm: dict[str, Any]) -> JobConfig:
    study = Study(job, Path("out"), 11, 2, ["a.png", "<b>.png"], torch.device("cpu"))
    return JobConfig.from_dict(study.prepare("run", arm, 9))


def test_bf16_differs_in_coat_quantize_and_optimizer_alone(tmp_path):
    params = {"betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.5, "m1_format": "e5m2"}
    job = job_of(tmp_path, OPTIONS, train={"optimizer_params": params, "gradient_checkpointing": True})
    ours, theirs = prepared(job, {}), prepared(job, dict(BF16))
    assert (ours.name, ours.training_folder, ours.training_seed, ours.log_dir) == ("run_seed9", "out", 9, None)
    assert (ours.train.steps, ours.train.optimizer, ours.model.quantize) == (11, "coat_fp8_adamw", True)
    assert (ours.train.skip_first_sample, ours.sample.sample_every, ours.save.max_step_saves_to_keep) == (True, 11, 1)
    assert (ours.validation.hold_out, ours.validation.every) == (("a.png", "<b>.png"), 2)
    assert (ours.coat.memory, ours.coat.optimizer.m1_format) == (job.coat.memory, "e5m2")
    assert (theirs.coat.enabled, theirs.train.optimizer, theirs.model.quantize) == (False, "adamw", False)
    assert theirs.coat.data == job.coat.data
    assert set(ours.train.optimizer_params) == {"betas", "eps", "weight_decay"}
    left, right = ({**run.raw["config"]["process"][0], "coat": None, "model": None} for run in (ours, theirs))
    left["train"], right["train"] = ({**part["train"], "optimizer": None} for part in (left, right))
    assert left == right
    assert job.raw["config"]["name"] == "mine"


def test_full_fine_tuning_is_compared_with_the_same_rounding_of_weights(tmp_path):
    raw = job_of(tmp_path, OPTIONS, train={"gradient_checkpointing": True}).raw
    raw["config"]["process"][0]["model"] |= {"quantize": False}
    del raw["config"]["process"][0]["network"]
    job = JobConfig.from_dict(raw)
    theirs, ours = prepared(job, dict(bf16_arm(job))), prepared(job, {})
    assert (theirs.train.optimizer, theirs.coat.optimizer.stochastic_rounding) == ("coat_fp8_adamw", True)
    assert not any(part.use_fp8 for part in (theirs.coat.weight, theirs.coat.activation, theirs.coat.optimizer))
    assert not theirs.coat.memory.enable_efficient_checkpoint
    assert theirs.train == ours.train
    assert bf16_arm(job_of(tmp_path, {})) == BF16


def test_an_arm_is_laid_over_the_block_and_over_optimizer_params(tmp_path):
    job = job_of(tmp_path, OPTIONS, train={"optimizer_params": {"m1_format": "e5m2"}, "gradient_checkpointing": True})
    arm = {"optimizer": {"m1_format": "e4m3"}, "memory": {"checkpointing": "none"}, "weight": {"use_fp8": False}}
    run = prepared(job, arm)
    assert run.coat.optimizer_config(run.train.optimizer_params)[0].m1_format == "e4m3"
    assert run.coat.memory.checkpointing == "none"
    assert not run.model.quantize
    assert run.coat.data.background == "black"
    with pytest.raises(ConfigError, match=r"coat\.optimizer\.block_size=24"):
        prepared(job, {"optimizer": {"block_size": 24}})
    job = job_of(tmp_path, {"activation": {"min_sqnr_db": 15.0}, "memory": {"checkpointing": "auto"}})
    run = prepared(job, {"activation": {"use_fp8": False}})  # what only shapes FP8 leaves with it
    assert (run.coat.activation.use_fp8, run.coat.activation.min_sqnr_db) == (False, None)


def test_a_bf16_run_is_refused_where_it_cannot_fit_and_as_what_is_compared(tmp_path):
    raw = job_of(tmp_path, None, train={"gradient_checkpointing": True}, dataset={"resolution": 512}).raw
    raw["config"]["process"][0]["model"]["name_or_path"] = "black-forest-labs/FLUX.1-dev"
    job = JobConfig.from_dict(raw, file="job.yaml")
    needed = predict(JobFacts(job), 24e9).peak / USABLE_FRACTION / 1e9
    assert 24 < needed < 40
    with pytest.raises(VerifyError, match=rf"GPU of about {needed:.0f} GB; this one has 24 GB\n.*a larger card"):
        require_room(job, 24)
    require_room(job, 50)
    with pytest.raises(ConfigError, match=r"coat\.enabled=false"):
        open_study(job)


def write_photos(root: Path, names: range) -> Path:
    root.mkdir(parents=True)
    for i in names:
        (root / f"{i:02d}.jpg").write_bytes(b"photo %d" % i)
        (root / f"{i:02d}.txt").write_text(f"caption {i}", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("photos", "asked", "configured", "held_out"),
    [
        *((photos, None, None, tenth) for photos, tenth in {2: 1, 16: 2, 155: 16, 200: 16}.items()),
        (6, 3, None, 3),
        (6, None, 2, 2),
        (6, 3, 2, 3),
    ],
)
def test_how_many_photos_are_held_out(tmp_path, photos, asked, configured, held_out):
    write_photos(tmp_path / "photos", range(photos))
    blocks = {} if configured is None else {"validation": {"hold_out": configured}}
    names = hold_out_names(job_of(tmp_path, {}, **blocks), asked)
    assert len(set(names)) == held_out
    assert all((tmp_path / "photos" / name).is_file() for name in names)


def test_photos_of_another_folder_are_held_out_and_all_others_trained_on(tmp_path):
    photos, other = write_photos(tmp_path / "photos", range(6)), write_photos(tmp_path / "v", range(4, 7))
    job = job_of(tmp_path, {}, dataset={"caption_ext": "txt", "num_repeats": 3})
    study = open_study(job, validation=other, folder=tmp_path / "out")
    linked = Path(study.job.datasets[0].folder_path)
    held_out = [linked / name for name in study.held_out]
    assert [path.read_bytes() for path in held_out] == [b"photo 4", b"photo 5", b"photo 6"]
    assert held_out[2].with_suffix(".txt").read_text(encoding="utf-8") == "caption 6"
    trained = [path for path in find_images(linked) if path not in held_out]
    assert [path.read_bytes() for path in trained] == [b"photo %d" % i for i in range(6)]
    assert trained[1].with_suffix(".txt").read_text(encoding="utf-8") == "caption 1"
    assert study.job.datasets[0].num_repeats == 3
    (photos / "01.jpg").unlink()
    (photos / "01.jpg").write_bytes(b"another photo")
    (photos / "05.jpg").unlink()
    open_study(job, validation=other, folder=tmp_path / "out")
    assert trained[1].read_bytes() == b"another photo"
    assert find_images(photos) == [photos / path.name for path in trained[:5]]
    assert find_images(linked) == [*trained[:5], *held_out]
    with pytest.raises(VerifyError, match=r"--validation .*has no images"):
        open_study(job, validation=tmp_path / "none")


LOSSES = [1.00, 1.02, 1.04]  # of bf16; standard deviation 0.02


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (9, 2.2622), (40, 2.0423)])
def test_the_interval_is_students_up_to_30_degrees_of_freedom(freedom, quantile):
    count = freedom + 1
    bf16 = [float(i) for i in range(count)]
    gaps = [0.25 if i % 2 else 0.75 for i in range(count)]
    judgement = judge(bf16, [loss + gap for loss, gap in zip(bf16, gaps, strict=True)])
    half = quantile * stdev(gaps) / math.sqrt(count)
    mean = fmean(gaps)
    assert (judgement.low, judgement.gap, judgement.high) == pytest.approx((mean - half, mean, mean + half))
    assert (judgement.spread, judgement.seeds) == (pytest.approx(stdev(bf16)), count)


@pytest.mark.parametrize(
    ("gaps", "base", "outcome", "more_seeds", "words"),
    [
        ((0.001, 0.002, 0.003), 2.0, LOSSLESS, None, "interval -0.00048 to +0.0045"),
        ((-0.099, -0.1, -0.101), 2.0, NOT_LOSSLESS, None, "0.1 below bf16's"),
        ((0.099, 0.1, 0.101), 2.0, NOT_LOSSLESS, None, "0.1 above bf16's"),
        ((0.03, 0.021, 0.022), 2.0, UNDECIDED, 8, "run with --seeds 8"),
        # half width t · 0.01 / sqrt(n): 0.0248 at 3 seeds, 0.0159 at 4
        ((-0.01, 0.0, 0.01), 2.0, UNDECIDED, 4, "run with --seeds 4"),
        ((0.01, 0.02, 0.03), 2.0, UNDECIDED, None, "more than 31 seeds"),
        ((0.0, 0.0, 0.0), 1.04, UNDECIDED, None, "1 of 3 bf16 runs (first: number 3, loss 1.040000)"),
        ((0.0, math.nan, 0.0), 2.0, NOT_LOSSLESS, None, "not finite"),
    ],
)
def test_outcomes(gaps, base, outcome, more_seeds, words):
    judgement = judge(LOSSES, [loss + gap for loss, gap in zip(LOSSES, gaps, strict=True)], base)
    assert (judgement.outcome, judgement.more_seeds) == (outcome, more_seeds)
    assert words in judgement.sentence


def test_losses_that_cannot_be_compared():
    assert judge([1.0, 1.0], [1.0, 1.0]).outcome == UNDECIDED  # no spread to measure by
    for bf16, coat in (([1.0], [1.0]), ([math.inf, 1.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match="must be"):
            judge(bf16, coat)


def test_draws_cover_the_noise_levels_evenly_and_batches_have_one_size():
    noise = FixedNoise([{"latents": torch.zeros(16, 8, width)} for width in (8, 12, 8)], 4)
    batches = [[0, 1, 2], [3, 8, 9], [10, 11], [4, 5, 6], [7]]
    assert list(noise.batches(3)) == batches
    levels: list[float] = []

    def losses(photos: list, sigmas: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        levels.extend(sigmas.tolist())
        return drawn.flatten(1).mean(1)

    noise.mean_loss(losses, 3)
    sigmas = dict(zip([draw for batch in batches for draw in batch], levels, strict=True))
    assert sorted(sigmas.values()) == pytest.approx([(i + 0.5) / 12 for i in range(12)])
    assert [int(sigmas[draw] * 4) for draw in range(12)] == [0, 1, 2, 3] * 3
    assert [FixedNoise(noise.photos[:count]).levels for count in (1, 3)] == [16, 6]
