"""Several processes over gloo, of a LoRA and of full fine-tuning, against one process with as much accumulation."""

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from coat_flux.saves.commit import newest_set, set_step
from coat_flux.trainers.full import PART
from coat_flux.trainers.standalone.trainer import COATTrainer
from tests import tolerances
from tests.architecture.sources import ROOT
from tests.helpers.asserts import assert_all_bitwise
from tests.helpers.driver import until
from tests.helpers.engine_job import FEW_LINEARS, ON_DISK, assert_same_end, engine_job, full_job, losses, tensors_in
from tests.reliability.forks import fork, wait

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, with which processes start at once")

# as `accelerate launch` passes configs/accelerate/fsdp2.yaml on
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
DEADLINE_S = 240


class Together:
    """Processes that train a job over gloo; `children` are their numbers, by rank."""

    def __init__(self, job: dict[str, Any], processes: int, *, fsdp2: bool = False) -> None:
        self._job = job
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = job["config"]
        self._output = Path(config["process"][0]["training_folder"]) / f"{config['name']}.txt"
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text("")
        self._environment = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        self._environment |= {"MASTER_PORT": port, **(FSDP2 if fsdp2 else {})}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a fork of a process with threads may wait for ever for a lock
        try:
            self.children = [fork(lambda rank=rank: self._train(rank), DEADLINE_S) for rank in range(processes)]
        finally:
            torch.set_num_threads(threads)

    def _train(self, rank: int) -> None:
        output = os.open(self._output, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        own = {**self._environment, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in own.items()})
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            COATTrainer(self._job).train()
        except SystemExit as end:  # of one that leaves it to another to say why
            os._exit(int(end.code))

    def end(self) -> tuple[list[int], str]:
        """Wait for all; exit codes by rank, and what they printed."""
        return [wait(child) for child in self.children], self._output.read_text(encoding="utf-8")


def train_together(job: dict[str, Any], processes: int, *, fsdp2: bool = False) -> str:
    codes, output = Together(job, processes, fsdp2=fsdp2).end()
    assert codes == [0] * processes, output[-3000:]
    return output


LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
LAUNCH += [str(ROOT / "configs" / "accelerate" / "ddp.yaml"), "--num_processes", "2", "-m", "coat_flux.cli", "train"]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "extensions")])

# parts that are not trained, and so in codes or frozen, among them the embedding that all blocks share: with FSDP2 its
# gradients are added up block by block, which rounds otherwise; clipping at a norm that every step reaches
PARTLY = {"exclude": ["time_text_embed.*", "*.attn.to_k", "context_embedder", "*.norm1.linear"]}
AVERAGED = {"max_grad_norm": 0.05, "ema_config": {"use_ema": True, "ema_decay": 0.5}}


def lora_job(place: dict[str, Path], name: str, steps: int, accumulation: int, **coat: Any) -> dict[str, Any]:
    settings = {"steps": steps, "lr": 1e-2, "gradient_accumulation": accumulation}
    blocks = {"network": FEW_LINEARS, "dataset": ON_DISK, "save": {"save_every": 2}}
    coat = {"optimizer": {"stochastic_rounding": True}, **coat}
    return engine_job(name, **place, coat=coat, train=settings, **blocks)


def full(place: dict[str, Path], name: str, steps: int, accumulation: int, **blocks: Any) -> dict[str, Any]:
    train = {"steps": steps, "gradient_accumulation": accumulation, **blocks.pop("train", {})}
    blocks = {"coat": {}, "dataset": ON_DISK, "save": {"save_every": 2, "dtype": "bf16"}, **blocks}
    return full_job(name, place, train=train, **blocks)


def watched(place: dict[str, Path], name: str, steps: int, accumulation: int, **resume: Any) -> dict[str, Any]:
    """With recomputation, and all that processes run the model for together: samples, a loss on a photo held out."""
    train = {**AVERAGED, "disable_sampling": False, "gradient_checkpointing": True}
    coat = {**PARTLY, "resume": resume, "memory": {"checkpointing": "all"}}
    return full(place, name, steps, accumulation, train=train, coat=coat, validation={"hold_out": 1, "every": 2})


