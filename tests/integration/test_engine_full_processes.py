"""Full fine-tuning by several processes over gloo, against one process with as much accumulation."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coat_flux.saves.commit import newest_set
from coat_flux.trainers.full import PART
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests import tolerances
from tests.helpers.driver import until
from tests.helpers.engine_job import engine_job, write_images
from tests.helpers.operators import bits
from tests.helpers.tiny_flux import make_tiny_flux
from tests.helpers.together import Together, needs_fork, train_together
from tests.integration.test_engine_processes import losses

pytestmark = [needs_fork]

# parts that are not trained, and so in codes or frozen, among them the embedding that all blocks share: with FSDP2 its
# gradients are added up block by block, which rounds otherwise; clipping at a norm that every step reaches
PARTLY = {"exclude": ["time_text_embed.*", "*.attn.to_k", "context_embedder", "*.norm1.linear"]}
AVERAGED = {"max_grad_norm": 0.05, "ema_config": {"use_ema": True, "ema_decay": 0.5}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("full_processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coat_flux.trainers.standalone.loading.MAX_TEXT_TOKENS", 16)
        yield {"model": make_tiny_flux(root / "tiny"), "images": write_images(root / "images"), "out": root / "out"}


def job_of(place: dict[str, Path], name: str, steps: int, accumulation: int, **blocks: Any) -> dict[str, Any]:
    settings = {"steps": steps, "gradient_accumulation": accumulation, **blocks.pop("train", {})}
    cache = {"cache_latents": False, "cache_latents_to_disk": True}
    save = {"save_every": 2, "dtype": "bf16"}
    job = engine_job(name, **place, coat=blocks.pop("coat", {}), train=settings, dataset=cache, save=save, **blocks)
    del job["config"]["process"][0]["network"]
    return job


def watched(place: dict[str, Path], name: str, steps: int, accumulation: int, **resume: Any) -> dict[str, Any]:
    """With recomputation, and all that processes run the model for together: samples, a loss on a photo held out."""
    train = {**AVERAGED, "disable_sampling": False, "gradient_checkpointing": True}
    coat = {**PARTLY, "resume": resume, "memory": {"checkpointing": "all"}}
    return job_of(place, name, steps, accumulation, train=train, coat=coat, validation={"hold_out": 1, "every": 2})


def set_of(run: Path) -> Path:
    folder = newest_set(run)
    assert folder is not None
    return folder


def model_of(run: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((run / run.name / PART).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Raw weights, their average and the optimizer's state, by what they are, of the newest set."""
    folder = set_of(run)
    files = [path for path in folder.glob("*.safetensors") if path.name != "rng.safetensors"]
    tensors = {f"{path.name} {key}": x for path in files for key, x in load_file(path).items()}
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["params"] == list(saved["state"])
    return tensors | {f"{index} {key}": x for index, state in saved["state"].items() for key, x in state.items()}


def assert_same_files(run: Path, other: Path) -> None:
    folders = set_of(run), set_of(other)
    names = [sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in folders]
    assert names[0] == names[1]
    configs = [json.loads((folder / "published" / PART / "config.json").read_text()) for folder in folders]
    assert configs[0] == configs[1]


def assert_to_the_bit(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(bits(tensor), bits(right[name]))] == []


def layers_observed(run: Path) -> set[tuple[str, ...]]:
    """Step, layer and kind of the casts of a health step."""
    with (run / "coat" / "precision.csv").open(encoding="utf-8") as file:
        return {tuple(row.values())[:3] for row in csv.DictReader(file)}


def values_of(run: Path) -> dict[str, torch.Tensor]:
    """Raw weights where they are kept, else those of the model."""
    raw = set_of(run) / "lora.safetensors"
    return load_file(raw) if raw.exists() else model_of(run)


