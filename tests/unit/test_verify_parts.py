"""The parts of `verify` that need no model: photos, jobs of arms, held-out points, cosines, room, the verdict."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from coat_flux.config.findings import ConfigError
from coat_flux.config.job import JobConfig
from coat_flux.data.files import find_images
from coat_flux.data.hold_out import FixedNoise
from coat_flux.study.compare import Verdict, write_page
from coat_flux.study.judgement import LOSSLESS, NOT_LOSSLESS, UNDECIDED, Judgement, broken, judge, student_quantile
from coat_flux.study.scoring import mean_cosine, weight_grams
from coat_flux.study.study import (
    BF16,
    ArmResult,
    Settings,
    Study,
    VerifyError,
    as_many_as_fit,
    bf16_arm,
    choose_held_out,
    open_study,
    prepare_job,
    require_room,
    split_photos,
    validation_entry,
)
from tests import tolerances
from tests.helpers.engine_job import engine_job

OPTIONS = {"memory": {"checkpointing": "all"}, "data": {"background": "black"}}


def job_of(tmp_path: Path, coat: dict[str, Any] | None = None, **blocks: Any) -> JobConfig:
    raw = engine_job("mine", model=tmp_path / "model", images=tmp_path / "photos", out=tmp_path, coat=coat, **blocks)
    process = raw["config"]["process"][0]
    process["log_dir"] = str(tmp_path / "boards")
    if coat is not None:
        process["model"] |= {"quantize": True, "qtype": "coat_fp8"}
    return JobConfig.from_dict(raw)


def prepared(job: JobConfig, arm: dict[str, Any], **keywords: Any) -> JobConfig:
    return JobConfig.from_dict(prepare_job(job, arm, "run", "out", 9, **keywords))


def test_bf16_differs_in_coat_quantize_and_optimizer_alone(tmp_path: Path) -> None:
    params = {"betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.5, "m1_format": "e5m2"}
    job = job_of(tmp_path, OPTIONS, train={"optimizer_params": params, "gradient_checkpointing": True})
    ours, theirs = prepared(job, {}, steps=11), prepared(job, dict(BF16), steps=11)
    assert (ours.name, ours.training_folder, ours.training_seed, ours.log_dir) == ("run", "out", 9, None)
    assert (ours.train.steps, ours.train.optimizer, ours.model.quantize) == (11, "coat_fp8_adamw", True)
    assert (ours.train.skip_first_sample, ours.sample.sample_every, ours.save.max_step_saves_to_keep) == (True, 11, 1)
    assert ours.coat.memory == job.coat.memory
    assert ours.coat.optimizer.m1_format == "e5m2"
    assert (theirs.coat.enabled, theirs.train.optimizer, theirs.model.quantize) == (False, "adamw", False)
    assert theirs.coat.data == ours.coat.data == job.coat.data
    assert ours.train.optimizer_params == theirs.train.optimizer_params
    assert set(ours.train.optimizer_params) == {"betas", "eps", "weight_decay"}
    left, right = ({**run.raw["config"]["process"][0], "coat": None, "model": None} for run in (ours, theirs))
    left["train"], right["train"] = ({**part["train"], "optimizer": None} for part in (left, right))
    assert left == right
    assert job.raw["config"]["name"] == "mine"


def test_full_fine_tuning_is_compared_with_the_same_rounding_of_weights(tmp_path: Path) -> None:
    raw = job_of(tmp_path, OPTIONS, train={"gradient_checkpointing": True}).raw
    raw["config"]["process"][0]["model"] |= {"quantize": False}
    del raw["config"]["process"][0]["network"]
    job = JobConfig.from_dict(raw)
    theirs, ours = prepared(job, dict(bf16_arm(job))), prepared(job, {})
    assert (theirs.train.optimizer, theirs.coat.optimizer.stochastic_rounding) == ("coat_fp8_adamw", True)
    parts = theirs.coat.weight, theirs.coat.activation, theirs.coat.optimizer
    assert not any(part.use_fp8 for part in parts)
    assert not theirs.coat.memory.enable_efficient_checkpoint
    assert theirs.train == ours.train
    assert bf16_arm(job_of(tmp_path, {})) == BF16


def test_an_arm_is_laid_over_the_block_and_over_optimizer_params(tmp_path: Path) -> None:
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


def test_a_config_without_coat_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"coat\.enabled=false"):
        open_study(job_of(tmp_path, None))


def held_out_of(*sizes: tuple[int, int]) -> FixedNoise:
    photos = [
        {"latents": torch.zeros(16, *size), "prompt_embeds": torch.zeros(4, 8), "pooled": torch.zeros(8)}
        for size in sizes
    ]
    return FixedNoise(photos, [f"<b>{i}</b>.jpg" for i in range(len(sizes))])


def test_points_cover_the_noise_levels_evenly_and_every_one_is_new() -> None:
    points = held_out_of((8, 8), (8, 12), (8, 8)).points(4)
    sigmas = sorted(point.sigma for point in points)
    assert sigmas == pytest.approx([(i + 0.5) / 12 for i in range(12)])
    assert len({point.index for point in points}) == 12
    for photo in range(3):
        own = [point.sigma for point in points if point.photo == photo]
        assert [int(sigma * 4) for sigma in own] == [0, 1, 2, 3]


def test_batches_have_one_size_and_no_more_tokens_than_fit() -> None:
    held_out = held_out_of((128, 128), (64, 64), (128, 128))
    batches = list(held_out.batches(8, as_many_as_fit))
    assert sorted(point.index for batch in batches for point in batch) == list(range(24))
    assert [len(batch) for batch in batches] == [1] * 16 + [4, 4]


def test_weight_cosines_are_those_of_the_whole_matrices(tmp_path: Path) -> None:
    generator, deltas = torch.Generator().manual_seed(0), {}
    for run in ("a", "b", "zero"):
        tensors = {}
        for layer, (n, k) in {"x": (24, 40), "y": (16, 16)}.items():
            tensors[f"{layer}.lora_A.weight"] = torch.randn(4, k, generator=generator)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(n, 4, generator=generator) * (run != "zero")
            product = tensors[f"{layer}.lora_B.weight"].double() @ tensors[f"{layer}.lora_A.weight"].double()
            deltas.setdefault(run, {})[layer] = product.flatten()
        save_file(tensors, tmp_path / f"{run}.safetensors")
    grams = weight_grams({run: tmp_path / f"{run}.safetensors" for run in deltas})
    whole = {run: torch.cat(list(parts.values())) for run, parts in deltas.items()}
    cosine = torch.nn.functional.cosine_similarity
    for name, vectors in (("", whole), ("x", {run: parts["x"] for run, parts in deltas.items()})):
        for a, b in (("a", "b"), ("a", "a")):
            wanted = cosine(vectors[a], vectors[b], dim=0).item()
            assert grams[name].cosine(a, b) == pytest.approx(wanted, abs=tolerances.LORA_COSINE_ATOL)
    assert mean_cosine(grams["y"], [("a", "a"), ("a", "zero")]) == pytest.approx(1.0)
    assert grams["y"].cosine("a", "zero") is None
    assert mean_cosine(grams["y"], [("a", "zero")]) is None


def flux_dev(tmp_path: Path, **train: Any) -> JobConfig:
    job = job_of(tmp_path, None, train={"gradient_checkpointing": True} | train, dataset={"resolution": 512})
    raw = job.raw
    raw["config"]["process"][0]["model"]["name_or_path"] = "black-forest-labs/FLUX.1-dev"
    return JobConfig.from_dict(raw, file="job.yaml")


@pytest.mark.parametrize(
    ("gigabytes", "train", "remedy"),
    [(24, {}, "on a larger card"), (80, {"gradient_checkpointing": False, "batch_size": 8}, "with both it fits")],
)
def test_a_bf16_run_that_cannot_fit_is_refused(tmp_path: Path, gigabytes: int, train: dict, remedy: str) -> None:
    job = flux_dev(tmp_path, **train)
    with pytest.raises(VerifyError) as caught:
        require_room(job, torch.device("cuda"), memory_bytes=gigabytes * 1e9)
    first, second = str(caught.value).splitlines()
    assert re.search(rf"needs a GPU of about \d+ GB .*23\.8 GB.* {gigabytes} GB", first)
    assert remedy in second
    require_room(job, torch.device("cpu"), memory_bytes=1.0)


def test_a_bf16_run_that_fits_is_not(tmp_path: Path) -> None:
    require_room(flux_dev(tmp_path), torch.device("cuda"), memory_bytes=400e9)


def test_the_page_fetches_nothing_and_escapes_what_is_the_users(tmp_path: Path) -> None:
    job = job_of(tmp_path, {}, sample={"prompts": ["<script>alert(1)</script>"]})
    study = Study(job, tmp_path, Settings(steps=4, every=2), [], held_out_of((8, 8)), torch.device("cpu"))
    runs = [
        ArmResult(arm, 7, tmp_path / arm / "x.safetensors", ((0, 1.0), (4, 0.5)), 0.5, 2.0, 2.0, 10**9, ())
        for arm in ("bf16", "coat")
    ]
    (tmp_path / "coat" / "coat").mkdir(parents=True)
    rows = ["step,layer,kind,sqnr_db,underflow,saturation,elements", "2,blocks.<0>.to_q,input,21.5,0,0,8"]
    (tmp_path / "coat" / "coat" / "precision.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    verdict = Verdict(broken("the COAT run of seed 8 died: <i>at once</i>", 2), study, tuple(runs))
    text = write_page(verdict).read_text(encoding="utf-8")
    assert "Not lossless here: the COAT run of seed 8 died: &lt;i&gt;at once&lt;/i&gt;." in text
    assert "&lt;b&gt;0&lt;/b&gt;.jpg" in text
    assert re.search(r">blocks.&lt;0&gt;.to_q</td><td[^>]*>input</td><td[^>]*>21.5 dB</td>", text)
    assert "<script" not in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", text)
    assert verdict.as_json()["in_bf16_model"] is None


# -- which photos are held out -----------------------------------------------------------------------------------------


def folder_of(root: Path, count: int) -> Path:
    root.mkdir(parents=True)
    for i in range(count):
        (root / f"{i:02d}.jpg").write_bytes(b"photo %d" % i)
        (root / f"{i:02d}.txt").write_text(f"caption {i}", encoding="utf-8")
    return root


def test_held_out_photos_are_a_tenth_evenly_spread() -> None:
    photos = [Path(f"{i:02d}.jpg") for i in range(12)]
    assert [path.name for path in choose_held_out(photos, 3)] == ["02.jpg", "06.jpg", "10.jpg"]
    assert [path.name for path in choose_held_out(photos, None)] == ["06.jpg"]
    assert len(set(choose_held_out(photos, 11))) == 11
    sizes = {2: 1, 10: 1, 14: 1, 16: 2, 40: 4, 155: 16, 1000: 16}
    assert {count: len(choose_held_out([Path(str(i)) for i in range(count)], None)) for count in sizes} == sizes
    for count in (0, 12, 13):
        with pytest.raises(VerifyError, match=rf"--hold-out {count}: must be from 1 to 11"):
            choose_held_out(photos, count)


def test_the_split_has_every_photo_once_with_its_caption(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "photos", 6)
    (source / "sub").mkdir()
    (source / "sub" / "06.jpg").write_bytes(b"photo 6")
    entry = {"folder_path": str(source), "num_repeats": 3, "flip_x": True, "resolution": 64}
    split = split_photos([entry], tmp_path / "out", 2)
    (train,), (held_out,) = split
    assert [path.name for path in find_images(Path(held_out["folder_path"]))] == ["01.jpg", "05.jpg"]
    trained = find_images(Path(train["folder_path"]))
    assert [path.name for path in trained] == ["00.jpg", "02.jpg", "03.jpg", "04.jpg", "06.jpg"]
    assert trained[-1].parent.name == "sub"
    assert (trained[1].with_suffix(".txt")).read_text(encoding="utf-8") == "caption 2"
    assert train == {**entry, "folder_path": train["folder_path"]}
    assert (held_out["num_repeats"], held_out["flip_x"], held_out["resolution"]) == (1, False, 64)
    assert len(find_images(source)) == 7


def test_a_photo_that_two_datasets_hold_is_held_out_of_both(tmp_path: Path) -> None:
    source, other = folder_of(tmp_path / "a", 4), folder_of(tmp_path / "b", 1)
    entries = [{"folder_path": str(folder), "caption_ext": ".txt"} for folder in (source, source, other)]
    split = split_photos(entries, tmp_path / "out", 1)
    assert [[len(find_images(Path(entry["folder_path"]))) for entry in half] for half in split] == [[3, 3, 1], [1]]


def test_photos_of_another_folder_are_validated_on_once(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"--validation .*folder not found"):
        validation_entry({}, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifyError, match=r"--validation .*no images"):
        validation_entry({}, tmp_path / "empty")
    entry = validation_entry({"folder_path": "a", "num_repeats": 5, "resolution": 64}, folder_of(tmp_path / "v", 3))
    assert (entry["folder_path"], entry["num_repeats"], entry["resolution"]) == (str(tmp_path / "v"), 1, 64)


# -- the judgement: every outcome, on numbers that can be checked by hand or in a table --------------------------------

LOSSES = [1.00, 1.02, 1.04]  # of bf16; standard deviation 0.02
TABLE = {1: 12.7062047362, 2: 4.3026527297, 3: 3.1824463053, 4: 2.7764451052, 9: 2.2621571628, 10: 2.2281388520}
TABLE |= {14: 2.1447866879, 15: 2.1314495456, 30: 2.0422724563, 99: 1.9842169516}


def judged(*gaps: float, bf16: list[float] = LOSSES, base: float | None = 2.0) -> Judgement:
    return judge(bf16, [loss + gap for loss, gap in zip(bf16, gaps, strict=True)], base)


@pytest.mark.parametrize(("freedom", "table"), TABLE.items())
def test_student_quantiles_are_those_of_the_tables(freedom: int, table: float) -> None:
    assert student_quantile(freedom) == pytest.approx(table, rel=tolerances.STUDENT_RTOL)


def test_the_interval_is_students() -> None:
    judgement = judged(0.001, 0.002, 0.003)
    half = 4.3026527297 * 0.001 / math.sqrt(3)
    assert judgement.gap == pytest.approx(0.002)
    assert (judgement.low, judgement.high) == pytest.approx((0.002 - half, 0.002 + half))
    assert judgement.spread == pytest.approx(0.02)
    assert judgement.seeds == 3


@pytest.mark.parametrize(
    ("gaps", "outcome", "more_seeds", "words"),
    [
        ((0.001, 0.002, 0.003), LOSSLESS, None, "0.002 above bf16's (95% confidence interval -0.00048 to +0.0045)"),
        ((0.0, 0.0, 0.0), LOSSLESS, None, "within the spread"),
        ((0.099, 0.1, 0.101), NOT_LOSSLESS, None, "0.1 above bf16's"),
        ((-0.099, -0.1, -0.101), NOT_LOSSLESS, None, "0.1 below bf16's"),
        ((0.018, 0.019, 0.024), UNDECIDED, None, "more than 50 seeds"),
        ((0.03, 0.021, 0.022), UNDECIDED, 8, "run with --seeds 8"),
        # half width t · 0.01 / sqrt(n): 0.0248 at 3 seeds, 0.0159 at 4
        ((-0.01, 0.0, 0.01), UNDECIDED, 4, "run with --seeds 4"),
        ((0.01, 0.02, 0.03), UNDECIDED, None, "more than 50 seeds"),
    ],
)
def test_outcomes(gaps: tuple[float, ...], outcome: str, more_seeds: int | None, words: str) -> None:
    judgement = judged(*gaps)
    assert (judgement.outcome, judgement.more_seeds) == (outcome, more_seeds)
    assert judgement.sentence.startswith(outcome)
    assert words in judgement.sentence


@pytest.mark.parametrize(
    ("bf16", "base", "words"),
    [
        ([1.0, 1.0, 1.0], 2.0, "exactly the same loss"),
        (LOSSES, 1.03, "1 of 3 bf16 runs (first: number 3, loss 1.040000)"),
        (LOSSES, 1.04, "1 of 3 bf16 runs (first: number 3, loss 1.040000)"),
    ],
)
def test_bf16_runs_that_measure_nothing_are_named(bf16: list[float], base: float, words: str) -> None:
    judgement = judged(0.0, 0.0, 0.0, bf16=bf16, base=base)
    assert judgement.outcome == UNDECIDED
    assert words in judgement.sentence


def test_coat_that_is_not_finite_is_not_lossless() -> None:
    assert judge(LOSSES, [1.0, math.nan, 1.0]).outcome == NOT_LOSSLESS
    assert broken("it died", 3).sentence == "not lossless here: it died"


@pytest.mark.parametrize(("bf16", "coat"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([math.inf, 1.0], [1.0, 1.0])])
def test_losses_that_cannot_be_compared_are_refused(bf16: list[float], coat: list[float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        judge(bf16, coat)