def copies_of(place: dict[str, Path], name: str) -> list[dict[str, Path]]:
    places = [{**place, "out": place["out"].with_name(f"{name}_{part}")} for part in ("three", "alone")]
    for copy in places:
        shutil.copytree(place["out"] / name, copy["out"] / name)
    return places


def steps_of(run: Path) -> int:
    return len(losses(run)) if (run / "coat" / "metrics.csv").is_file() else 0


def check_saved_step(run: Path) -> int:
    """The step of the newest set of a killed run, which saves every two steps; the kill may come while it does."""
    step = set_step(newest_set(run))
    assert 0 <= steps_of(run) - step <= 2
    return step


def assert_near(run: Path, other: Path, rtol: float) -> None:
    pairs = zip(losses(run), losses(other), strict=True)
    assert all(float(one) == pytest.approx(float(two), rel=rtol) for one, two in pairs)


# -- a LoRA ------------------------------------------------------------------------------------------------------------
def assert_same_lora(run: Path, other: Path) -> None:
    """Within fp32 rounding; the LoRAs are the two folders' only ones without a step in their names."""
    assert_near(run, other, tolerances.PROCESSES_LOSS_RTOL)
    left, right = (load_file(folder / f"{folder.name}.safetensors") for folder in (run, other))
    assert left.keys() == right.keys()
    bounds = {"rtol": tolerances.PROCESSES_LORA_RTOL, "atol": tolerances.PROCESSES_LORA_ATOL}
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], **bounds, msg=name)


@needs_fork
def test_one_two_and_three_processes_are_one_run(place, monkeypatch):
    """Two are one with accumulation two, which resumes them; three resume them where `allow` names it."""
    out = train_together(lora_job(place, "two", 2, 1), 2)
    run = place["out"] / "two"
    assert out.count("Saved the LoRA to") == 1
    assert len(list((run / "coat" / "tensorboard").iterdir())) == 1
    three, alone = copies_of(place, "two")
    one = COATTrainer(lora_job(place, "one", 3, 2)).train().parent
    COATTrainer(lora_job(place, "two", 3, 2)).train()
    assert_same_lora(run, one)

    codes, out = Together(lora_job(three, "two", 3, 1), 3).end()
    assert 0 not in codes
    assert out.count("ResumeError: ") == out.count("world_size 2 -> 3") == 1  # by one of the three processes
    train_together(lora_job(three, "two", 3, 1, resume={"allow": ["world_size"]}), 3)
    monkeypatch.setattr("coat_flux.trainers.standalone.saving.require_same_run", lambda *_: [])
    COATTrainer(lora_job(alone, "two", 3, 3)).train()
    assert_same_lora(three["out"] / "two", alone["out"] / "two")


@needs_fork
def test_with_fsdp2_two_processes_share_the_frozen_codes_out_and_are_one(place):
    """With samples, and photos held out, measured and redrawn, for which all processes run the transformer."""
    shared, alone = lora_job(place, "shared", 2, 1), lora_job(place, "not_shared", 2, 2)
    for job in (shared, alone):
        job["config"]["process"][0]["validation"] = {"hold_out": 1, "every": 2, "fidelity": True}
    shared["config"]["process"][0]["train"]["disable_sampling"] = False
    out = train_together(shared, 2, fsdp2=True)
    assert out.count("FSDP2: each of 2 processes keeps 0.00 GB of the blocks' codes") == 1
    run, one = place["out"] / "shared", COATTrainer(alone).train().parent
    assert_same_lora(run, one)
    for table in ("validation.csv", "fidelity.csv"):
        assert (run / "coat" / table).read_text() == (one / "coat" / table).read_text()
    assert len(list((run / "samples").glob("*.jpg"))) == 2


