"""Bucket sizes and the crop to them, the samples of a folder, the order of their batches, which are held out."""

import importlib.util
import itertools
import json
import math
import os
import shutil
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from coat_flux.config.job_sections import DatasetSection
from coat_flux.data.buckets import STEP, Bucket, Sample, bucket_for, fit_to_bucket
from coat_flux.data.files import DatasetError, find_images
from coat_flux.data.hold_out import choose_hold_out
from coat_flux.data.loader import Batch, BucketBatchSampler
from coat_flux.data.preflight import DataReport, check_data
from coat_flux.saves.repair import describe_lowest
from tests.helpers.engine_job import write_images
from tests.reliability.bad_configs import job_with
from tests.reliability.photos import noise

SIDES = st.integers(1, 6000)
RESOLUTIONS = st.sampled_from([256, 512, 640, 768, 1024, 1328])
COUNTS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(SIDES, SIDES, RESOLUTIONS)
def test_a_bucket_is_within_the_budget_and_a_step_of_the_ideal_sides(width, height, resolution):
    bucket = bucket_for(width, height, resolution)
    assert bucket.width % STEP == bucket.height % STEP == 0
    assert bucket.width >= STEP <= bucket.height
    assert bucket.width * bucket.height <= resolution * resolution
    assert bucket.width < width + STEP  # not enlarged beyond rounding
    assert bucket.height < height + STEP
    scale = min(1.0, resolution / math.sqrt(width * height))
    assume(min(width, height) * scale >= STEP)
    assert abs(bucket.width - width * scale) < STEP
    assert abs(bucket.height - height * scale) < STEP


def test_fit_crops_the_centre_and_keeps_the_aspect():
    pixels = np.zeros((64, 192, 3), dtype=np.uint8)
    pixels[:, 64:128] = 255
    assert np.asarray(fit_to_bucket(Image.fromarray(pixels), Bucket(64, 64))).min() == 255
    tall = np.asarray(fit_to_bucket(Image.fromarray(pixels.transpose(1, 0, 2)), Bucket(32, 32)))
    assert tall[4:-4].min() == 255
    exact = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(fit_to_bucket(Image.fromarray(exact), Bucket(64, 32))), exact)


@pytest.mark.aitk
def test_buckets_are_ai_toolkits():
    file = Path(os.environ["AI_TOOLKIT_ROOT"]) / "toolkit" / "buckets.py"
    spec = importlib.util.spec_from_file_location("host_buckets", file)
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    for width, height in np.random.default_rng(0).integers(64, 5000, (3000, 2)).tolist():
        for resolution in (512, 768, 1024):
            theirs = host.get_bucket_for_image_size(width, height, resolution, 32)
            ours = bucket_for(width, height, resolution)
            assert (ours.width, ours.height) == (theirs["width"], theirs["height"]), (width, height, resolution)


def config(folder, **changes):
    return DatasetSection(**{"folder_path": str(folder), "resolution": (64,), **changes})


def scan(configs, trigger=None):
    return DataReport(configs, trigger).usable()