def distance(place: dict[str, Path], run: Path, other: Path) -> float:
    """Between the weights of two runs, relative to what training has changed in the second."""
    left, right, start = values_of(run), values_of(other), {}
    for path in (place["model"] / PART).glob("*.safetensors"):
        start |= load_file(path)
    assert left.keys() == right.keys()
    difference = sum(float((left[name].float() - right[name].float()).square().sum()) for name in left)
    change = sum(float((right[name].float() - start[name].bfloat16().float()).square().sum()) for name in left)
    return float((difference / change) ** 0.5)


def test_under_fsdp2_one_two_and_three_processes_are_one_run(
    place: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: losses, held-out losses, weights, their average and moments; and after a resume by one process.

    Three photos a step are another run than two, so `allow` names it; one process resumes with accumulation 3.
    """
    out = train_together(watched(place, "two", 2, 1), 2, fsdp2=True)
    assert out.count("Saved the model to") == 1
    assert out.count("FSDP2: each of 2 processes keeps about") == 1
    two = place["out"] / "two"
    three, alone = ({**place, "out": place["out"].with_name(name)} for name in ("three", "alone"))
    for copy in (three, alone):
        shutil.copytree(two, copy["out"] / "two")
    one = COATTrainer(watched(place, "one", 2, 2)).train().parent
    assert_same_files(two, one)
    tables = [(run / "coat" / "validation.csv").read_text() for run in (two, one)]
    assert tables[0] == tables[1]
    assert layers_observed(two) == layers_observed(one)
    assert len(list((two / "samples").glob("*.jpg"))) == 2
    assert_to_the_bit(model_of(two), model_of(one))
    for name in ("two", "one"):
        COATTrainer(watched(place, name, 3, 2)).train()
    assert losses(two) == losses(one)
    assert_to_the_bit(state_of(two), state_of(one))

    train_together(watched(three, "two", 3, 1, allow=["world_size"]), 3, fsdp2=True)
    monkeypatch.setattr("coat_flux.trainers.standalone.resume.require_same_run", lambda *_: [])
    COATTrainer(watched(alone, "two", 3, 3)).train()
    left, right = three["out"] / "two", alone["out"] / "two"
    assert_same_files(left, right)
    assert losses(left) == pytest.approx(losses(right), rel=tolerances.PROCESSES_LOSS_RTOL)
    assert distance(place, left, right) < tolerances.FULL_PROCESSES_DISTANCE


def test_without_fsdp2_two_processes_are_one_with_accumulation_two(place: dict[str, Path]) -> None:
    """Everything is trained; each process has all of it."""
    train_together(job_of(place, "whole", 2, 1), 2)
    one = COATTrainer(job_of(place, "whole_alone", 2, 2)).train().parent
    run = place["out"] / "whole"
    assert losses(run) == losses(one)
    assert_to_the_bit(state_of(run), state_of(one))
    assert_to_the_bit(model_of(run), model_of(one))


def test_a_killed_process_ends_the_others(place: dict[str, Path]) -> None:
    """Everything is trained; the other process meets the dead one in an exchange of FSDP2's."""
    run = place["out"] / "killed"
    both = Together(job_of(place, "killed", 1000, 1), 2, fsdp2=True)
    table = run / "coat" / "metrics.csv"
    until(lambda: table.is_file() and len(losses(run)) >= 3, 120, "three steps")
    os.kill(both.children[1], signal.SIGKILL)
    codes, out = both.end()
    assert codes[0] > 0
    assert codes[1] == -signal.SIGKILL
    assert out.count("LostProcessError: another process of this run has ended or does not answer") == 1, out
    done, steps = len(losses(run)), int(set_of(run).name.partition("-")[2])
    assert steps in (done, done - 1)
    COATTrainer(job_of(place, "killed", steps + 1, 2)).train()
    one = COATTrainer(job_of(place, "never_killed", steps + 1, 2)).train().parent
    assert losses(run) == pytest.approx(losses(one), rel=tolerances.FULL_PROCESSES_LOSS_RTOL)
