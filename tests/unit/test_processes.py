"""Several processes of one run, as far as one process can tell: what is the same run, and how they may be started."""

import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from coat_flux.base.interrupts import Interrupts
from coat_flux.config.job import JobConfig
from coat_flux.trainers import processes
from coat_flux.trainers.ai_toolkit.loop import Team
from coat_flux.trainers.processes import LaunchError, joint_job, require_launch
from coat_flux.trainers.standalone.workers import Workers
from tests.helpers.engine_job import engine_job

FSDP = {"ACCELERATE_USE_FSDP": "true"}
FSDP2 = {**FSDP, "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ("DeepSpeed", "ddp.yaml", "fsdp2.yaml")),
        (FSDP, ("only FSDP2",)),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, ("offload_params: true",)),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, ("reshard_after_forward: false", "write true")),
        ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false"}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "false", "FSDP_OFFLOAD_PARAMS": "true"}, None),
    ],
)
def test_launches_that_cannot_train_are_refused(environment, words):
    if words is None:
        require_launch(environment)
        return
    with pytest.raises(LaunchError) as refused:
        require_launch(environment)
    assert all(word in str(refused.value) for word in words)


def test_a_refused_launch_is_an_error_as_is_one_of_several_that_started_one(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(LaunchError, match="DeepSpeed"):
        Workers("cpu")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    Workers("cpu").close()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(LaunchError, match="--multi_gpu --num_processes N"):
        Workers("cpu")


def job_of(folder: Path, *, full: bool = False, **blocks: Any) -> JobConfig:
    job = engine_job("shared", model=folder, images=folder / "images", out=folder / "out", **blocks)
    if full:
        del job["config"]["process"][0]["network"]
    return JobConfig.from_dict(job)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({}, r"coat\.weight\.use_fp8: true"),
        ({"coat": {"memory": {"transposed_weights": "always"}}}, "transposed_weights='always'"),
        ({"full": True}, "coat_fp8_adamw"),
        ({"full": True, "coat": {"optimizer": {"offload": "cpu"}}}, "offload='cpu'"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path, job, message):
    with pytest.raises(LaunchError, match=message):
        joint_job(job_of(tmp_path, **job), shares=True)


def test_a_job_of_several_processes(tmp_path):
    lora, full = job_of(tmp_path, coat={}), job_of(tmp_path, full=True, coat={})
    assert joint_job(lora, shares=False) is lora
    shared = joint_job(lora, shares=True).coat
    assert (shared.memory.stream_blocks, shared.speed.measure) == ("all", "never")
    shared = joint_job(full, shares=True).coat
    assert (shared.memory.stream_blocks, shared.memory.transposed_weights) == (0, "never")  # no codes are kept
    with pytest.raises(LaunchError, match=r"train\.fused_backward"):
        joint_job(job_of(tmp_path, full=True, coat={}, train={"fused_backward": True}), shares=False)


def test_gradients_are_summed_in_buckets(monkeypatch):
    sizes: list[int] = []

    def double(flat: torch.Tensor) -> None:
        sizes.append(flat.numel())
        flat.mul_(2)

    monkeypatch.setattr(processes.dist, "all_reduce", double)
    monkeypatch.setattr(processes, "BUCKET_BYTES", 40)
    params = [torch.nn.Parameter(torch.full((n,), float(n))) for n in (4, 6, 1, 20, 3)]
    for param in params[:-1]:
        param.grad = param.detach().clone()
    team = object.__new__(processes.Processes)
    team.size = 2
    team.sum_gradients(params)
    assert sizes == [10, 1, 20, 3]
    assert [param.grad.tolist() for param in params] == [[2.0 * n] * n for n in (4, 6, 1, 20)] + [[0.0] * 3]
    mean = object.__new__(Team)
    mean.size, mean.averages = 2, True  # as ai-toolkit accumulates from 0.13 on
    mean.sum_gradients(iter(params))
    assert params[3].grad.tolist() == [2.0 * 20] * 20


def test_the_launchers_signal_does_not_end_a_process_that_has_yet_to_say_why(monkeypatch):
    monkeypatch.setattr(processes.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 2)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            pytest.raises(processes.LostProcessError, match="process 0 of 2: closed by peer"),
            Interrupts(lambda _: None),
            processes.exchange(),
        ):
            raise RuntimeError("closed by peer")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_inside_ai_toolkit_do_not_move_each_others_pictures():
    """As its `save_image_atomic` does with all that is in its folder for unfinished files."""
    team = object.__new__(Team)
    team.size, team.rank = 2, 1
    own = team.share_of([Mock(output_filename_no_ext=f"7_[count]_{i}") for i in range(4)])
    assert [picture.output_filename_no_ext for picture in own] == ["7_1_1", "7_3_3"]
    assert all(picture.save_image_atomic is picture.save_image for picture in own)