def photo(path, size=(64, 64), caption=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(size, seed=zlib.crc32(path.name.encode())).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def test_finds_the_hosts_formats_recursively_sorted_without_hidden_files(tmp_path):
    wanted = ["B.JPG", "a.png", "c.jpeg", "sub/d.webp", "sub/deep/e.png"]
    for name in [*wanted, ".hidden.png", ".thumbs/t.png", "_controls/k.png", "f.bmp"]:
        photo(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == wanted


def test_each_image_at_each_resolution_with_its_final_caption(tmp_path):
    photo(tmp_path / "a.png", (128, 128), "a [trigger] shirt")
    photo(tmp_path / "b.png", (128, 64), "a coat")
    samples = scan([config(tmp_path, resolution=(64, 128))], "ohwx")
    assert [(s.image_path.name, s.caption, s.bucket) for s in samples] == [
        ("a.png", "a ohwx shirt", Bucket(64, 64)),
        ("b.png", "ohwx a coat", Bucket(64, 64)),
        ("a.png", "a ohwx shirt", Bucket(128, 128)),
        ("b.png", "ohwx a coat", Bucket(128, 64)),
    ]
    assert {s.dropped_caption for s in samples} == {"ohwx"}
    assert {s.dropped_caption for s in scan([config(tmp_path)])} == {""}
    assert {s.bucket for s in scan([config(tmp_path, buckets=False)])} == {Bucket(64, 64)}
    photo(tmp_path / "two" / "c.png", caption="c")
    two = scan([config(tmp_path, num_repeats=2, flip_x=True), config(tmp_path / "two")])
    repeated = [(0, name, flip) for flip in (False, True) for name in ("a.png", "b.png", "c.png") for _ in range(2)]
    assert sorted((s.dataset_index, s.image_path.name, s.flip) for s in two) == sorted([*repeated, (1, "c.png", False)])


def make_samples(counts):
    return [
        Sample(Path(f"{width}-{i}.png"), "", Bucket(32 * (width + 1), 32), 0)
        for width, count in enumerate(counts)
        for i in range(count)
    ]


def take(sampler, count):
    return list(islice(sampler, count))


@given(COUNTS, st.integers(1, 4), st.integers(0, 3))
def test_an_epoch_has_every_sample_in_batches_of_one_size(counts, batch_size, seed):
    samples = make_samples(counts)
    sampler = BucketBatchSampler(samples, batch_size, seed)
    batches = take(sampler, sampler.batches_per_epoch)
    seen = Counter(i for batch in batches for i in batch.indices)
    assert set(seen) == set(range(len(samples)))
    assert all(len(batch.indices) == batch_size for batch in batches)
    assert all(len({samples[i].bucket for i in batch.indices}) == 1 for batch in batches)
    for size in {sample.bucket for sample in samples}:
        repeats = [seen[i] for i, sample in enumerate(samples) if sample.bucket == size]
        assert max(repeats) - min(repeats) <= 1
    assert [batch.draw for batch in batches] == list(range(len(batches)))


def test_order_depends_on_seed_and_epoch_only():
    samples = make_samples([9, 8])
    first, again, other = (take(BucketBatchSampler(samples, 2, seed), 18) for seed in (1, 1, 2))
    assert first == again
    assert first[:9] != other[:9]
    assert [b.indices for b in first[:9]] != [b.indices for b in first[9:]]
    assert [b.indices for b in take(BucketBatchSampler(samples, 1, 0), 4)] == [(3,), (14,), (2,), (9,)]


@given(COUNTS, st.integers(0, 25), st.integers(1, 3), st.integers(1, 3))
def test_ranks_share_out_the_sequence_of_one_process_and_a_resume_continues_it(counts, taken, before, after):
    samples = make_samples(counts)
    whole = take(BucketBatchSampler(samples, 2, 5), taken * before + 6 * after)
    ranks = [BucketBatchSampler(samples, 2, 5, rank, before) for rank in range(before)]
    shares = [take(sampler, taken) for sampler in ranks]
    assert [batch for together in zip(*shares, strict=True) for batch in together] == whole[: taken * before]
    resumed = BucketBatchSampler(samples, 2, 5, 0, after)
    resumed.load_state_dict(ranks[-1].state_dict())
    assert take(resumed, 6) == whole[taken * before :: after]


def test_resume_with_other_photos_goes_on_in_its_epoch():
    before = BucketBatchSampler(make_samples([8]), 1)
    take(before, 15)
    after = BucketBatchSampler(make_samples([3]), 1)
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["epoch"] == 2
    assert take(after, 1)[0] == Batch(after.epoch_batches(2)[0], 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("photos")
    return [write_images(root / "a", 12), write_images(root / "b" / "sub", 4).parent]


def names(chosen: tuple[tuple[Path, ...], ...]) -> list[list[str]]:
    return [[path.name for path in paths] for paths in chosen]


def test_a_number_is_spread_over_names_and_folders_and_follows_the_seed(folders):
    choices = [names(choose_hold_out(folders, 4, seed)) for seed in range(8)]
    assert {tuple(map(len, choice)) for choice in choices} == {(3, 1)}
    assert len({str(choice) for choice in choices}) > 1
    everything = sorted(folders[0].glob("*.png"))
    places = [everything.index(path) for path in choose_hold_out(folders, 4, 0)[0]]
    assert {after - before for before, after in itertools.pairwise(places)} == {4}
    assert names(choose_hold_out(folders, 4, None)) == names(choose_hold_out(folders, 4, 42))
    assert names(choose_hold_out(folders, None, 1)) == [[], []]


def test_names_hold_out_every_photo_of_that_name_and_linked_ones(folders, tmp_path):
    assert names(choose_hold_out(folders, ["3.png"], 0)) == [["3.png"], ["3.png"]]
    assert names(choose_hold_out(folders, ["sub/3.png"], 0)) == [[], ["3.png"]]
    (tmp_path / "linked.png").symlink_to(folders[0] / "7.png")
    shutil.copy(folders[0] / "8.png", tmp_path)
    assert names(choose_hold_out([*folders, tmp_path], ["7.png"], 0)) == [["7.png"], [], ["linked.png"]]


@pytest.mark.parametrize(
    ("hold_out", "message"),
    [
        (16, "at most 15"),
        (["3.pgn"], "'3.pgn' is not a photo of any dataset; did you mean '3.png'"),
        (["0.png", "1.png", "2.png", "3.png"], r"leaves no photo of datasets\[1\]"),
    ],
)
def test_what_cannot_be_held_out_is_said_by_check(hold_out, message, folders):
    with pytest.raises(DatasetError, match=message):
        choose_hold_out(folders, hold_out, 0)
    datasets = [{"folder_path": str(folder)} for folder in folders]
    errors, _ = check_data(job_with({"validation": {"hold_out": hold_out}, "datasets": datasets}))
    assert [line.startswith("validation.hold_out") for line in errors] == [True]


@pytest.mark.parametrize(
    ("files", "entry", "arch", "refused", "warned"),
    [
        (("a.mov", "a.txt"), {"auto_frame_count": True}, "wan21", [], []),
        (("a.mp3", "a.txt"), {}, "ace_step_15", [], []),
        (("a.mp4", "a.txt"), {"num_frames": 1}, "wan21", ["has no images"], ["num_frames"]),
        (("a.mp4",), {"num_frames": 33}, "wan21", [], ["1 of 1 files have no .txt caption"]),
        (("list.json",), {"dataset_path": "list.json"}, "flux", [], ["list.json: is a list"]),
    ],
)
def test_files_without_photos_that_ai_toolkit_reads_pass(files, entry, arch, refused, warned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).write_text("{}")
    changes = {"type": "sd_trainer", "model": {"arch": arch}, "datasets": [{"folder_path": str(tmp_path), **entry}]}
    for lines, expected in zip(check_data(job_with(changes)), (refused, warned), strict=True):
        assert [part in line for part, line in zip(expected, lines, strict=True)] == [True] * len(expected), lines
    errors, _ = check_data(job_with({**changes, "validation": {"hold_out": 1}}))
    assert any("hold_out=1" in line for line in errors)


def test_the_lowest_names_the_file_of_its_step_or_the_nearest(tmp_path):
    def save(file: Path, step: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"a": torch.zeros(1)}, file, {"training_info": json.dumps({"step": step, "epoch": 0})})

    curve = [(0, 3.0), (2, 1.0), (4, float("nan")), (6, 2.0)]
    assert "1.000000 at step 2 (nothing is saved)" in describe_lowest(curve, tmp_path, "r")
    for name, step in (("r_000000003", 4), ("r", 6), ("rather_000000002", 2)):
        save(tmp_path / f"{name}.safetensors", step)
    told = describe_lowest(curve, tmp_path, "r")
    assert "step 2 (not saved; the nearest is r_000000003.safetensors, step 4); 2.000000 at step 6" in told
    assert "step 6 (r.safetensors)" in describe_lowest([(0, 3.0), (6, 2.0)], tmp_path, "r")
    save(tmp_path / "r_000000001" / "transformer" / "model.safetensors", 2)  # a whole model
    assert "step 2 (r_000000001)" in describe_lowest(curve, tmp_path, "r")
    assert describe_lowest([(0, float("nan"))], tmp_path, "r") == "the held-out loss was never finite"