def test_a_killed_process_ends_all_with_one_message(place):
    """As users start it: the launcher ends with an error, and one process says why."""
    config, run = place["out"].parent / "killed.yaml", place["out"] / "killed"
    config.write_text(yaml.safe_dump(lora_job(place, "killed", 1000, 1)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen([*LAUNCH, str(config)], env=environment, **streams)
    until(lambda: steps_of(run) >= 3, 180, "three steps")
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    victim.kill()
    out, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert out.count("error: ") == out.count("error: another process of this run has ended") == 1
    check_saved_step(run)


# -- full fine-tuning --------------------------------------------------------------------------------------------------
def assert_same_files(run: Path, other: Path) -> None:
    folders = newest_set(run), newest_set(other)
    names = [sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in folders]
    assert names[0] == names[1]
    configs = [(folder / "published" / PART / "config.json").read_text() for folder in folders]
    assert configs[0] == configs[1]


def layers_observed(run: Path) -> set[tuple[str, ...]]:
    with (run / "coat" / "precision.csv").open(encoding="utf-8") as file:
        return {tuple(row.values())[:3] for row in csv.DictReader(file)}


def distance(place: dict[str, Path], run: Path, other: Path) -> float:
    """Between the raw weights of two runs, relative to what training has changed in the second."""
    left, right = (load_file(newest_set(folder) / "lora.safetensors") for folder in (run, other))
    start = tensors_in(place["model"] / PART)
    assert left.keys() == right.keys()
    difference = sum(float((left[name].float() - right[name].float()).square().sum()) for name in left)
    change = sum(float((right[name].float() - start[name].bfloat16().float()).square().sum()) for name in left)
    return float((difference / change) ** 0.5)


@pytest.fixture(scope="module")
def full_two(place: dict[str, Path]) -> tuple[str, list[dict[str, Path]]]:
    out = train_together(watched(place, "full_two", 2, 1), 2, fsdp2=True)
    return out, copies_of(place, "full_two")


@needs_fork
def test_under_fsdp2_two_processes_are_one_full_run(place, full_two):
    """To the bit: losses, held-out losses, weights, their average and moments; and after a resume by one process."""
    out, _ = full_two
    assert out.count("Saved the model to") == 1
    assert out.count("FSDP2: each of 2 processes keeps about") == 1
    two = place["out"] / "full_two"
    one = COATTrainer(watched(place, "full_one", 2, 2)).train().parent
    assert_same_files(two, one)
    tables = [(run / "coat" / "validation.csv").read_text() for run in (two, one)]
    assert tables[0] == tables[1]
    assert layers_observed(two) == layers_observed(one)
    assert len(list((two / "samples").glob("*.jpg"))) == 2
    assert_all_bitwise(tensors_in(two / two.name / PART), tensors_in(one / one.name / PART))
    for name in ("full_two", "full_one"):
        COATTrainer(watched(place, name, 3, 2)).train()
    assert_same_end(two, one)


@needs_fork
def test_under_fsdp2_three_processes_resume_the_full_run_of_two(place, full_two, monkeypatch):
    """Three photos a step are another run than two, so `allow` names it; one process resumes with accumulation 3."""
    _, (three, alone) = full_two
    train_together(watched(three, "full_two", 3, 1, allow=["world_size"]), 3, fsdp2=True)
    monkeypatch.setattr("coat_flux.trainers.standalone.saving.require_same_run", lambda *_: [])
    COATTrainer(watched(alone, "full_two", 3, 3)).train()
    left, right = three["out"] / "full_two", alone["out"] / "full_two"
    assert_same_files(left, right)
    assert_near(left, right, tolerances.PROCESSES_LOSS_RTOL)
    assert distance(place, left, right) < tolerances.FULL_PROCESSES_DISTANCE


@needs_fork
def test_a_killed_process_ends_the_others_in_an_exchange_of_fsdp2(place):
    """Everything is trained."""
    run = place["out"] / "full_killed"
    both = Together(full(place, "full_killed", 1000, 1), 2, fsdp2=True)
    until(lambda: steps_of(run) >= 3, 120, "three steps")
    os.kill(both.children[1], signal.SIGKILL)
    codes, out = both.end()
    assert codes[0] > 0
    assert codes[1] == -signal.SIGKILL
    assert out.count("LostProcessError: another process of this run has ended or does not answer") == 1, out
    steps = check_saved_step(run)
    COATTrainer(full(place, "full_killed", steps + 1, 2)).train()
    one = COATTrainer(full(place, "full_never_killed", steps + 1, 2)).train().parent
    assert_near(run, one, tolerances.FULL_PROCESSES_LOSS_RTOL)
